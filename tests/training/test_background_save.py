"""Saves that are written in a thread. Reference: the same run with saves that are written at once."""

import errno
import functools
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.training.conftest import Begin
from tests.training.run_sessions import RunSession, config_of, contents
from tinylm.config.training import Budget
from tinylm.errors import SaveError
from tinylm.run_directory import directory
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config
from tinylm.text.token_files import TokenFolder
from tinylm.training.run_store import BackgroundSaver

SMALL = {"a": torch.ones(3)}
INTERVALS = {"budget": Budget(steps=40), "eval_every": 10, "save_every": 4, "log_every": 5}


def last_step(path: Path) -> int:
    return RunDirectory(path).load_last(read_config(path)).state["step"]


@pytest.mark.usefixtures("in_background")
def test_a_save_has_the_values_of_its_step_although_they_change_while_it_is_written() -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}
    changed, found = threading.Event(), []

    def write(copies: dict[str, Tensor]) -> None:
        assert changed.wait(60)
        found.append({name: copy.tolist() for name, copy in copies.items()})

    with BackgroundSaver() as saver:
        for value in (2.0, 3.0):
            changed.clear()
            saver.write(write, tensors, wait=False)
            for tensor in tensors.values():
                tensor.fill_(value)
            changed.set()
    assert found == [{"a": [1.0] * 3, "b": [[0.0] * 2] * 2}, {"a": [2.0] * 3, "b": [[2.0] * 2] * 2}]
    assert saver.seconds > 0


@pytest.mark.parametrize("short_of", ["memory for two copies", "memory for one", "size"])
def test_a_small_save_or_one_without_memory_for_copies_is_written_at_once(
    short_of: str, request: pytest.FixtureRequest
) -> None:
    """Two copies of 104 bytes do not fit into 200, or their memory, more than any machine has, is refused."""
    if short_of != "size":
        request.getfixturevalue("in_background")
    tensor = torch.ones(1).expand(1 << 50) if short_of == "memory for one" else torch.ones(26)
    threads = []
    with BackgroundSaver(free=lambda device: 200 if "two" in short_of else None) as saver:
        saver.write(lambda tensors: threads.append(threading.current_thread()), {"a": tensor}, wait=False)
    assert threads == [threading.main_thread()]


def test_a_run_is_the_same_to_the_bit(
    begin: Begin, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(optimizer="muon", average=0.1, **INTERVALS)
    expected = contents(begin("at once", config).path)
    request.getfixturevalue("in_background")
    writers = set()
    save_last = RunDirectory.save_last

    def record(*arguments: Any) -> None:
        writers.add(threading.current_thread().name)
        save_last(*arguments)

    monkeypatch.setattr(RunDirectory, "save_last", record)
    assert contents(begin("background", config).path) == expected
    assert writers == {"MainThread", "save_0"}


@pytest.mark.usefixtures("in_background")
def test_a_full_disk_ends_the_run_and_the_save_before_is_intact(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tensors, writes = directory.write_tensors, []

    def fill(path: Path, *arguments: Any) -> None:
        writes.append(path)
        if len(writes) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_tensors(path, *arguments)

    monkeypatch.setattr(directory, "write_tensors", fill)
    with pytest.raises(SaveError, match=r"Cannot write .*run: No space left on device; the last save is intact"):
        begin(**INTERVALS)
    assert len(writes) == 4, "training goes on after a save has failed"
    assert last_step(tmp_path / "run") == 8


@pytest.mark.usefixtures("in_background")
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("interrupted", ["training", "the wait of the next save", "the wait at the end"])
def test_after_an_interrupt_the_thread_writes_no_more(interrupted: str) -> None:
    begun, ended, start = threading.Event(), [], time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))

    def write(tensors: dict[str, Tensor]) -> None:
        """Many files, which take a minute if the save is not abandoned."""
        try:
            for _ in range(600):
                begun.set()
                saver.check_abandoned()
                time.sleep(0.1)
        finally:
            ended.append(True)

    try:
        with pytest.raises(KeyboardInterrupt) as caught, BackgroundSaver() as saver:
            saver.write(write, SMALL, wait=False)
            if interrupted == "training":
                assert begun.wait(60)
                raise KeyboardInterrupt
            timer.start()
            if interrupted == "the wait of the next save":
                saver.write(lambda tensors: None, SMALL, wait=False)
        assert ended and time.monotonic() - start < 30
        assert not hasattr(caught.value, "__notes__")
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def test_an_abandoned_save_leaves_the_one_before(begin: Begin) -> None:
    run = RunDirectory(begin(**INTERVALS).path)
    config = read_config(run.path)
    save = run.load_last(config)
    weights, optimizer = save.read_weights(), save.read_optimizer()
    for files in range(3):
        with pytest.raises(StopIteration):
            check = iter([None] * files).__next__
            run.save_last(weights, optimizer, {**save.state, "step": 41}, config, check)
        assert last_step(run.path) == 40
        assert not (run.path / "last.new").exists()


@pytest.mark.usefixtures("in_background")
def test_the_error_of_a_save_is_a_note_of_another_error_and_does_not_prevent_the_next_save() -> None:
    fail, threads = Mock(side_effect=SaveError("No space", Path("run"), resumable=True)), []
    with pytest.raises(ValueError, match="of the block") as caught, BackgroundSaver() as saver:
        saver.write(fail, SMALL, wait=False)
        saver.write(lambda tensors: threads.append(threading.current_thread()), SMALL, wait=False)
        assert threads == [threading.main_thread()]
        saver.write(fail, SMALL, wait=False)
        with pytest.raises(SaveError, match="No space"):
            saver.write(fail, SMALL, wait=False)
        saver.write(lambda tensors: None, SMALL, wait=False)
        saver.write(fail, SMALL, wait=False)
        raise ValueError("of the block")
    assert caught.value.__notes__ == ["No space"]


@pytest.mark.usefixtures("in_background")
def test_the_expected_time_of_a_save_is_that_of_the_last_one_scaled_by_its_size() -> None:
    release = threading.Event()
    with BackgroundSaver(9.0) as saver:
        saver.write(lambda tensors: release.wait(60) and None, SMALL, wait=False)
        assert saver.seconds == 9.0, "known from an earlier process"
        release.set()
        saver.finish()
        assert 0 < saver.seconds < 9
        saver.seconds = 2.0
        release.clear()
        saver.write(lambda tensors: release.wait(60) and None, {"a": torch.ones(9)}, wait=False)
        assert saver.seconds == 6.0
        release.set()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.usefixtures("in_background")
def test_a_run_killed_at_random_moments_can_be_loaded_and_resumed(
    tokens: TokenFolder, tmp_path: Path, begin: Begin
) -> None:
    path, rng, reached = tmp_path / "run", random.Random(0), 0
    settings: dict[str, Any] = {"budget": Budget(steps=1_000_000), "eval_every": 4, "save_every": 2, "log_every": 1}
    for _ in range(15):
        work = RunSession(path, tokens).resume if path.exists() else functools.partial(begin, **settings)
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(rng.uniform(0.02, 0.4))
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, "the run ended by itself"
        model, _, _, weights = load_model(path)
        step = last_step(path)
        assert step >= reached and (step == 1 or step % 2 == 0)  # the first save is after one step
        assert weights.step <= step + 2 + 4  # of an evaluation after the save that was being written
        assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
        reached = step
    assert reached > 0
