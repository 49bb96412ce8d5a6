"""The curves of a run, from its metrics.jsonl, thinned to a bounded number of points.

The file may be made by an attacker: values that are not finite numbers become `None`, and names are cut.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tinylm.run_directory.metrics_log import SAMPLES_FILE, iterate_metrics

MAX_NUMBER = 1e30
MAX_LAYERS, MAX_EXPERTS = 200, 1024  # whose expert shares are shown
MAX_SAMPLE = 4000  # characters of a sample
METRICS = ("accuracy", "margin", "router_entropy")  # of some objectives and models
SERIES = ("loss", "lr", "grad_norm", "tokens_per_second", *METRICS)

Record = dict[str, Any]


def number(value: Any, digits: int = 5) -> float | None:
    """The value rounded to significant digits; `None` if it is not a number, not finite, or very large."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        return None
    return float(f"{value:.{digits}g}")


class Thinned:
    """Keeps a bounded number of records of a sequence whose length is not known in advance.

    Consecutive records share a bucket. The first record of each bucket and the one with the highest loss are kept, so
    that no spike is lost, and the last record. When there are more than `buckets` buckets, neighbours are merged.
    """

    def __init__(self, buckets: int) -> None:
        self._limit = max(2, buckets)
        self._size = 1  # records per bucket
        self._in_last = 0  # records in the last bucket
        self._buckets: list[tuple[Record, Record]] = []
        self._last: Record | None = None

    def add(self, record: Record) -> None:
        """Add the next record."""
        self._last = record
        if not self._buckets or self._in_last == self._size:
            if len(self._buckets) == self._limit:
                self._merge()
            if self._in_last == self._size or not self._buckets:
                self._buckets.append((record, record))
                self._in_last = 1
                return
        first, highest = self._buckets[-1]
        self._buckets[-1] = (first, _higher(highest, record))
        self._in_last += 1

    def _merge(self) -> None:
        pairs = [self._buckets[index : index + 2] for index in range(0, len(self._buckets), 2)]
        self._buckets = [(pair[0][0], _higher(pair[0][1], pair[-1][1])) for pair in pairs]
        self._in_last += self._size if len(pairs[-1]) == 2 else 0
        self._size *= 2

    def __iter__(self) -> Iterator[Record]:
        """The kept records in order, and the last record that was added."""
        end = None
        for first, highest in self._buckets:
            yield first
            if highest is not first:
                yield highest
            end = highest
        if self._last is not None and self._last is not end:
            yield self._last


def _higher(one: Record, other: Record) -> Record:
    return other if (_loss(other) or -MAX_NUMBER) > (_loss(one) or -MAX_NUMBER) else one


def _loss(record: Record) -> float | None:
    value = record.get("loss", record.get("val_loss"))
    return number(value)


def read_curves(run: Path, points: int, tokens_per_step: int | None, best_step: int | None = None) -> dict[str, Any]:
    """The curves of a run as columns of numbers.

    train, val: columns `step`, `seconds`, `tokens` and the metrics that have values; `tokens` is missing without
    `tokens_per_step`. experts: the share of each expert in the tokens of each layer, in the last record that has it.
    best: the metrics of the evaluation at `best_step`.

    Raises TinyLMError as `read_metrics` does.
    """
    train, val = Thinned(points // 2), Thinned(points // 2)
    experts: Any = None
    best: Record = {}
    for record in iterate_metrics(run):
        if record.get("val_loss") is not None:
            val.add(record)
            if record["step"] == best_step:
                best = {name: number(record.get(f"val_{name}")) for name in METRICS}
            continue
        experts = record.pop("expert_shares", experts)
        train.add({name: record.get(name) for name in ("step", "seconds", *SERIES) if name in record})
    curves: dict[str, Any] = {
        "train": _columns(train, SERIES, tokens_per_step),
        "val": _columns(val, ("val_bits_per_byte", "val_loss", *(f"val_{name}" for name in METRICS)), tokens_per_step),
        "best": best,
    }
    table: list[Any] = experts if isinstance(experts, list) else []
    if 0 < len(table) <= MAX_LAYERS and all(isinstance(row, list) and len(row) <= MAX_EXPERTS for row in table):
        curves["experts"] = [[number(share, 3) for share in row] for row in table]
    return curves


def _columns(records: Iterable[Record], series: tuple[str, ...], tokens_per_step: int | None) -> dict[str, Any]:
    records = list(records)
    columns: dict[str, Any] = {"step": [record["step"] for record in records]}
    columns["seconds"] = [number(record.get("seconds")) for record in records]
    if tokens_per_step is not None:
        columns["tokens"] = [number(record["step"] * tokens_per_step, 6) for record in records]
    for name in series:
        values = [number(record.get(name)) for record in records]
        if any(value is not None for value in values):
            columns[name] = values
    return columns


def read_samples(run: Path, count: int) -> list[Record]:
    """At most about `count` samples, chosen as by `Thinned`: `step`, `val_loss`, `text`.

    Raises TinyLMError as `read_metrics` does.
    """
    kept = Thinned(max(2, count // 2))
    for record in iterate_metrics(run, SAMPLES_FILE):
        if isinstance(record.get("text"), str):
            kept.add({"step": record["step"], "val_loss": number(record.get("val_loss")), "text": record["text"]})
    return [{**record, "text": record["text"][:MAX_SAMPLE]} for record in kept]
