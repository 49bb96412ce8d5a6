"""OpenMP spin is chosen before torch is imported; the measurement leaves no thread, file or setting behind."""

import gc
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from tinylm.__main__ import TORCH_COMMANDS, main
from tinylm.kernels import openmp_spin
from tinylm.kernels.compiler_cache import FOLDERS
from tinylm.kernels.openmp_spin import NO_SPIN, SLOW_WAKE_UP, SPIN_COUNT, choose_spin_count

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity, as on Linux")
two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cores, and an empty machine profile."""
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 3}, raising=False)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("times, spins", [(0.1, NO_SPIN), (0.9, NO_SPIN), (1.1, SPIN_COUNT), (100, SPIN_COUNT)])
def test_threads_spin_where_a_wake_up_takes_long(times: float, spins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, int]] = []

    def wake_up_seconds(core: int, other: int) -> float:
        measured.append((core, other))
        return times * SLOW_WAKE_UP

    monkeypatch.setattr(openmp_spin, "_wake_up_seconds", wake_up_seconds)
    assert choose_spin_count() == spins
    assert measured == [(2, 5)] * openmp_spin.SERIES


@pytest.mark.usefixtures("cores")
def test_threads_do_not_spin_if_no_thread_can_be_started_for_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert choose_spin_count() == NO_SPIN


@pytest.mark.usefixtures("cores")
def test_threads_do_not_spin_if_a_sandbox_forbids_setting_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    before = threading.active_count()
    assert choose_spin_count() == NO_SPIN
    assert threading.active_count() == before


def test_threads_do_not_spin_on_one_core_or_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp_spin, "_wake_up_seconds", lambda *cores: 1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert choose_spin_count() == NO_SPIN
    monkeypatch.delattr(os, "sched_getaffinity")
    assert choose_spin_count() == NO_SPIN


@two_cores
def test_a_measurement_is_short_and_leaves_nothing_behind() -> None:
    def resources() -> tuple[int, set[int], int]:
        return threading.active_count(), os.sched_getaffinity(0), len(list(Path("/proc/self/fd").iterdir()))

    before, cores = resources(), sorted(os.sched_getaffinity(0))
    assert 0 < openmp_spin._wake_up_seconds(cores[0], cores[-1]) < 1
    assert resources() == before


@linux
def test_the_latency_is_half_of_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances by 3 seconds at each reading."""
    core = min(os.sched_getaffinity(0))
    seconds = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    assert openmp_spin._wake_up_seconds(core, core, rounds=3) == 1.5


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables that `main` sets, and restore them afterwards."""
    monkeypatch.setattr(openmp_spin, "choose_spin_count", lambda: 77)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", *FOLDERS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


WITHOUT_COMPUTATION = (
    *("", "--help", "--version", "train --help", "sample -h", "nonsense"),
    *("runs", "cache", "info x", "import x y", "export x"),
)


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["tinylm", *arguments])
    with pytest.raises(SystemExit):
        main()


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("command", TORCH_COMMANDS)
def test_a_command_that_computes_sets_spin_count_and_compiler_folders(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, command, "--no-such-option")
    assert os.environ["GOMP_SPINCOUNT"] == "77"
    assert FOLDERS.keys() <= os.environ.keys()


@pytest.mark.parametrize("command", ["train", "sample", "chat", "eval", "compare", "report", "doctor"])
def test_commands_that_compute_logits_have_the_same_spin(command: str) -> None:
    """An unset spin count makes threads of an unlisted command wait actively, which is slow beside other programs."""
    assert command in TORCH_COMMANDS


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name, value", [("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "active")])
def test_variables_that_the_user_has_set_are_kept(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    start(monkeypatch, "train", "--no-such-option")
    assert os.environ[name] == value
    assert os.environ.get("GOMP_SPINCOUNT", "5") == "5"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("arguments", WITHOUT_COMPUTATION)
def test_a_command_that_computes_nothing_measures_nothing_and_changes_no_setting(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLM_CACHE", "/nowhere/at/all")
    before = dict(os.environ), torch.get_num_threads()
    start(monkeypatch, *arguments.split())
    assert (dict(os.environ), torch.get_num_threads()) == before
    assert not Path("/nowhere").exists()


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("arguments", WITHOUT_COMPUTATION)
def test_a_command_that_computes_nothing_leaves_the_garbage_collector_as_it_is(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gc.set_threshold", None)
    monkeypatch.setattr("atexit.register", None)
    start(monkeypatch, *arguments.split())


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("command", TORCH_COMMANDS)
def test_a_command_that_computes_collects_garbage_less_often(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("gc.set_threshold", calls.append)
    monkeypatch.setattr("atexit.register", calls.append)
    start(monkeypatch, command, "--no-such-option")
    assert calls == [10_000, gc.freeze]


@two_cores
def test_the_latency_is_measured_once_as_the_minimum_of_several_series(monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    found = iter([9 * SLOW_WAKE_UP, 2 * SLOW_WAKE_UP, 0.5 * SLOW_WAKE_UP, 70 * SLOW_WAKE_UP, SLOW_WAKE_UP])
    monkeypatch.setattr(openmp_spin, "_wake_up_seconds", lambda *cores: next(found))
    assert choose_spin_count() == choose_spin_count() == NO_SPIN
    assert next(found, None) is None
    monkeypatch.setattr(openmp_spin, "_wake_up_seconds", lambda *cores: 1.0)
    assert choose_spin_count() == NO_SPIN
