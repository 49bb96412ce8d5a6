"""metrics.jsonl and samples.jsonl: one JSON object per line, the metrics of a step, or a text sampled after a step."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tinylm.config.validation import COUNT_FROM_0
from tinylm.errors import TinyLMError
from tinylm.system.files import is_system_failure, open_append, open_regular, parse_json, write_text

METRICS_FILE, SAMPLES_FILE = "metrics.jsonl", "samples.jsonl"
MAX_LINES, MAX_LINE_BYTES = 1 << 21, 1 << 16
MAX_LOSS = 1e300
MAX_COLUMNS = 64  # of a History, so that a forged file cannot use more memory than its records do


@dataclass(frozen=True, repr=False)
class History:
    """The records of a run's metrics.jsonl, as columns: a list for each key. A value that a record lacks is `None`.

    training: `step`, `loss`, `lr`, `grad_norm`, `tokens_per_second`, `seconds` and the metrics of each Logged event
    validation: `step`, `val_loss`, `seconds` and, on plain text, `val_bits_per_byte`

    `plt.plot("step", "val_loss", data=history.validation)` plots a curve, and `pandas.DataFrame(history.training)`
    makes a table.
    """

    training: dict[str, list[Any]]
    validation: dict[str, list[Any]]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The history of a run, without damaged lines; empty if there is no file. Raises TinyLMError as
        `iterate_metrics`."""
        training: list[dict[str, Any]] = []
        validation: list[dict[str, Any]] = []
        for record in read_metrics(directory):
            (training if record.get("val_loss") is None else validation).append(record)
        return cls(_columns(training, "step", "loss"), _columns(validation, "step", "val_loss"))

    def __repr__(self) -> str:
        kinds = {"training": self.training, "validation": self.validation}
        shown = (f"{name}: {len(columns['step']):,} x {', '.join(columns)}" for name, columns in kinds.items())
        return f"History({'; '.join(shown)})"


def _columns(records: list[dict[str, Any]], *first: str) -> dict[str, list[Any]]:
    names = list(dict.fromkeys([*first, *(name for record in records for name in record)]))[:MAX_COLUMNS]
    return {name: [record.get(name) for record in records] for name in names}


def append_metrics(directory: Path, record: dict[str, Any], file: str = METRICS_FILE) -> None:
    """Append a record as one line. Raises OSError."""
    with open_append(directory / file) as opened:
        opened.write(json.dumps(record).encode() + b"\n")


def truncate_metrics(directory: Path, step: int, last_eval_step: int, joined_step: int = 0) -> None:
    """Delete the records and samples after `step`, which a resumed run logs again, and damaged lines. Also evaluations
    after `last_eval_step`: that of a stop, which a run without the stop does not have; and those of joined models after
    `joined_step`.

    Raises OSError if a file cannot be written, and TinyLMError as `iterate_metrics` does.
    """

    def last(record: dict[str, Any]) -> int:
        if record.get("val_loss") is None:
            return step
        return last_eval_step if record.get("joined") is None else joined_step

    for file in (METRICS_FILE, SAMPLES_FILE):
        kept = [record for record in iterate_metrics(directory, file) if record["step"] <= last(record)]
        if kept or (directory / file).exists():
            write_text(directory / file, "".join(json.dumps(record) + "\n" for record in kept))


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl. Raises TinyLMError as `iterate_metrics` does."""
    return list(iterate_metrics(directory))


def iterate_metrics(directory: Path, file: str = METRICS_FILE) -> Iterator[dict[str, Any]]:
    """Yield the records of metrics.jsonl or samples.jsonl, without damaged and incomplete lines; none without a file.

    Raises TinyLMError if it is not a regular file, cannot be read or has too many lines.
    """
    path = directory / file
    remedy = f"Deleting it loses only the {'samples' if file == SAMPLES_FILE else 'curves'} of the run."
    try:
        with open_regular(path) as opened:
            for _ in range(MAX_LINES):
                if not (line := opened.readline(MAX_LINE_BYTES)):
                    return
                with contextlib.suppress(ValueError):
                    record = parse_json(line.decode("utf-8", "replace"))
                    if isinstance(record, dict):
                        step, loss = record.get("step"), record.get("val_loss")
                        is_loss = loss is None or (type(loss) in (int, float) and abs(loss) < MAX_LOSS)
                        if is_loss and type(step) is int and COUNT_FROM_0.contains(step):
                            yield record
    except FileNotFoundError:
        return
    except OSError as error:
        advice = "Run the command again." if is_system_failure(error) else remedy
        raise TinyLMError(f"Cannot read {path}: {error.strerror or error}. {advice}") from error
    raise TinyLMError(f"{path} has more than {MAX_LINES} lines. {remedy}")
