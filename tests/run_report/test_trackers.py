"""Trackers: what they receive, and that no failure of theirs reaches a run.

The library of wandb is replaced by a module that records its calls; the files of TensorBoard are read
by its own reader, and compared with metrics.jsonl.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tinylm
from tests.shell import TINY, assert_error, run_ok, story
from tests.shell import tinylm as shell
from tests.variants import small
from tinylm.config.run import RunConfig, TokenizerConfig
from tinylm.reporter import LogReporter
from tinylm.run_report.trackers import PACKAGES, TrackerCallback, flat_numbers, is_installed
from tinylm.training.events import Evaluated, Event, Logged, Started, Stepped

STEPS = ("--steps", 6, "--eval-every", 3, "--log-every", 1)
STUB = """
import json, sys
print("chatter")
def record(name, /, *values, **options):
    with open({calls!r}, "a") as file:
        file.write(json.dumps([name, values, options], default=vars) + "\\n")
class Settings:
    def __init__(self, **options): vars(self).update(options)
def login(**options):
    return False
class Run:
    url, dir = None, "wandb/offline-run-1/files"
    def log(self, values, step):
        record("log", step, values)
        {log}
    def finish(self):
        record("finish")
        {finish}
def init(**options):
    record("init", **options)
    {init}
    return Run()
{module}
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "stubs")
    monkeypatch.setitem(sys.modules, "wandb", Mock())
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for variable in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    Path("text.txt").write_text(story(3000))
    return tmp_path / "calls.jsonl"


def write_wandb(calls: Path, **parts: str) -> None:
    """Replace the package wandb by the stub, with more statements in its functions."""
    Path("stubs").mkdir(exist_ok=True)
    parts = {"log": "pass", "finish": "pass", "init": "pass", "module": "", **parts}
    Path("stubs/wandb.py").write_text(STUB.format(calls=str(calls), **parts))
    sys.modules.pop("wandb", None)
    importlib.invalidate_caches()


def recorded(calls: Path) -> list[Any]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def train(*options: object) -> Any:
    return run_ok("train", "text.txt", "--out", "run", *STEPS, *TINY, *options)


def metrics() -> list[Any]:
    """The records of metrics.jsonl, as a tracker gets them."""
    found = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    return [["log", [record.pop("step"), record], {}] for record in found]


def test_wandb_gets_the_metrics_and_continues_the_run_with_the_id_in_the_run_directory(calls: Path) -> None:
    write_wandb(calls)
    result = train("--log-to", "wandb")
    assert result.stdout == "run\n", "what wandb prints is not part of the result"
    assert "wandb: not logged in" in result.stderr and "chatter" not in result.stderr
    config = json.loads(Path("run/config.json").read_text())
    first, *logged, last = recorded(calls)
    assert (logged, last) == (metrics(), ["finish", [], {}])
    options = first[2]
    assert {name: options[name] for name in ("id", "name", "project", "mode", "resume")} == {
        "id": config["id"], "name": "run", "project": "tinylm", "mode": "offline", "resume": "allow"
    }  # fmt: skip
    assert options["config"]["model"]["width"] == 16
    assert str(Path.cwd()) not in json.dumps(options), "no path of this machine is sent"
    calls.unlink()
    Path("run").rename("moved")
    run_ok("train", "--resume", "moved", "--steps", 8, "--log-to", "wandb")
    again, *logged, _ = recorded(calls)
    assert again[2]["id"] == config["id"]
    assert [call[1][0] for call in logged] == [7, 8, 8]


def send(name: str, first: int = 1, resumed_step: int | None = None) -> SimpleNamespace:
    """Send a tracker the events of a run up to step 6. Returns the notes and warnings of the callback."""
    config = RunConfig.new(model=small(), tokenizer=TokenizerConfig(kind="char", sha256="0"), id="0" * 32)
    reporter = Mock(spec=LogReporter)
    with contextlib.closing(TrackerCallback(name, reporter)) as callback:
        callback(Started(Path("run"), config, cast(Any, None), cast(Any, None), 5.0, None, resumed_step))
        for step in range(first, 7):
            callback(Logged(step, 0.5, 1.0 / step, 0.1, None, 10.0, float(step), {}))
        callback(Evaluated(6, 0.5, True, 6.0))
    notes, warnings = ([call.args[0] for call in method.call_args_list] for method in (reporter.note, reporter.warn))
    return SimpleNamespace(notes=notes, warnings=warnings)


def test_wandb_with_a_login_or_a_mode_is_not_set_to_offline(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wandb(calls, module="def login(**options): return True")
    assert send("wandb").notes == []
    write_wandb(calls)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    send("wandb")
    assert [call[2]["mode"] for call in recorded(calls) if call[0] == "init"] == [None, None]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"module": "raise ImportError('broken install')"}, "ImportError: broken install"),
        ({"init": "sys.exit('log in first')"}, "SystemExit: log in first"),
        ({"log": "raise OSError(28, 'No space left on device')"}, "OSError: [Errno 28] No space left on device"),
        ({"finish": "raise TimeoutError('upload')"}, "TimeoutError: upload"),
    ],
)
def test_a_failure_of_a_tracker_is_one_warning_with_advice(calls: Path, parts: dict[str, str], reason: str) -> None:
    write_wandb(calls, **parts)
    (warning,) = send("wandb").warnings
    assert warning.startswith(f"Logging to wandb failed: {reason}. ")
    assert "WANDB_MODE=offline" in warning


