"""The table in which `tinylm info` compares several runs: a column for each run."""

from collections.abc import Sequence
from typing import Any

from tinylm.config.duration import format_duration

MAX_CELL = 32  # characters; a longer value is shortened to its end
# Prefixes of settings that differ between any two runs, or follow from others. The id of a run is left out as well.
INCIDENTAL = ("created", "planned.", "runtime.job")


def compare_records(records: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of the table: results, and the settings that differ. records: as `tinylm info --json` prints them.

    The first cell of a row is its name; a cell for each run follows. A missing value is "-".
    """
    results = {
        "kind": [record["kind"] for record in records],
        "parameters": [_count(record.get("parameters")) for record in records],
        "steps": [_count(record.get("step")) for record in records],
        "tokens": [_count(record.get("tokens")) for record in records],
        "best bits per byte": [_loss(record.get("val_bits_per_byte")) for record in records],
        "best val loss": [_loss(record.get("val_loss")) for record in records],
        "at step": [_count(record.get("best_step")) for record in records],
        "tokens per second": [_count(record.get("tokens_per_second")) for record in records],
        "time": ["-" if record.get("seconds") is None else format_duration(record["seconds"]) for record in records],
    }
    settings = [_settings(record) for record in records]
    for name in dict.fromkeys(name for found in settings for name in found):
        values = [found.get(name, "-") for found in settings]
        if len(set(values)) > 1:
            results[name] = [value if len(value) <= MAX_CELL else f"…{value[1 - MAX_CELL :]}" for value in values]
    return [(name, *(cell.replace("\n", "\\n") for cell in cells)) for name, cells in results.items()]


def _settings(record: dict[str, Any]) -> dict[str, str]:
    """The settings of a run by dotted names, without its id, digests and INCIDENTAL settings."""
    from tinylm.report.collect import DIGESTS, flatten

    flat = flatten(record["config"] | {"id": None} if "config" in record else {"adapter": record["adapter"]})
    return {
        name: value for name, value in flat.items() if not name.startswith(INCIDENTAL) and not name.endswith(DIGESTS)
    }


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
