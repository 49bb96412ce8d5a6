"""OpenMP spin is chosen before torch is imported; the measurement leaves no thread, file or setting behind."""

import gc
import os
import shutil
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tinylm.__main__ import TORCH_COMMANDS, main
from tinylm.kernels import process
from tinylm.kernels.process import FOLDERS, NO_SPIN, SLOW_WAKE_UP, SPIN_COUNT, choose_spin_count

two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cores, and an empty machine profile."""
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 3}, raising=False)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("times, spins", [(0.9, NO_SPIN), (1.1, SPIN_COUNT)])
def test_threads_spin_where_a_wake_up_takes_long(times: float, spins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latency is the minimum of several series between the first and the last core, measured once."""
    measured: list[tuple[int, int]] = []

    def wake_up_seconds(core: int, other: int) -> float:
        measured.append((core, other))
        return SLOW_WAKE_UP * (times if len(measured) == 3 else 2 + len(measured))

    monkeypatch.setattr(process, "_wake_up_seconds", wake_up_seconds)
    assert choose_spin_count() == choose_spin_count() == spins
    assert measured == [(2, 5)] * process.SERIES


@pytest.mark.usefixtures("cores")
def test_threads_do_not_spin_where_nothing_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox forbids starting a thread or setting the affinity; there is one core; it is not Linux."""
    before = threading.active_count()
    for owner, name, error in ((threading.Thread, "start", RuntimeError), (os, "sched_setaffinity", PermissionError)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Mock(side_effect=error), raising=False)
            assert choose_spin_count() == NO_SPIN
        assert threading.active_count() == before
    monkeypatch.setattr(process, "_wake_up_seconds", lambda *cores: 1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert choose_spin_count() == NO_SPIN
    monkeypatch.delattr(os, "sched_getaffinity")
    assert choose_spin_count() == NO_SPIN


@two_cores
def test_a_measurement_is_half_of_a_round_trip_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real clock, and with one that advances by 3 seconds at each reading."""

    def resources() -> tuple[int, set[int], int]:
        return threading.active_count(), os.sched_getaffinity(0), len(list(Path("/proc/self/fd").iterdir()))

    before, cores = resources(), sorted(os.sched_getaffinity(0))
    assert 0 < process._wake_up_seconds(cores[0], cores[-1]) < 1
    assert resources() == before
    seconds = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    assert process._wake_up_seconds(cores[0], cores[0], rounds=3) == 1.5


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables that `main` sets, and restore them afterwards."""
    monkeypatch.setattr(process, "choose_spin_count", lambda: 77)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", *FOLDERS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["tinylm", *arguments])
    with pytest.raises(SystemExit):
        main()


@pytest.mark.usefixtures("unset")
def test_a_command_that_computes_sets_spin_count_and_compiler_folders_and_collects_garbage_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unset spin count makes threads wait actively, which is slow beside other programs."""
    assert {"train", "sample", "chat", "eval", "compare", "report", "doctor"} <= {*TORCH_COMMANDS}
    calls: list[object] = []
    monkeypatch.setattr("gc.set_threshold", calls.append)
    monkeypatch.setattr("atexit.register", calls.append)
    for number, command in enumerate(TORCH_COMMANDS, start=1):
        for variable in ("GOMP_SPINCOUNT", *FOLDERS):
            monkeypatch.delenv(variable, raising=False)
        start(monkeypatch, command, "--no-such-option")
        assert os.environ["GOMP_SPINCOUNT"] == "77", command
        assert FOLDERS.keys() <= os.environ.keys(), command
        assert calls == [10_000, gc.freeze] * number, command
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "5")):  # set by the user
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        monkeypatch.setenv(name, value)
        start(monkeypatch, "train", "--no-such-option")
        assert os.environ[name] == value
        assert os.environ.get("GOMP_SPINCOUNT", "5") == "5"


@pytest.mark.usefixtures("unset")
def test_a_command_that_computes_nothing_measures_nothing_and_changes_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gc.set_threshold", None)
    monkeypatch.setattr("atexit.register", None)
    monkeypatch.setenv("TINYLM_CACHE", "/nowhere/at/all")
    before = dict(os.environ), torch.get_num_threads()
    commands = ("", "--help", "--version", "train --help", "nonsense", "runs", "info x", "import x y", "export x")
    for arguments in commands:
        start(monkeypatch, *arguments.split())
        assert (dict(os.environ), torch.get_num_threads()) == before, arguments
    assert not Path("/nowhere").exists()
