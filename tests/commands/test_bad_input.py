"""Damaged run directories, missing devices and full disks: message, exit code, and that nothing is lost."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from tests.machines import write_profile
from tests.shell import TINY, assert_error, copied, edit_config, run_ok, snapshot, story, tinylm
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model

ONE_STEP = (*TINY, "--steps", 1)


# Run directories


def flip(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], object]] = {  # by the message; all others: tests/run_directory/test_loading.py
    "has no model.safetensors. Copy the whole run directory": lambda run: (run / "model.safetensors").unlink(),
    "model.safetensors is damaged": lambda run: cut(run / "model.safetensors"),
    "no tokenizer.json; copy the whole run directory": lambda run: (run / "tokenizer.json").unlink(),
    "belongs to another config.json": lambda run: edit_config(run, model={"norm_placement": "post"}),
    "not a tinylm run configuration": lambda run: (run / "config.json").write_text("[]"),
}


def test_a_damaged_run_or_adapter_is_an_error_with_the_reason(run: Path, here: Path, adapter: Path) -> None:
    path = here / "bad"
    commands = (("sample", "-n", 2, "--model"), ("eval", "--model"), ("train", "-", "--steps", 1, "--init-from"))
    for number, (message, damage) in enumerate(DAMAGE.items()):
        damage(copied(run, path))
        before = snapshot(here)
        command = commands[number % len(commands)]
        assert_error(tinylm(*command, "bad", stdin=story(500)), 1, message, "bad", sentences=3)
        assert snapshot(here) == before
        shutil.rmtree(path)
    for name, damage in (("model", Path.unlink), ("optimizer", flip)):
        damage(copied(run, path) / f"last/{name}.safetensors")
        before = snapshot(path)
        result = tinylm("train", "--resume", path, "--steps", 300)
        assert_error(result, 1, f"{path}/last is damaged", "cannot be resumed", f"tinylm train --init-from {path}")
        assert snapshot(path) == before
        run_ok("sample", "-m", path, "-n", 2)
        shutil.rmtree(path)
    base = ("--model", run)
    for damage in (cut, flip, Path.unlink):
        damage(copied(adapter, path) / "adapter.safetensors")
        assert_error(tinylm("sample", "--adapter", path, *base), 1, "adapter.safetensors", sentences=3)
        assert_error(tinylm("merge-lora", path, *base, "--out", "merged"), 1, "adapter.safetensors", sentences=3)
        assert [entry.name for entry in here.iterdir()] == ["bad"]
        shutil.rmtree(path)


# The machine


def test_lack_of_a_device_or_of_memory_names_options(run: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.backends.mps.is_available() else "mps"  # no machine has both
    (here / "text.txt").write_text(story(1000))
    path = copied(run, here / "gpu")
    edit_config(path, runtime={"device": device})
    before = snapshot(here)
    for command in (("train", "text.txt"), ("sample", "-m", run), ("eval", "text.txt", "-m", run)):
        assert_error(tinylm(*command, "--device", device), 2, f"--device {device} is not available", "use one of: ")
    assert_error(tinylm("train", "--resume", path, "--steps", 300), 2, f"--device {device} is not available")
    assert snapshot(here) == before
    run_ok("sample", "-m", path, "-n", 1)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes.")
    before = snapshot(here)
    monkeypatch.setattr(RunDirectory, "create", Mock(side_effect=error))
    message = "Out of memory. Reduce one of: --size, --context, --batch-size, --micro-batch."
    assert_error(tinylm("train", "text.txt", *ONE_STEP), 1, message)
    assert snapshot(here) == before


# The disk


FULL = "No space left on device"


def test_a_disk_full_at_first_leaves_a_whole_run_or_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third of the writes before the run appears at its path is the first to fail in turn."""
    (here / "text.txt").write_text(story(1000))
    before = snapshot(here)
    failures = calls = 0
    fsync = os.fsync

    def fill(descriptor: int) -> None:
        nonlocal calls
        if os.fstat(descriptor).st_ino == here.stat().st_ino:  # flushed when the run is in place, and may fail
            return
        calls += 1
        if calls > works:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    for works in range(0, 60, 3):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setenv("TINYLM_CACHE", str(here.parent / f"cache-{works}"))
            write_profile(here.parent / f"cache-{works}")
            patch.setattr(os, "fsync", fill)
            result = tinylm("train", "text.txt", "--out", "run", *ONE_STEP)
        if calls <= works:
            break
        failures += 1
        assert_error(result, 1, FULL)
        if (here / "run").exists():
            load_model(here / "run")
            shutil.rmtree(here / "run")
        assert snapshot(here) == before
    assert result.exit_code == 0
    assert failures > 3


@pytest.mark.usefixtures("shelf_cache")
def test_a_write_error_names_the_command_that_continues(run: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied(run, here / "again")
    error = safetensors.SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)")
    monkeypatch.setattr(safetensors.torch, "save_file", Mock(side_effect=error))
    result = tinylm("train", "--resume", path, "--steps", 202)
    continued = f"then continue: tinylm train --resume {path}"
    assert_error(result, 1, f"Cannot write {path}: ", FULL, "; the last save is intact.", continued)
    monkeypatch.undo()
    load_model(path)
