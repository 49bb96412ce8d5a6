"""OpenMP spin is set before torch is imported, by commands that compute only."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tinylm.__main__ import TORCH_COMMANDS, main
from tinylm.kernels.process import FOLDERS


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The functions that are called at exit. The variables that `main` sets are unset, and restored afterwards, as are
    the arguments of the process and the thresholds of the garbage collector.
    """
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", *FOLDERS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    registered: list[object] = []
    monkeypatch.setattr("atexit.register", registered.append)
    arguments, thresholds = sys.argv[:], gc.get_threshold()
    yield registered
    sys.argv[:] = arguments
    gc.set_threshold(*thresholds)


def start(*arguments: str) -> None:
    sys.argv[:] = ["tinylm", *arguments]
    with pytest.raises(SystemExit):
        main()


def test_a_command_that_computes_sets_spin_count_and_compiler_folders_and_collects_garbage_less_often(
    at_exit: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset spin count makes threads wait actively, which is slow beside other programs."""
    assert {"train", "sample", "chat", "eval", "compare", "report", "doctor"} <= {*TORCH_COMMANDS}
    for number, command in enumerate(TORCH_COMMANDS, start=1):
        gc.set_threshold(700)
        for variable in ("GOMP_SPINCOUNT", *FOLDERS):
            monkeypatch.delenv(variable, raising=False)
        start(command, "--no-such-option")
        assert os.environ["GOMP_SPINCOUNT"] == "10000", command
        assert FOLDERS.keys() <= os.environ.keys(), command
        assert gc.get_threshold()[0] == 10_000 and at_exit == [gc.freeze] * number, command
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "5")):  # set by the user
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        monkeypatch.setenv(name, value)
        start("train", "--no-such-option")
        assert os.environ[name] == value
        assert os.environ.get("GOMP_SPINCOUNT", "5") == "5"


def test_a_command_that_computes_nothing_changes_no_setting(
    at_exit: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLM_CACHE", "/nowhere/at/all")
    before = dict(os.environ), torch.get_num_threads(), gc.get_threshold()
    commands = ("", "--help", "--version", "train --help", "nonsense", "runs", "info x", "import x y", "export x")
    for arguments in commands:
        start(*arguments.split())
        assert (dict(os.environ), torch.get_num_threads(), gc.get_threshold()) == before, arguments
        assert not at_exit
    assert not Path("/nowhere").exists()
