"""Saves that are written in a thread. Reference: the same run with saves that are written at once."""

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.run_sessions import RunSession, config_of, contents
from tinylm.errors import SaveError, TinyLMError
from tinylm.run_directory import directory
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import read_config
from tinylm.text.token_files import TokenFolder
from tinylm.training import background_save
from tinylm.training.background_save import BackgroundSaver
from tinylm.training.weight_average import WeightAverage
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


@pytest.mark.usefixtures("in_background")
@pytest.mark.parametrize("free", [0, 200])
def test_without_memory_for_copies_a_save_is_written_at_once(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_save, "free_memory", lambda device: free)
    threads = []
    with BackgroundSaver() as saver:
        saver.write(lambda tensors: threads.append(threading.current_thread()), {"a": torch.ones(26)}, wait=False)
    assert threads == [threading.main_thread()]


def test_a_small_save_is_written_at_once() -> None:
    threads = []
    with BackgroundSaver() as saver:
        saver.write(lambda tensors: threads.append(threading.current_thread()), {"a": torch.ones(9)}, wait=False)
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


@pytest.mark.usefixtures("in_background")
def test_where_memory_for_copies_is_refused_a_save_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes.")

    threads = []
    with BackgroundSaver() as saver:
        monkeypatch.setattr(torch, "empty_like", refuse)
        saver.write(lambda tensors: threads.append(threading.current_thread()), {"a": torch.ones(3)}, wait=False)
    assert threads == [threading.main_thread()]


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
def test_an_interrupt_of_training_abandons_the_save() -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught, BackgroundSaver() as saver:
        write = LongWrite(saver)
        saver.write(write, {"a": torch.ones(3)}, wait=False)
        assert write.begun.wait(60)
        raise KeyboardInterrupt
    assert write.ended and time.monotonic() - start < 30
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.usefixtures("in_background")
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("waits_in", ["the next save", "the end"])
def test_after_an_interrupt_of_a_wait_the_thread_writes_no_more(waits_in: str) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), BackgroundSaver() as saver:
            write = LongWrite(saver)
            saver.write(write, {"a": torch.ones(3)}, wait=False)
            timer.start()
            if waits_in == "the next save":
                saver.write(nothing, {"a": torch.ones(3)}, wait=False)
        assert write.ended and time.monotonic() - start < 30
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def test_an_abandoned_save_leaves_the_one_before(
    tokens: TokenFolder,
    tmp_path: Path,
) -> None:
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
def test_a_save_that_fails_beside_another_error_is_a_note_of_it() -> None:
    with pytest.raises(ValueError, match="of the block") as caught, BackgroundSaver() as saver:
        saver.write(fail, {"a": torch.ones(3)}, wait=False)
        raise ValueError("of the block")
    assert caught.value.__notes__ == ["No space"]


@pytest.mark.usefixtures("in_background")
def test_the_save_after_one_that_failed_is_written_all_the_same() -> None:
    threads = []
    with BackgroundSaver() as saver:
        saver.write(fail, {"a": torch.ones(3)}, wait=False)
        saver.write(lambda tensors: threads.append(threading.current_thread()), {"a": torch.ones(3)}, wait=False)
        assert threads == [threading.main_thread()]
        saver.write(fail, {"a": torch.ones(3)}, wait=False)
        with pytest.raises(SaveError, match="No space"):
            saver.write(fail, {"a": torch.ones(3)}, wait=False)


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


@pytest.mark.usefixtures("in_background")
def test_a_resumed_run_keeps_the_recorded_time_of_a_save_until_it_has_written_one(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunSession(tmp_path / "run", tokens, until=20)
    run.begin(config_of(**INTERVALS))
    config = read_config(run.path)
    save = RunDirectory(run.path).load_last(config)
    state = {**save.state, "save_seconds": 900.0}
    RunDirectory(run.path).save_last(save.read_weights(), save.read_optimizer(), state, config)
    found = []
    write = BackgroundSaver.write

    def record(self: BackgroundSaver, *arguments: Any, **options: Any) -> None:
        self.finish()
        found.append(self.seconds)
        write(self, *arguments, **options)

    monkeypatch.setattr(BackgroundSaver, "write", record)
    RunSession(run.path, tokens).resume()
    assert found[0] == 900.0 > found[1] > 0


@pytest.mark.usefixtures("in_background")
def test_out_of_memory_names_the_last_complete_save_and_the_error_of_the_next_one(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tensors, update = directory.write_tensors, WeightAverage.update
    writes, failed = [], threading.Event()

    def fill(path: Path, *arguments: Any) -> None:
        writes.append(path)
        if len(writes) == 3:  # of step 8, while step 9 is computed
            assert failed.wait(60)
            raise OSError(errno.ENOSPC, "No space left on device")
        write_tensors(path, *arguments)

    def fail_in_step_9(self: WeightAverage, step: int) -> None:
        if step == 9:
            failed.set()
            raise MemoryError
        update(self, step)

    monkeypatch.setattr(directory, "write_tensors", fill)
    monkeypatch.setattr(WeightAverage, "update", fail_in_step_9)
    with pytest.raises(TinyLMError, match="in step 9; the run is saved up to step 4") as caught:
        RunSession(tmp_path / "run", tokens).begin(config_of(average=0.1, **INTERVALS))
    assert [note.split(": ", 1)[1] for note in caught.value.__notes__] == [
        "No space left on device; the last save is intact."
    ]
