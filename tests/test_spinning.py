"""How long waiting threads spin is settled before torch is loaded; nothing of the measurement may stay behind."""

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from tinylm import spinning
from tinylm.__main__ import main
from tinylm.compiler import FOLDERS
from tinylm.spinning import ASLEEP, SLOW_WAKING, SPINS, choose_spin_count

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a core is chosen as on Linux")
two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, of a machine that was not measured yet."""
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 3}, raising=False)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("times, spins", [(0.1, ASLEEP), (0.9, ASLEEP), (1.1, SPINS), (100, SPINS)])
def test_threads_spin_where_waking_takes_long(times: float, spins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def waking(core: int, other: int) -> float:
        asked.append((core, other))
        return times * SLOW_WAKING

    monkeypatch.setattr(spinning, "_waking_seconds", waking)
    assert choose_spin_count() == spins
    assert asked == [(2, 5)] * spinning.SERIES


@pytest.mark.usefixtures("cores")
def test_they_sleep_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert choose_spin_count() == ASLEEP


@pytest.mark.usefixtures("cores")
def test_they_sleep_where_a_sandbox_forbids_to_choose_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    before = threading.active_count()
    assert choose_spin_count() == ASLEEP
    assert threading.active_count() == before


def test_they_sleep_on_one_core_and_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "_waking_seconds", lambda *cores: 1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert choose_spin_count() == ASLEEP
    monkeypatch.delattr(os, "sched_getaffinity")
    assert choose_spin_count() == ASLEEP


@two_cores
def test_a_measurement_takes_a_moment_and_leaves_nothing_behind() -> None:
    def held() -> tuple[int, set[int], int]:
        return threading.active_count(), os.sched_getaffinity(0), len(list(Path("/proc/self/fd").iterdir()))

    before, cores = held(), sorted(os.sched_getaffinity(0))
    assert 0 < spinning._waking_seconds(cores[0], cores[-1]) < 1
    assert held() == before


@linux
def test_what_is_measured_is_one_way_of_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a clock that gains 3 seconds whenever it is looked at."""
    core = min(os.sched_getaffinity(0))
    seconds = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    assert spinning._waking_seconds(core, core, rounds=3) == 1.5


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user nor an earlier test has set what `main` sets; all is as before afterwards."""
    monkeypatch.setattr(spinning, "choose_spin_count", lambda: 77)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", *FOLDERS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["tinylm", *arguments])
    with pytest.raises(SystemExit):
        main()


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("command", ["train", "sample", "eval", "finetune-lora", "finetune-adapter", "merge-lora"])
def test_a_command_that_computes_settles_it(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, command, "--no-such-option")
    assert os.environ["GOMP_SPINCOUNT"] == "77"
    assert FOLDERS.keys() <= os.environ.keys()


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name, value", [("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_user_has_settled_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    start(monkeypatch, "train", "--no-such-option")
    assert os.environ[name] == value
    assert os.environ.get("GOMP_SPINCOUNT", "5") == "5"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(
    "arguments", ["", "--help", "--version", "runs", "info x", "train --help", "sample -h", "nonsense"]
)
def test_a_command_that_computes_nothing_measures_nothing_and_changes_no_setting(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLM_CACHE", "/nowhere/at/all")
    before = dict(os.environ)
    start(monkeypatch, *arguments.split())
    assert dict(os.environ) == before
    assert not Path("/nowhere").exists()


@two_cores
def test_the_latency_is_measured_once_and_the_best_of_several_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    found = iter([9 * SLOW_WAKING, 2 * SLOW_WAKING, 0.5 * SLOW_WAKING, 70 * SLOW_WAKING, SLOW_WAKING])
    monkeypatch.setattr(spinning, "_waking_seconds", lambda *cores: next(found))
    assert choose_spin_count() == choose_spin_count() == ASLEEP
    assert next(found, None) is None
    monkeypatch.setattr(spinning, "_waking_seconds", lambda *cores: 1.0)
    assert choose_spin_count() == ASLEEP
