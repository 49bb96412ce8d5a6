"""tinylm eval: loss, perplexity and other metrics of a model on a text."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinylm.commands.console import Console
from tinylm.commands.memorisation import MemorisationOptions, check_memorisation_options, print_memorisation
from tinylm.commands.minimal_pairs import MinimalPairsOptions, check_minimal_pairs_options, print_minimal_pairs
from tinylm.commands.option_groups import command_line_flags, options_from_env_or_file, with_option_groups
from tinylm.commands.options import AdapterOption, ModelOption, OutputOptions, text_source
from tinylm.config.jobs import applicable, changed_settings
from tinylm.config.settings import ChatSettings, DeviceSettings, TextFileSettings, UnknownCharacterSettings
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.system.ranks import Launch

if TYPE_CHECKING:
    from tinylm.evaluation.result import Evaluation
    from tinylm.models.model import Model
    from tinylm.system.ranks import Ranks

MAX_CONFUSION = 10  # labels of a table that is printed whole
FIRST_OPTIONS = """
model adapter format train_on batch_size sequence_length stride baselines beams minimal_pairs memorisation train_data
device quiet json
"""  # shown by -h


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
    config: EvaluationConfig,
    text_options: TextFileSettings,
    chat: ChatSettings,
    unknown: UnknownCharacterSettings,
    minimal: MinimalPairsOptions,
    memorisation: MemorisationOptions,
    machine: DeviceSettings,
    output: OutputOptions,
) -> None:
    """Evaluate a model on a text: loss, perplexity and other metrics.

    Decoders: each token of a text except the first is scored once; in conversations, --train-on selects the scored
    parts. Encoders: loss and accuracy on masked tokens. Encoder-decoders: also exact match rate, BLEU and chrF of
    targets found by beam search.

    With --minimal-pairs: how often a decoder prefers the good one of two sentences. With --memorisation: compare
    samples of a decoder with its training text; the text is a held-out control.
    """
    from tinylm.distributed.ranks import join_ranks
    from tinylm.system.ranks import ONE_RANK

    if minimal.minimal_pairs is not None:
        check_minimal_pairs_options(ctx, text, config, text_options, chat, unknown, memorisation)
        if Launch.of(os.environ).size > 1:
            raise UsageError("`minimal_pairs` runs in one process; start it without torchrun.")
        console = output.console()
        loaded = _load_on_each_rank(model, list(adapter or ()), ONE_RANK, **vars(machine), reporter=console)
        print_minimal_pairs(console, loaded, minimal.minimal_pairs)
        return
    check_memorisation_options(ctx, memorisation, config, chat, unknown)
    if not text and (unused := command_line_flags(ctx, text_options, chat, unknown)):
        raise UsageError(
            f"{', '.join(unused.values())} has no effect without a text; name a text to evaluate, or leave it out."
        )
    source = text_source(ctx, text, text_options, unknown.unknown, chat) if text else None
    console = output.console()
    if memorisation.memorisation:
        if Launch.of(os.environ).size > 1:
            raise UsageError("`memorisation` runs in one process; start it without torchrun.")
        loaded = _load_on_each_rank(model, list(adapter or ()), ONE_RANK, **vars(machine), reporter=console)
        names = memorisation.train_data
        training = text_source(ctx, names, text_options) if names else None
        print_memorisation(console, loaded, source, training, memorisation)
        return
    with join_ranks(Launch.of(os.environ), console) as ranks:
        loaded = _load_on_each_rank(model, list(adapter or ()), ranks, **vars(machine), reporter=console)
        ignorable = options_from_env_or_file(ctx, config)
        settings = applicable(EvaluationConfig, changed_settings(config), loaded.rows, ignorable)
        evaluation = loaded.evaluate(source, ranks=ranks, **settings)
    base = [str(model)] if model is not None else []
    scored = {
        "model": " with ".join([*base, *adapter]) if adapter else str(loaded.path),
        "text": f"validation text of {loaded.path}" if source is None else ", ".join(source.paths),
    }
    _print_metrics(console, evaluation, scored)


def _load_on_each_rank(model: Path | None, adapters: list[str], ranks: "Ranks", **settings: Any) -> "Model":
    """Load the model on rank 0, then on the other ranks.

    model: `None` loads the base of the adapters or, without adapters, the model that is the newest for rank 0.
    """
    from tinylm.models.load import load

    if ranks.is_first:
        loaded = load(model, adapters=adapters, **settings)
        ranks.announce()
        ranks.first(str(loaded.path))
        return loaded
    ranks.wait()
    chosen = ranks.first(None)
    return load(chosen if model is None and not adapters else model, adapters=adapters, **settings)


def _print_metrics(console: Console, evaluation: "Evaluation", scored: dict[str, str]) -> None:
    """scored: the names of the model and of the text."""
    metrics = evaluation.to_json()
    if console.as_json:
        is_infinite = evaluation.perplexity == math.inf  # which JSON does not have
        console.record(scored | metrics | ({"perplexity": None} if is_infinite else {}))
        return
    baselines, scores = metrics.pop("baselines", {}), metrics.pop("scores", {})
    for name in ("labels", "confusion", "resampled"):  # printed below, and on stderr
        metrics.pop(name, None)
    low, high = ({n.removesuffix(e): metrics.pop(n) for n in list(metrics) if n.endswith(e)} for e in ("_low", "_high"))
    titles = {
        "loss": evaluation.unit,
        "perplexity": "perplexity",
        "bits_per_character": "bits per character",
        "bits_per_byte": "bits per byte",
        "overlapping_loss": f"{evaluation.unit}, overlapping windows",
        "overlapping_bits_per_byte": "bits per byte, overlapping windows",
        "accuracy": "accuracy",
        "macro_f1": "macro F1",
        "margin": "margin in nats",
        "exact_match": "exact match rate",
        "bleu": "BLEU",
        "chrf": "chrF",
        "pairs": "pairs",
        "texts": "texts",
        **({} if evaluation.texts is None else {"tokens": "tokens read"}),
    }
    rows = []
    for key, value in metrics.items():
        rows.append((titles.get(key, f"{key} scored"), _format(value)))
        if key in low:
            rows.append(("95 % interval", f"{low[key]:.4f} to {high[key]:.4f}"))
    rows += [(name, _format(value)) for name, value in scores.items()]
    rows += [(f"bits per byte, {name}", f"{bits:.4f}") for name, bits in baselines.items()]
    for name, value in scored.items():
        console.field(name, value)
    console.table(("", ""), rows)
    if evaluation.confusion is not None:
        _print_confusion(console, evaluation)


def _print_confusion(console: Console, evaluation: "Evaluation") -> None:
    """Print how many texts with each label (rows) were given each label (columns); of many labels, the most frequent
    mistakes.
    """
    labels, confusion = evaluation.labels or (), evaluation.confusion or ()
    console.result("")
    if len(labels) <= MAX_CONFUSION:
        rows = [(label, *map(str, row)) for label, row in zip(labels, confusion, strict=True)]
        console.table(("label, given:", *labels), rows)
        return
    rows = [(f"{count:,}", label, given) for count, label, given in evaluation.mistakes()]
    console.table(("texts", "label", "given"), rows)


def _format(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
