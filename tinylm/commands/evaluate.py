"""tinylm eval: loss, perplexity and other metrics of a model on a text."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tinylm.commands.option_groups import command_line_flags, with_option_groups
from tinylm.commands.options import (
    ChatOptions,
    MachineOptions,
    OutputOptions,
    Panel,
    TextOptions,
    UnknownCharacterOptions,
    one_of,
    option,
    text_source,
)
from tinylm.commands.trained_model_options import AdapterOption, BeamSearchOptions, ModelOption
from tinylm.console import Console
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import BLEU_TOKENIZERS, SETTINGS_BY_ARCHITECTURE

if TYPE_CHECKING:
    from tinylm.evaluation.result import Evaluation


@dataclass(frozen=True)
class DecoderOptions:
    """Options for decoders only."""

    sequence_length: Annotated[
        int | None, option("Tokens per window (default: the context of the model).", None, "N")
    ] = None
    stride: Annotated[
        int | None,
        option(
            "Stride of the windows (default: their length); smaller gives each token more context.",
            None,
            "N",
        ),
    ] = None
    baselines: Annotated[
        bool, option("Compare with gzip, xz and an order-5 character model.", None, None, "--baselines")
    ] = False


@dataclass(frozen=True)
class BleuOptions:
    """An option for encoder-decoders only."""

    bleu_tokenize: Annotated[
        str | None,
        option(
            "sacrebleu tokenizer (default: 13a); none if the text is already tokenised.",
            Panel.ENCODER_DECODER,
            one_of(BLEU_TOKENIZERS),
        ),
    ] = None


@dataclass(frozen=True)
class EvaluateOptions:
    """All options of tinylm eval except model, device and output."""

    decoder: DecoderOptions
    beam_search: BeamSearchOptions
    bleu: BleuOptions
    text: TextOptions
    chat: ChatOptions
    unknown: UnknownCharacterOptions
    batch_size: Annotated[
        int | None,
        option("Windows, conversations or pairs per forward pass; affects speed and memory only.", None, "N"),
    ] = None


@with_option_groups
def evaluate_model(
    ctx: typer.Context,
    text: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text files (or pairs), or - for standard input (default: the run's validation text).",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    *,
    options: EvaluateOptions,
    machine: MachineOptions,
    output: OutputOptions,
) -> None:
    """Evaluate a model on a text: loss, perplexity and other metrics.

    Decoders: each token of a text except the first is scored once; in conversations, the answers are scored. Encoders:
    loss and accuracy on masked tokens. Encoder-decoders: also exact match rate, BLEU and chrF of the generated targets.
    """
    from tinylm.loaded_model import load

    text_options, chat, unknown = options.text, options.chat, options.unknown
    if not text and (unused := command_line_flags(ctx, text_options, chat, unknown)):
        raise UsageError(
            f"{', '.join(unused.values())} has no effect without a text; name a text to evaluate, or leave it out."
        )
    source = text_source(ctx, text, text_options, unknown.unknown, chat) if text else None
    console = output.console()
    loaded = load(model, adapters=adapter or (), **vars(machine), reporter=console)
    # Options from the environment or --config that the architecture does not use are dropped; on the command line they
    # are errors, which `evaluate` raises.
    groups = (options.decoder, options.beam_search, options.bleu)
    used = {*SETTINGS_BY_ARCHITECTURE[loaded.architecture], *command_line_flags(ctx, *groups)}
    settings = {name: value for group in groups for name, value in vars(group).items() if name in used}
    _print_metrics(console, loaded.evaluate(source, batch_size=options.batch_size, **settings))


def _print_metrics(console: Console, evaluation: "Evaluation") -> None:
    metrics = evaluation.to_json()
    if console.as_json:
        is_finite = math.isfinite(evaluation.perplexity)  # JSON has no infinity
        console.record(metrics if is_finite else metrics | {"perplexity": None})
        return
    baselines = metrics.pop("baselines", {})
    titles = {
        "loss": "nats per token",
        "perplexity": "perplexity",
        "bits_per_character": "bits per character",
        "bits_per_byte": "bits per byte",
        "accuracy": "accuracy",
        "exact_match": "exact match rate",
        "bleu": "BLEU",
        "chrf": "chrF",
        "pairs": "pairs",
    }
    rows = [(titles.get(key, f"{key} scored"), _format(value)) for key, value in metrics.items()]
    rows += [(f"bits per byte, {name}", f"{bits:.4f}") for name, bits in baselines.items()]
    console.table(("", ""), rows)


def _format(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
