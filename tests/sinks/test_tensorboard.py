"""Event files of TensorBoard. Reference: TensorBoard's own reader, and metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tinylm
from tests.shell import TINY, run_ok, story
from tinylm.reporter import LogReporter
from tinylm.sinks.callback import TrackerCallback
from tinylm.training.events import Event, Stepped

STEPS = ("--steps", 6, "--eval-every", 2, "--log-every", 1)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(story(3000))


def shown(folder: str) -> dict[str, list[tuple[int, float]]]:
    """The points of each scalar, as TensorBoard reads them."""
    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def logged(run: str) -> dict[str, list[tuple[int, float]]]:
    """The numbers of metrics.jsonl, as float32, as TensorBoard keeps them."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in Path(run, "metrics.jsonl").read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        for part, norm in record.pop("gradient_norms", {}).items():
            record[f"gradient_norms/{part}"] = norm
        step = record.pop("step")
        for name, value in record.items():
            curves.setdefault(name, []).append((step, float(np.float32(value))))
    return curves


def test_tensorboard_shows_each_number_of_metrics_jsonl_in_each_folder_that_is_named() -> None:
    """One that cannot be written is one warning."""
    trackers = ("--log-to", "tensorboard=logs", "--log-to", "tensorboard", "--log-to", "tensorboard=text.txt")
    result = run_ok("train", "text.txt", "--out", "run", *STEPS, *TINY, "--log-gradients", *trackers)
    assert result.stdout == "run\n"
    assert result.stderr.count("Warning") == result.stderr.count("Logging to tensorboard failed: ") == 1
    assert shown("logs/run") == shown("tensorboard/run") == logged("run")
    assert "gradient_norms/layers.0" in shown("logs/run")


def test_a_run_that_goes_on_after_a_crash_shows_each_step_once() -> None:
    def crash(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 7:
            raise KeyError("crashed")

    def train(*callbacks: Any, **settings: Any) -> None:
        tracker = TrackerCallback("tensorboard=logs", LogReporter())
        try:
            tinylm.train(callbacks=[tracker, *callbacks], **settings)
        finally:
            tracker.close()

    with pytest.raises(KeyError, match="crashed"):
        train(crash, files="text.txt", out="run", steps=9, log_every=1, eval_every=4, save_every=4, layers=1, heads=2,
              width=16, context=16, batch_size=4)  # fmt: skip
    assert [step for step, _ in shown("logs/run")["loss"]] == [1, 2, 3, 4, 5, 6]
    train(resume="run")
    assert [step for step, _ in shown("logs/run")["loss"]] == [*range(1, 10)]
    assert [step for step, _ in shown("logs/run")["val_loss"]] == [0, 4, 8, 9]
    assert shown("logs/run") == logged("run")


def test_a_run_that_replaces_another_one_replaces_its_curve() -> None:
    run_ok("train", "text.txt", "--out", "run", *STEPS, *TINY, "--log-to", "tensorboard")
    more = ("--steps", 3, "--eval-every", 3, "--log-every", 1, "--force", "--seed", 1)
    run_ok("train", "text.txt", "--out", "run", *more, *TINY, "--log-to", "tensorboard")
    assert len(list(Path("tensorboard/run").iterdir())) == 2
    assert shown("tensorboard/run") == logged("run")
