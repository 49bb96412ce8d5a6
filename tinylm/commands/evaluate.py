"""tinylm eval: how well a model predicts a text."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tinylm.checks import check_numbers
from tinylm.commands.evaluate_masked import evaluate_masked
from tinylm.commands.evaluate_pairs import BleuOptions, evaluate_pairs
from tinylm.commands.evaluate_text import evaluate_text
from tinylm.commands.groups import typed, with_groups
from tinylm.commands.model import AdapterPaths, ModelPath, choose_where, open_model
from tinylm.commands.options import MachineOptions, OutputOptions, TextOptions, UnknownOptions, option
from tinylm.commands.reading import TextToScore
from tinylm.commands.sampling import SearchOptions
from tinylm.console import Console
from tinylm.errors import UsageError


@dataclass(frozen=True)
class WindowOptions:
    stride: Annotated[
        int | None,
        option("Stride of the sliding window in tokens (default: the context); smaller gives more context.", None, "N"),
    ] = None
    baselines: Annotated[
        bool, option("Compare with gzip, xz and an order-5 character model.", None, None, "--baselines")
    ] = False


@with_groups
def evaluate_model(
    invocation: typer.Context,
    text: Annotated[
        list[str] | None,
        typer.Argument(help="Text (or pairs), or -; default: the validation text of the run.", show_default=False),
    ] = None,
    model: ModelPath = None,
    adapter: AdapterPaths = None,
    batch_size: Annotated[int | None, option("Windows per forward pass; affects only speed.", None, "N")] = None,
    *,
    windows: WindowOptions,
    search: SearchOptions,
    bleu: BleuOptions,
    reading: TextOptions,
    unknown: UnknownOptions,
    machine: MachineOptions,
    output: OutputOptions,
) -> None:
    """Loss and perplexity of a model on a text; every token but the first is scored once."""
    from tinylm.model.decoder import Decoder
    from tinylm.model.encoder import Encoder
    from tinylm.model.encoder_decoder import EncoderDecoder

    console = output.console()
    check_numbers({"batch_size": batch_size, **vars(windows), **vars(search)})
    device, dtype = choose_where(console, machine)
    to_score = TextToScore(invocation, text, reading, unknown)
    opened = open_model(console, model, adapter, device)
    of_targets = typed(invocation, search, bleu)
    if of_targets and not isinstance(opened.network, EncoderDecoder):
        raise UsageError(f"{', '.join(of_targets.values())} is for encoder-decoder models; leave it out.")
    match opened.network:
        case Decoder():
            stride, baselines = windows.stride, windows.baselines
            result = evaluate_text(console, opened, to_score, dtype, stride, batch_size, baselines)
        case Encoder() as encoder:
            if typed(invocation, windows):
                raise UsageError("--stride and --baselines are for models that read from left to right.")
            result = evaluate_masked(console, opened, encoder, to_score, dtype, batch_size)
        case EncoderDecoder() as translator:
            if typed(invocation, windows):
                raise UsageError("--stride and --baselines are for models of text; this one makes targets of sources.")
            result = evaluate_pairs(console, opened, translator, to_score, dtype, batch_size, search, bleu)
        case _:
            raise UsageError(f"{opened.path} is of a kind that tinylm eval does not know.")
    _print(console, result)


def _print(console: Console, result: dict[str, Any]) -> None:
    if console.as_json:
        console.record(result)
        return
    baselines = result.pop("baselines", {})
    names = {
        "loss": "nats a token",
        "perplexity": "perplexity",
        "bits_per_character": "bits a character",
        "bits_per_byte": "bits a byte",
        "accuracy": "accuracy",
        "exact_match": "exact matches",
        "bleu": "BLEU",
        "chrf": "chrF",
    }
    rows = [(names.get(key, f"{key} scored"), _shown(value)) for key, value in result.items()]
    rows += [(f"bits a byte, {name}", f"{bits:.4f}") for name, bits in baselines.items()]
    console.table(("", ""), rows)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
