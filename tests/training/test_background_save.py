"""Saves that are written in a thread. Reference: the same run with saves that are written at once."""

import errno
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.run_sessions import RunSession, config_of, contents
from tinylm.errors import SaveError
from tinylm.run_directory import directory
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config
from tinylm.text.token_files import TokenFolder
from tinylm.training import background_save
from tinylm.training.background_save import BackgroundSaver
from tinylm.training_config import Budget

INTERVALS = {"budget": Budget(steps=40), "eval_every": 10, "save_every": 4, "log_every": 5}


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_save, "MIN_BYTES", 0)


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


def refuse(*_: object, **__: object) -> Tensor:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes.")


@pytest.mark.parametrize("short_of", ["memory for two copies", "memory for one", "size"])
def test_a_small_save_or_one_without_memory_for_copies_is_written_at_once(
    short_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of 104 bytes do not fit into 200, or their memory is refused."""
    if short_of != "size":
        monkeypatch.setattr(background_save, "MIN_BYTES", 0)
        monkeypatch.setattr(background_save, "free_memory", lambda device: 200 if "two" in short_of else None)
        monkeypatch.setattr(torch, "empty_like", refuse)
    threads = []
    with BackgroundSaver() as saver:
        tensors = {"a": torch.ones(26)}
        saver.write(lambda tensors: threads.append(threading.current_thread()), tensors, wait=False)
    assert threads == [threading.main_thread()]


def test_a_run_is_the_same_to_the_bit(tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(optimizer="muon", average=0.1, **INTERVALS)
    RunSession(tmp_path / "at once", tokens).begin(config)
    monkeypatch.setattr(background_save, "MIN_BYTES", 0)
    writers = set()
    save_last = RunDirectory.save_last

    def record(*arguments: Any) -> None:
        writers.add(threading.current_thread().name)
        save_last(*arguments)

    monkeypatch.setattr(RunDirectory, "save_last", record)
    RunSession(tmp_path / "background", tokens).begin(config)
    assert writers == {"MainThread", "save_0"}
    assert contents(tmp_path / "background") == contents(tmp_path / "at once")


@pytest.mark.usefixtures("in_background")
def test_a_full_disk_ends_the_run_and_the_save_before_is_intact(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tensors, writes = directory.write_tensors, []

    def fill(path: Path, *arguments: Any) -> None:
        writes.append(path)
        if len(writes) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_tensors(path, *arguments)

    monkeypatch.setattr(directory, "write_tensors", fill)
    run = RunSession(tmp_path / "run", tokens)
    with pytest.raises(SaveError, match=r"Cannot write .*run: No space left on device; the last save is intact"):
        run.begin(config_of(**INTERVALS))
    assert len(writes) == 4, "training goes on after a save has failed"
    assert RunDirectory(tmp_path / "run").load_last(read_config(tmp_path / "run")).state["step"] == 8


def nothing(tensors: dict[str, Tensor]) -> None:
    pass


def fail(tensors: dict[str, Tensor]) -> None:
    raise SaveError("No space", Path("run"), resumable=True)


class LongWrite:
    """A write of many files, which takes a minute if it is not abandoned."""

    def __init__(self, saver: BackgroundSaver) -> None:
        self.saver = saver
        self.begun, self.ended = threading.Event(), False

    def __call__(self, tensors: dict[str, Tensor]) -> None:
        try:
            for _ in range(600):
                self.begun.set()
                self.saver.check_abandoned()
                time.sleep(0.1)
        finally:
            self.ended = True


@pytest.mark.usefixtures("in_background")
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("interrupted", ["training", "the wait of the next save", "the wait at the end"])
def test_after_an_interrupt_the_thread_writes_no_more(interrupted: str) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt) as caught, BackgroundSaver() as saver:
            write = LongWrite(saver)
            saver.write(write, {"a": torch.ones(3)}, wait=False)
            if interrupted == "training":
                assert write.begun.wait(60)
                raise KeyboardInterrupt
            timer.start()
            if interrupted == "the wait of the next save":
                saver.write(nothing, {"a": torch.ones(3)}, wait=False)
        assert write.ended and time.monotonic() - start < 30
        assert not hasattr(caught.value, "__notes__")
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def test_an_abandoned_save_leaves_the_one_before(tokens: TokenFolder, tmp_path: Path) -> None:
    run = RunSession(tmp_path / "run", tokens)
    run.begin(config_of(**INTERVALS))
    directory_, config = RunDirectory(run.path), read_config(run.path)
    save = directory_.load_last(config)
    weights, optimizer = save.read_weights(), save.read_optimizer()
    for files in range(3):
        check = iter([None] * files).__next__
        with pytest.raises(StopIteration):
            directory_.save_last(weights, optimizer, {**save.state, "step": 41}, config, check)
        assert directory_.load_last(config).state["step"] == 40
        assert not (run.path / "last.new").exists()


@pytest.mark.usefixtures("in_background")
def test_the_error_of_a_save_is_a_note_of_another_error_and_does_not_prevent_the_next_save() -> None:
    threads, small = [], {"a": torch.ones(3)}
    with pytest.raises(ValueError, match="of the block") as caught, BackgroundSaver() as saver:
        saver.write(fail, small, wait=False)
        saver.write(lambda tensors: threads.append(threading.current_thread()), small, wait=False)
        assert threads == [threading.main_thread()]
        saver.write(fail, small, wait=False)
        with pytest.raises(SaveError, match="No space"):
            saver.write(fail, small, wait=False)
        saver.write(nothing, small, wait=False)
        saver.write(fail, small, wait=False)
        raise ValueError("of the block")
    assert caught.value.__notes__ == ["No space"]


@pytest.mark.usefixtures("in_background")
def test_the_expected_time_of_a_save_is_that_of_the_last_one_scaled_by_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    with BackgroundSaver(9.0) as saver:
        saver.write(lambda tensors: release.wait(60) and None, {"a": torch.ones(3)}, wait=False)
        assert saver.seconds == 9.0, "known from an earlier process"
        release.set()
        saver.finish()
        assert 0 < saver.seconds < 9
        saver.seconds = 2.0
        release.clear()
        saver.write(lambda tensors: release.wait(60) and None, {"a": torch.ones(9)}, wait=False)
        assert saver.seconds == 6.0
        release.set()


def train_until_killed(path: Path, tokens: TokenFolder) -> None:
    settings: dict[str, Any] = {"budget": Budget(steps=1_000_000), "eval_every": 4, "save_every": 2, "log_every": 1}
    session = RunSession(path, tokens)
    session.resume() if path.exists() else session.begin(config_of(**settings))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.usefixtures("in_background")
def test_a_run_killed_at_random_moments_can_be_loaded_and_resumed(tokens: TokenFolder, tmp_path: Path) -> None:
    path, rng, reached = tmp_path / "run", random.Random(0), 0
    for _ in range(15):
        process = multiprocessing.get_context("fork").Process(target=train_until_killed, args=(path, tokens))
        process.start()
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(rng.uniform(0.02, 0.4))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, "the run ended by itself"
        model, _, _, weights = load_model(path)
        step = RunDirectory(path).load_last(read_config(path)).state["step"]
        assert step >= reached and step % 2 == 0
        assert weights.step <= step + 2 + 4  # of an evaluation after the save that was being written
        assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
        reached = step
    assert reached > 0