def test_a_run_whose_tracker_fails_is_complete_and_other_trackers_have_all_of_it(calls: Path) -> None:
    write_wandb(calls, log="raise ConnectionError")
    result = train("--log-to", "wandb", "--log-to", "tensorboard")
    assert result.stdout == "run\n"
    assert result.stderr.count("Warning: Logging to wandb failed: ") == result.stderr.count("failed") == 1
    assert len(metrics()) == 9 and [call[0] for call in recorded(calls)] == ["init", "log"]
    assert shown("tensorboard/run") == logged("run")


def test_missing_packages_are_found_at_once(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (calls.parent / "stubs" / "wandb" / "run-1").mkdir(parents=True)  # as wandb writes, which is no module
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setitem(PACKAGES, "tensorboard", "a_package_that_nobody_has")
    options = ("train", "text.txt", "--out", "run", *STEPS, *TINY)
    assert_error(shell(*options, "--log-to", "tensorboard"), 2, "pip install a_package_that_nobody_has")
    if not is_installed("wandb"):
        assert_error(shell(*options, "--log-to", "wandb"), 2, "--log-to wandb", "pip install wandb")
    assert not Path("run").exists()


def test_adapters_log_to_trackers_as_well(calls: Path) -> None:
    write_wandb(calls)
    train()
    options = ("--steps", 2, "--log-every", 1, "--log-to", "wandb")
    run_ok("finetune-adapter", "text.txt", "--model", "run", "--out", "bottleneck", *options)
    first, *logged, _ = recorded(calls)
    assert first[2]["config"]["adapter"]["kind"] == "bottleneck"
    assert "base" not in first[2]["config"]["adapter"]
    assert {call[1][0] for call in logged} >= {1, 2}


def test_numbers_have_the_names_of_the_values_around_them() -> None:
    values = {"loss": 1.5, "step": 3, "norms": {"layers.0": 2.0}, "shares": [[0.25, 0.75]], "text": "x", "none": None}
    assert dict(flat_numbers({**values, "flag": True})) == {
        "loss": 1.5, "step": 3, "norms/layers.0": 2.0, "shares/0/0": 0.25, "shares/0/1": 0.75
    }  # fmt: skip


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
        for expert, share in enumerate(record.pop("expert_shares", [[]])[0]):
            record[f"expert_shares/0/{expert}"] = share
        step = record.pop("step")
        for name, value in record.items():
            curves.setdefault(name, []).append((step, float(np.float32(value))))
    return curves


def test_tensorboard_shows_each_number_of_metrics_jsonl_in_each_folder_that_is_named(calls: Path) -> None:
    """One that cannot be written is one warning."""
    trackers = ("--log-to", "tensorboard=logs", "--log-to", "tensorboard", "--log-to", "tensorboard=text.txt")
    result = train("--experts", 2, *trackers)
    assert result.stdout == "run\n"
    assert result.stderr.count("Warning") == result.stderr.count("Logging to tensorboard failed: ") == 1
    assert shown("logs/run") == shown("tensorboard/run") == logged("run")
    assert "expert_shares/0/1" in shown("logs/run")


def test_a_run_that_goes_on_after_a_crash_shows_each_step_once(calls: Path) -> None:
    def crash(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 7:
            raise KeyError("crashed")

    def train_with(*callbacks: Any, **settings: Any) -> None:
        tracker = TrackerCallback("tensorboard=logs", LogReporter())
        try:
            tinylm.train(callbacks=[tracker, *callbacks], **settings)
        finally:
            tracker.close()

    with pytest.raises(KeyError, match="crashed"):
        sizes = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 4}
        train_with(crash, files="text.txt", out="run", steps=9, log_every=1, eval_every=4, save_every=4, **sizes)
    assert [step for step, _ in shown("logs/run")["loss"]] == [1, 2, 3, 4, 5, 6]
    train_with(resume="run")
    assert [step for step, _ in shown("logs/run")["loss"]] == [*range(1, 10)]
    assert [step for step, _ in shown("logs/run")["val_loss"]] == [0, 4, 8, 9]
    assert shown("logs/run") == logged("run")


def test_a_run_that_replaces_another_one_replaces_its_curve(calls: Path) -> None:
    train("--log-to", "tensorboard")
    more = ("--steps", 3, "--eval-every", 3, "--log-every", 1, "--force", "--seed", 1)
    run_ok("train", "text.txt", "--out", "run", *more, *TINY, "--log-to", "tensorboard")
    assert len(list(Path("tensorboard/run").iterdir())) == 2
    assert shown("tensorboard/run") == logged("run")
