"""tinylm runs: a table of the runs under checkpoints/."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions, option
from tinylm.commands.run_filter import DURATIONS, KEYS, TEXTS, Filter, check_key, run_values, sort_runs
from tinylm.console import shorten_number
from tinylm.duration import format_duration
from tinylm.errors import TinyLMError, UsageError
from tinylm.run_directory.find_run import run_directories
from tinylm.run_directory.layout import CHECKPOINTS

MAX_ERROR_LENGTH = 80  # characters of the error of a damaged run in the table; --json prints the whole error
COLUMNS = {  # key: title
    "kind": "kind",
    "parameters": "parameters",
    "steps": "steps",
    "bits_per_byte": "bits/byte",
    "loss": "val loss",
    "age": "age",
}


def complete_key(incomplete: str) -> list[str]:
    """Shell completion: the keys of --sort and --filter."""
    return [key for key in KEYS if key.startswith(incomplete)]


@with_option_groups
def runs(
    folder: Annotated[
        Path, typer.Argument(help="Folder to list (default: checkpoints).", show_default=False)
    ] = CHECKPOINTS,
    sort: Annotated[
        str, option("Key to sort by, such as loss or name; -KEY is descending (default: age).", None, "KEY", "--sort")
    ] = "age",
    filter: Annotated[
        list[str] | None,
        option("List only runs for which this holds, such as 'loss<1.5'; may be given several times.", None, "EXPR"),
    ] = None,
    *,
    output: OutputOptions,
) -> None:
    """List the runs, newest first: name, kind (model or adapter), parameters, steps, validation loss (bits per byte,
    and nats per token) and age.

    Hugging Face folders are listed, too. GGUF files and adapters of PEFT are not. Each key of --sort and --filter gets
    a column. An expression is KEY=VALUE, also with !=, <, <=, > or >=; a text may have the wildcards * and ?.
    """
    console = output.console()
    key, filters = check_key("sort", sort.removeprefix("-")), [Filter.parse(text) for text in filter or ()]
    if folder != CHECKPOINTS and not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.")
    now = time.time()
    found = [_read_run(path, path.relative_to(folder).as_posix(), now) for path in run_directories(folder)]
    chosen = [run for run in found if all(one.matches(run[1]) for one in filters)]
    order = sort_runs([values for _, values in chosen], key, descending=sort.startswith("-"))
    chosen = [chosen[index] for index in order]
    if console.as_json:
        for record, _ in chosen:
            console.record(record)
        return
    if not found:
        console.note(f"No runs under {folder}/ yet; train one with tinylm train corpus.txt.")
        return
    if not chosen:
        console.note(f"None of the {len(found)} runs under {folder}/ passes the filters.")
        return
    more = [key for key in dict.fromkeys((key, *(one.key for one in filters))) if key not in ("name", *COLUMNS)]
    name_key = "name" if folder == CHECKPOINTS else "path"
    rows = [_row(record, values, name_key, [*COLUMNS, *more]) for record, values in chosen]
    console.table(("name", *COLUMNS.values(), *(key.replace("_", " ") for key in more)), rows)


def _read_run(path: Path, name: str, now: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record of a run, as --json prints it, and its values of KEYS. A damaged run has a record with its error."""
    from tinylm.formats.huggingface import is_model_folder, summarise_folder
    from tinylm.run_directory.loading import read_config, summarise

    record: dict[str, Any] = {"name": name, "path": str(path)}
    config = None
    try:
        if is_model_folder(path):
            record |= summarise_folder(path)
        else:
            record |= summarise(path)
            config = read_config(path)
    except (TinyLMError, OSError) as error:
        record |= {"kind": "damaged", "error": str(error)}
    return record, run_values(record, config, now)


def _row(record: dict[str, Any], values: dict[str, Any], name_key: str, keys: list[str]) -> tuple[str, ...]:
    """A row of the table. Its first cell is the name or the path of the run, which --model or --adapter accepts."""
    cells = {key: _as_text(key, values[key]) for key in keys}
    if record["kind"] == "damaged":
        cells["kind"] = f"damaged: {_shorten_error(record['error'])}"
    return (_one_line(record[name_key]), *cells.values())


def _as_text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key in TEXTS:
        return _one_line(str(value))
    if key in DURATIONS:
        return format_duration(max(0.0, value))
    if key == "parameters":
        return shorten_number(value)
    if key in ("bits_per_byte", "loss"):
        return f"{value:.4f}"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _shorten_error(error: str) -> str:
    line = " ".join(error.split())
    return line if len(line) <= MAX_ERROR_LENGTH else f"{line[: MAX_ERROR_LENGTH - 3]}..."


def _one_line(name: str) -> str:
    """The text with its line breaks escaped: a directory name may contain some."""
    return name.replace("\n", "\\n").replace("\r", "\\r")
