"""Option and output of tinylm eval --minimal-pairs."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tinylm.commands.console import Console
from tinylm.commands.option_groups import command_line_flags
from tinylm.config.validation import Setting
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.models.model import Model


@dataclass(frozen=True)
class MinimalPairsOptions:
    """The option of the test on minimal pairs."""

    minimal_pairs: Annotated[
        str | None,
        Setting(
            "Accuracy on pairs of a good and a bad sentence (JSONL).",
            None,
            metavar="FILE|blimp",
        ),
    ] = None


def check_minimal_pairs_options(ctx: typer.Context, text: list[str] | None, *others: object) -> None:
    """Raise UsageError for a text, and for an option of the groups `others` on the command line."""
    given = [*(["a text"] if text else []), *command_line_flags(ctx, *others).values()]
    if given:
        hint = " The model is named by --model." if text else ""
        raise UsageError(f"{', '.join(given)} has no effect with --minimal-pairs; leave it out.{hint}")


def print_minimal_pairs(console: Console, model: "Model", source: str) -> None:
    """Measure the accuracy on the pairs of `source` and print it. Raises the errors of `tinylm.analysis`."""
    from tinylm.analysis.minimal_pairs import BLIMP, measure_minimal_pairs, read_pairs, reads_english

    pairs = read_pairs(source)
    if source == BLIMP and not reads_english(model):
        console.note("BLiMP tests English, and the training text of the model does not look like English prose.")
    result = measure_minimal_pairs(model, pairs)
    if console.as_json:
        for one in result:
            console.record(asdict(one))
        return
    rows = [
        (
            one.phenomenon,
            f"{one.pairs:,}",
            f"{100 * one.accuracy:.1f} %",
            f"{100 * one.low:.1f} to {100 * one.high:.1f} %",
        )
        for one in result
    ]
    console.table(("phenomenon", "pairs", "accuracy", "95 % interval"), rows)
