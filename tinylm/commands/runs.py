"""tinylm runs: a table of the runs under checkpoints/."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions
from tinylm.console import shorten_number
from tinylm.duration import format_duration
from tinylm.errors import TinyLMError, UsageError
from tinylm.run_directory.find_run import run_directories
from tinylm.run_directory.layout import CHECKPOINTS

MAX_ERROR_LENGTH = 80  # characters of the error of a damaged run in the table; --json has the whole error


@with_option_groups
def runs(
    folder: Annotated[
        Path, typer.Argument(help="Folder to list (default: checkpoints).", show_default=False)
    ] = CHECKPOINTS,
    *,
    output: OutputOptions,
) -> None:
    """List the runs, newest first: name, kind (model or adapter), parameters, steps, validation loss and age.

    Hugging Face folders are listed, too. GGUF files and adapters of PEFT are not.
    """
    from tinylm.formats.huggingface import is_model_folder, summarise_folder
    from tinylm.run_directory.loading import summarise

    console = output.console()
    if folder != CHECKPOINTS and not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.")
    records: list[dict[str, Any]] = []
    for path in run_directories(folder):
        record: dict[str, Any] = {"name": path.relative_to(folder).as_posix(), "path": str(path)}
        try:
            record |= summarise_folder(path) if is_model_folder(path) else summarise(path)
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


def _row(record: dict[str, Any], name_key: str) -> tuple[str, ...]:
    """A row of the table. Its first cell, record[name_key], is accepted by --model: the name, or elsewhere the path."""
    if record["kind"] == "damaged":
        return (_one_line(record[name_key]), f"damaged: {_shorten_error(record['error'])}", "-", "-", "-", "-")
    val_loss = "-" if record["val_loss"] is None else f"{record['val_loss']:.4f}"
    age = format_duration(max(0.0, time.time() - record["saved"]))
    return (
        _one_line(record[name_key]),
        record["kind"],
        shorten_number(record["parameters"]),
        "-" if record["step"] is None else str(record["step"]),
        val_loss,
        age,
    )


def _shorten_error(error: str) -> str:
    line = " ".join(error.split())
    return line if len(line) <= MAX_ERROR_LENGTH else f"{line[: MAX_ERROR_LENGTH - 3]}..."


def _one_line(name: str) -> str:
    """A directory name, which may contain line breaks, as one line."""
    return name.replace("\n", "\\n").replace("\r", "\\r")
