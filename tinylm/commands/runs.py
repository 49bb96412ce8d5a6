"""tinylm runs: a table of the runs under checkpoints/."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions
from tinylm.config.presets import find_preset
from tinylm.config.settings import format_duration
from tinylm.config.validation import Setting, describe_value
from tinylm.errors import TinyLMError, UsageError
from tinylm.reporter import shorten_number
from tinylm.run_directory.layout import CHECKPOINTS, run_directories

MAX_ERROR_LENGTH = 80  # characters of the error of a damaged run in the table; --json prints the whole error
COLUMNS = {  # key: title
    "kind": "kind",
    "parameters": "parameters",
    "steps": "steps",
    "bits_per_byte": "bits/byte",
    "loss": "val loss",
    "age": "age",
}
# Keys of --sort whose values are entries of the record of a run: the names of these entries.
RECORD_KEYS = {
    "name": "name",
    "kind": "kind",
    "parameters": "parameters",
    "steps": "step",
    "best_step": "best_step",
    "bits_per_byte": "val_bits_per_byte",
    "loss": "val_loss",
    "time": "seconds",
}
# Keys of --sort, and of `settings` with --json, whose values are fields of the configuration, by part.
SETTINGS = {
    "model": (
        *("architecture", "layers", "heads", "kv_heads", "width", "context", "vocab_size", "position", "norm"),
        *("activation", "experts", "dropout"),
    ),
    "training": ("optimizer", "lr", "batch_size", "weight_decay", "schedule", "seed"),
    "adapter": ("rank", "alpha"),
}
KEYS = (*RECORD_KEYS, "age", "preset", "tokenizer", *(name for names in SETTINGS.values() for name in names))


@with_option_groups
def runs(
    folder: Annotated[
        Path, typer.Argument(help="Folder to list (default: checkpoints).", show_default=False)
    ] = CHECKPOINTS,
    sort: Annotated[
        str, Setting("Key to sort by, such as loss or name; -KEY is descending.", None, metavar="KEY")
    ] = "age",
    *,
    output: OutputOptions,
) -> None:
    """List the runs, newest first: name, kind (model or adapter), parameters, steps, validation loss (bits per byte,
    and nats per token) and age.

    Hugging Face folders are listed, too. GGUF files and adapters of PEFT are not. The key of --sort gets a column.
    """
    console = output.console()
    key = sort.removeprefix("-").replace("-", "_")
    if key not in KEYS:
        raise UsageError(f"`sort` has no key {describe_value(key)}; the keys are: {', '.join(KEYS)}.")
    if folder != CHECKPOINTS and not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.")
    now = time.time()
    found = [_read_run(path, path.relative_to(folder).as_posix(), now) for path in run_directories(folder)]
    # Runs without a value of the key are last in either order.
    present = [run for run in found if run[1][key] is not None]
    absent = [run for run in found if run[1][key] is None]
    found = sorted(present, key=lambda run: run[1][key], reverse=sort.startswith("-")) + absent
    if console.as_json:
        for record, _ in found:
            console.record(record)
        return
    if not found:
        console.note(f"No runs under {folder}/ yet; train one with tinylm train corpus.txt.")
        return
    more = [] if key in ("name", *COLUMNS) else [key]
    name_key = "name" if folder == CHECKPOINTS else "path"  # which --model or --adapter accepts
    rows = []
    for record, values in found:
        cells = {key: _as_text(key, values[key]) for key in (*COLUMNS, *more)}
        if record["kind"] == "damaged":
            error = " ".join(record["error"].split())
            short = error if len(error) <= MAX_ERROR_LENGTH else f"{error[: MAX_ERROR_LENGTH - 3]}..."
            cells["kind"] = f"damaged: {short}"
        rows.append((_one_line(record[name_key]), *cells.values()))
    console.table(("name", *COLUMNS.values(), *(key.replace("_", " ") for key in more)), rows)


def _read_run(path: Path, name: str, now: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record of a run, as --json prints it, and its values of KEYS, `None` where it has none.

    A damaged run has a record with its error.
    """
    from tinylm.formats.huggingface import is_model_folder, summarise_folder
    from tinylm.run_directory.loading import read_model_config, summarise

    record: dict[str, Any] = {"name": name, "path": str(path)}
    settings: dict[str, Any] = {}
    try:
        if is_model_folder(path):
            record |= summarise_folder(path)
        else:
            record |= summarise(path)
            config = read_model_config(path)
            settings = {"preset": find_preset(config.model), "tokenizer": config.tokenizer.kind}
            for part, names in SETTINGS.items():
                settings |= {name: getattr(getattr(config, part), name, None) for name in names}
            record["settings"] = settings
    except (TinyLMError, OSError) as error:
        record |= {"kind": "damaged", "error": str(error)}
    values = dict.fromkeys(KEYS) | {key: record.get(entry) for key, entry in RECORD_KEYS.items()} | settings
    if (saved := record.get("saved")) is not None:
        values["age"] = now - saved  # negative if the clock was put back
    return record, values


def _as_text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return _one_line(value)
    if key in ("time", "age"):
        return format_duration(max(0.0, value))
    if key == "parameters":
        return shorten_number(value)
    if key in ("bits_per_byte", "loss"):
        return f"{value:.4f}"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _one_line(name: str) -> str:
    """The text with its line breaks escaped: a directory name may contain some."""
    return name.replace("\n", "\\n").replace("\r", "\\r")
