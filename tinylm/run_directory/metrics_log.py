"""metrics.jsonl and samples.jsonl: one JSON object per line, the metrics of a step, or a text sampled after a step."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinylm.errors import TinyLMError
from tinylm.files import is_system_failure, open_append, open_regular, parse_json, write_text
from tinylm.validation import COUNT_FROM_0

METRICS_FILE, SAMPLES_FILE = "metrics.jsonl", "samples.jsonl"
MAX_LINES, MAX_LINE_BYTES = 1 << 21, 1 << 16
MAX_LOSS = 1e300


def append_metrics(directory: Path, record: dict[str, Any], file: str = METRICS_FILE) -> None:
    """Append a record as one line. Raises OSError."""
    with open_append(directory / file) as opened:
        opened.write(json.dumps(record).encode() + b"\n")


def truncate_metrics(directory: Path, step: int) -> None:
    """Delete the records and samples after `step`, which a resumed run logs again, and damaged lines.

    Raises OSError if a file cannot be written, and TinyLMError as `read_metrics` does.
    """
    for file in (METRICS_FILE, SAMPLES_FILE):
        kept = [record for record in iterate_metrics(directory, file) if record["step"] <= step]
        if kept or (directory / file).exists():
            write_text(directory / file, "".join(json.dumps(record) + "\n" for record in kept))


def read_curve(directory: Path) -> list[dict[str, Any]]:
    """The records that have a validation loss. Raises TinyLMError as `read_metrics` does."""
    return [record for record in iterate_metrics(directory) if record.get("val_loss") is not None]


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The records of a run, without damaged and incomplete lines; empty if there is no file.

    Raises TinyLMError if metrics.jsonl is not a regular file, cannot be read or has too many lines.
    """
    return list(iterate_metrics(directory))


def iterate_metrics(directory: Path, file: str = METRICS_FILE) -> Iterator[dict[str, Any]]:
    """As `read_metrics`, for metrics.jsonl or samples.jsonl, one record at a time."""
    path = directory / file
    remedy = f"Deleting it loses only the {'samples' if file == SAMPLES_FILE else 'curves'} of the run."
    try:
        with open_regular(path) as opened:
            for _ in range(MAX_LINES):
                if not (line := opened.readline(MAX_LINE_BYTES)):
                    return
                with contextlib.suppress(ValueError):
                    record = parse_json(line.decode("utf-8", "replace"))
                    if isinstance(record, dict) and _is_step(record.get("step")) and _is_loss(record.get("val_loss")):
                        yield record
    except FileNotFoundError:
        return
    except OSError as error:
        advice = "Run the command again." if is_system_failure(error) else remedy
        raise TinyLMError(f"Cannot read {path}: {error.strerror or error}. {advice}") from error
    raise TinyLMError(f"{path} has more than {MAX_LINES} lines. {remedy}")


def _is_step(value: Any) -> bool:
    return type(value) is int and COUNT_FROM_0.contains(value)


def _is_loss(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < MAX_LOSS)
