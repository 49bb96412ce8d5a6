"""How long waiting threads spin is settled before torch is loaded; nothing of the measurement may stay behind."""

import os
import threading
import time
from pathlib import Path

import pytest

from tinylm import spinning
from tinylm.__main__ import main
from tinylm.spinning import ASLEEP, SLOW_WAKING, SPINS, choose_spin_count

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a core is chosen as on Linux")
two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert asked == [(2, 5)]


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


@pytest.mark.parametrize("already, then", [(None, "77"), ("5", "5")])
def test_the_command_line_settles_it_unless_the_user_has(
    already: str | None, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spinning, "choose_spin_count", lambda: 77)
    monkeypatch.setenv("GOMP_SPINCOUNT", already or "")
    if already is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setattr("sys.argv", ["tinylm", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["GOMP_SPINCOUNT"] == then
