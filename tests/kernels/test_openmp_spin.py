"""OpenMP spin is set before torch is imported, by commands that compute only."""

import gc
import os
from pathlib import Path

import pytest
import torch

from tinylm.__main__ import TORCH_COMMANDS, main
from tinylm.kernels.process import FOLDERS


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables that `main` sets, and restore them afterwards."""
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
        assert os.environ["GOMP_SPINCOUNT"] == "10000", command
        assert FOLDERS.keys() <= os.environ.keys(), command
        assert calls == [10_000, gc.freeze] * number, command
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "5")):  # set by the user
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        monkeypatch.setenv(name, value)
        start(monkeypatch, "train", "--no-such-option")
        assert os.environ[name] == value
        assert os.environ.get("GOMP_SPINCOUNT", "5") == "5"


@pytest.mark.usefixtures("unset")
def test_a_command_that_computes_nothing_changes_no_setting(
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
