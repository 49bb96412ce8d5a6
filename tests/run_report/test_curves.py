"""Curves and samples of a run directory, of which every line may be forged."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tinylm.errors import TinyLMError
from tinylm.run_report.curves import MAX_SAMPLE, Thinned, number, read_curves, read_samples


def write(run: Path, records: list[Any], file: str = "metrics.jsonl") -> Path:
    (run / file).write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in records))
    return run


def test_numbers_are_rounded_and_others_are_none() -> None:
    assert number(1.23456789) == 1.2346
    assert number(7) == 7.0
    assert [number(value) for value in (True, None, "1", [1], math.nan, math.inf, 1e31, 10**400)] == [None] * 8


def test_thinned_records_keep_the_first_the_last_and_the_highest_loss() -> None:
    for count in (0, 1, 8, 9, 100, 1001):
        thinned = Thinned(8)
        for step in range(count):
            thinned.add({"step": step, "loss": 10.0 if step == 61 else 1.0 + step % 3})
        kept = [record["step"] for record in thinned]
        assert kept == sorted(set(kept)) and len(kept) <= 2 * 8 + 1
        if count <= 8:
            assert kept == list(range(count))
        else:
            assert (kept[0], kept[-1]) == (0, count - 1) and (count <= 61 or 61 in kept)
            assert max(b - a for a, b in itertools.pairwise(kept)) <= 4 * math.ceil(count / 8)


def test_training_and_validation_become_columns_with_tokens(tmp_path: Path) -> None:
    records = [
        {"step": 0, "val_loss": 4.0, "seconds": 1.0},
        {"step": 5, "loss": 3.0, "lr": 0.1, "grad_norm": None, "tokens_per_second": 9.5, "seconds": 2.0},
        {"step": 10, "loss": 2.0, "lr": 0.2, "grad_norm": 1.5, "tokens_per_second": 9.5, "seconds": 3.0},
        {"step": 10, "val_loss": 2.5, "val_bits_per_byte": 1.25, "seconds": 3.5},
    ]
    curves = read_curves(write(tmp_path, records), 100, 32)
    axes = {"step": [0, 10], "seconds": [1.0, 3.5], "tokens": [0.0, 320.0]}
    assert curves["val"] == {**axes, "val_bits_per_byte": [None, 1.25], "val_loss": [4.0, 2.5]}
    assert curves["train"]["tokens"] == [160.0, 320.0]
    assert curves["train"]["grad_norm"] == [None, 1.5]
    assert "tokens" not in read_curves(tmp_path, 100, None)["train"]


def test_the_metrics_of_the_best_weights_are_kept_however_much_the_curves_are_thinned(tmp_path: Path) -> None:
    records = [{"step": n, "val_loss": 2.0 + (n - 777) ** 2, "val_accuracy": n / 1000} for n in range(1000)]
    curves = read_curves(write(tmp_path, records), 10, None, best_step=777)
    assert curves["best"]["accuracy"] == 0.777 and 777 not in curves["val"]["step"]


def test_forged_lines_change_nothing_but_their_own_values(tmp_path: Path) -> None:
    records = [
        "not json\n",
        '{"step": 1, "loss": NaN}\n',
        '{"step": 1, "loss": 1e999, "lr": "<script>"}\n',
        {"step": -1, "loss": 1},
        {"step": 2**80, "loss": 1},
        {"step": 2, "loss": {"a": [1]}, "seconds": [3], "expert_shares": {"x": 1}},
        {"step": 3, "loss": 2.0, "seconds": "1"},
        {"step": 4, "loss": 1.0, "expert_shares": [[0.5, "x"], [10**400, None]]},
        "[" * 50_000 + "\n",
    ]
    curves = read_curves(write(tmp_path, records), 100, 10)
    json.dumps(curves, allow_nan=False)
    assert curves["train"]["step"] == [1, 2, 3, 4]
    assert curves["train"]["loss"] == [None, None, 2.0, 1.0]
    assert curves["train"]["seconds"] == [None] * 4
    assert curves["experts"] == [[0.5, None], [None, None]]


def test_a_long_log_is_read_in_bounded_size(tmp_path: Path) -> None:
    line = {"loss": 1 / 3, "lr": 1 / 7, "grad_norm": 1 / 9, "tokens_per_second": 12345.6}
    curves = read_curves(write(tmp_path, [{"step": i, "seconds": i / 3, **line} for i in range(3000)]), 200, 10)
    assert len(json.dumps(curves)) < 30_000


def test_samples_are_cut_and_evenly_chosen(tmp_path: Path) -> None:
    records = [{"step": i, "val_loss": 1.0, "text": f"{i} " + "x" * 9000} for i in range(300)]
    samples = read_samples(write(tmp_path, [*records, {"step": 301, "text": 5}], "samples.jsonl"), 20)
    assert len(samples) <= 21
    assert (samples[0]["step"], samples[-1]["step"]) == (0, 299)
    assert all(len(sample["text"]) == MAX_SAMPLE for sample in samples)


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"step": 1, "loss": 1}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TinyLMError, match=r"metrics\.jsonl"):
        read_curves(tmp_path, 10, None)
