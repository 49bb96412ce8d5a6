"""Options and output of tinylm eval --memorisation."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tinylm.commands.console import Console
from tinylm.commands.option_groups import command_line_flags
from tinylm.config.validation import Panel, Setting
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import MemorisationConfig

if TYPE_CHECKING:
    from tinylm.models.model import Model
    from tinylm.text.file_selection import TextSource

EXCERPT = 60  # characters of a match in the table


@dataclass(frozen=True)
class MemorisationOptions(MemorisationConfig):
    """All options of the memorisation test."""

    memorisation: Annotated[
        bool,
        Setting(
            "Measure how much of the model's samples, and of held-out text, occurs verbatim in its training text.",
            Panel.MEMORISATION,
        ),
    ] = False
    train_data: Annotated[
        list[str] | None,
        Setting("Training text of a model that has none recorded.", Panel.MEMORISATION, metavar="FILE"),
    ] = None


def check_memorisation_options(ctx: typer.Context, options: MemorisationOptions, *others: object) -> None:
    """Raise UsageError for an option on the command line that has no effect: without --memorisation, one of `options`;
    with --memorisation, one of the option groups `others`.
    """
    given = command_line_flags(ctx, *(others if options.memorisation else (options,)))
    if given:
        flags = ", ".join(given.values())
        with_or_without = "with" if options.memorisation else "without"
        raise UsageError(f"{flags} has no effect {with_or_without} --memorisation; leave it out.")


def print_memorisation(
    console: "Console",
    model: "Model",
    held_out: "TextSource | None",
    training: "TextSource | None",
    options: MemorisationOptions,
) -> None:
    """Measure memorisation and print the result. held_out, training: as in `measure_memorisation`.

    Raises the errors of `measure_memorisation`.
    """
    from tinylm.analysis.memorisation import measure_memorisation

    result = measure_memorisation(model, held_out, training, options)
    if console.as_json:
        for record in result.to_json():
            console.record(record)
        return
    rows = [
        (
            source.source,
            f"{source.samples:,}",
            f"{source.characters:,}",
            f"{100 * source.copied:.1f} %",
            "-"
            if source.copied_low is None or source.copied_high is None
            else f"{100 * source.copied_low:.1f} to {100 * source.copied_high:.1f} %",
            f"{source.longest:,}",
        )
        for source in result.sources
    ]
    console.table(("text", "samples", "characters", "copied", "95 % interval", "longest match"), rows)
    found = [(source.source, match) for source in result.sources for match in source.matches]
    if not found:
        return
    console.result("")
    longest = [
        (
            f"{match.characters:,}",
            source,
            repr(match.text if len(match.text) <= EXCERPT else match.text[:EXCERPT] + "..."),
        )
        for source, match in found
    ]
    console.table(("match", "in", "text"), longest)
