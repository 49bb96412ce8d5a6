"""metrics.jsonl: one JSON object per line, with a step and its metrics."""

import contextlib
import json
from pathlib import Path
from typing import Any

from tinylm.errors import TinyLMError
from tinylm.files import open_append, open_regular, parse_json, write_text
from tinylm.validation import COUNT_FROM_0

METRICS_FILE = "metrics.jsonl"
MAX_LINES, MAX_LINE_BYTES = 1 << 21, 1 << 16
MAX_LOSS = 1e300


def append_metrics(directory: Path, record: dict[str, Any]) -> None:
    """Append a record as one line. Raises OSError."""
    with open_append(directory / METRICS_FILE) as file:
        file.write(json.dumps(record).encode() + b"\n")


def truncate_metrics(directory: Path, step: int) -> None:
    """Delete the records after `step`, which a resumed run logs again.

    Raises OSError if the file cannot be written, and TinyLMError as `read_metrics` does.
    """
    kept = [record for record in read_metrics(directory) if record["step"] <= step]
    write_text(directory / METRICS_FILE, "".join(json.dumps(record) + "\n" for record in kept))


def read_curve(directory: Path) -> list[dict[str, Any]]:
    """The records that have a validation loss. Raises TinyLMError as `read_metrics` does."""
    return [record for record in read_metrics(directory) if record.get("val_loss") is not None]


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The records of a run, without damaged and incomplete lines; empty if there is no file.

    Raises TinyLMError if metrics.jsonl is not a regular file, cannot be read or has too many lines.
    """
    path = directory / METRICS_FILE
    records: list[dict[str, Any]] = []
    try:
        with open_regular(path) as file:
            for _ in range(MAX_LINES):
                if not (line := file.readline(MAX_LINE_BYTES)):
                    return records
                with contextlib.suppress(ValueError):
                    record = parse_json(line.decode("utf-8", "replace"))
                    if isinstance(record, dict) and _is_step(record.get("step")) and _is_loss(record.get("val_loss")):
                        records.append(record)
    except FileNotFoundError:
        return records
    except OSError as error:
        raise TinyLMError(f"{path} is damaged ({error}). Delete it: only the curve of the run is lost.") from error
    raise TinyLMError(f"{path} has more than {MAX_LINES} lines. Delete it: only the curve of the run is lost.")


def _is_step(value: Any) -> bool:
    return type(value) is int and COUNT_FROM_0.contains(value)


def _is_loss(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < MAX_LOSS)
