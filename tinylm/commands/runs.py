"""tinylm runs: what is under checkpoints/."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tinylm.commands.groups import with_groups
from tinylm.commands.model import run_folders
from tinylm.commands.options import OutputOptions
from tinylm.console import duration, shorten
from tinylm.errors import TinyLMError, UsageError
from tinylm.place import CHECKPOINTS

LONGEST_REASON = 80  # characters, of why a run is damaged; --json has all of it


@with_groups
def runs(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the runs (default: checkpoints).", show_default=False)
    ] = CHECKPOINTS,
    *,
    output: OutputOptions,
) -> None:
    """List the runs, newest first: size, steps, validation loss, age; adapters are marked."""
    from tinylm.checkpoint import summarise

    console = output.console()
    if folder != CHECKPOINTS and not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.")
    records: list[dict[str, Any]] = []
    for path in run_folders(folder):
        record: dict[str, Any] = {"name": path.relative_to(folder).as_posix(), "path": str(path)}
        try:
            record |= summarise(path)
        except (TinyLMError, OSError) as error:
            record |= {"kind": "damaged", "error": str(error)}
        records.append(record)
    records.sort(key=lambda record: record.get("saved", 0.0), reverse=True)
    if console.as_json:
        for record in records:
            console.record(record)
        return
    if not records:
        console.note(f"No runs under {folder}/ yet; train one with tinylm train corpus.txt.")
        return
    rows = [_row(record, "name" if folder == CHECKPOINTS else "path") for record in records]
    console.table(("name", "kind", "parameters", "steps", "val loss", "age"), rows)


def _row(record: dict[str, Any], name: str) -> tuple[str, ...]:
    """A line of the table. What it begins with is what --model takes: a name, or elsewhere a path."""
    if record["kind"] == "damaged":
        return (_one_line(record[name]), f"damaged: {_shortened(record['error'])}", "-", "-", "-", "-")
    val_loss = "-" if record["val_loss"] is None else f"{record['val_loss']:.4f}"
    age = duration(max(0.0, time.time() - record["saved"]))
    return (_one_line(record[name]), record["kind"], shorten(record["parameters"]), str(record["step"]), val_loss, age)


def _shortened(error: str) -> str:
    line = " ".join(error.split())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."


def _one_line(name: str) -> str:
    """A folder's name, which may have line ends in it, as one cell of a table."""
    return name.replace("\n", "\\n").replace("\r", "\\r")
