"""Saves of shards, with ranks that are threads of one process. Reference: the tensors that were divided among them."""

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.run_directory.saved_runs import CONFIG, TOKENIZER
from tests.thread_ranks import in_ranks
from tinylm.errors import SaveError
from tinylm.run_directory import directory
from tinylm.run_directory.directory import RunDirectory, ShardOnlyRun
from tinylm.run_directory.weights import WHOLE, Shard
from tinylm.system.ranks import Ranks
from tinylm.training.run_store import RunStore, open_store
from tinylm.training.state import TrainerState, optimizer_tensors

SIZE = 4  # the last rank has no rows of 5


def trained(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of 5 rows after an update that depends on the step."""
    generator = torch.Generator().manual_seed(step)  # the global one belongs to all threads
    model = nn.Linear(4, 5)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    return model, optimizer


@contextlib.contextmanager
def saving(path: Path, ranks: Ranks, sharded: bool = True) -> Iterator[tuple[RunStore, Callable[[int], None]]]:
    """A store in the background, and a function that saves the rows of this rank of the model of a step."""
    shard = Shard(ranks.launch.rank, ranks.size) if sharded else WHOLE
    run = RunDirectory.create(path, CONFIG, TOKENIZER) if ranks.is_first else ShardOnlyRun(path)

    def save(step: int) -> None:
        model, optimizer = trained(step)
        rows: Any = nn.Linear(4, 5)
        for name, parameter in model.named_parameters():
            part = nn.Parameter(shard.rows(parameter.detach()).clone())
            setattr(rows, name, part)
            state = optimizer.state.pop(parameter)
            optimizer.state[part] = {quantity: shard.rows(value).clone() for quantity, value in state.items()}
        store.save_for_resuming(rows, optimizer, TrainerState(step=step, val_loss=1.0))

    with open_store(run, CONFIG, ranks, shard, -1, 0.0) as store:
        yield store, save


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch, in_background: None) -> Mock:
    """Saves are written in the background. The side effect is called with each file before it is written."""
    write_tensors, before = directory.write_tensors, Mock()
    monkeypatch.setattr(directory, "write_tensors", lambda path, *rest: (before(path), write_tensors(path, *rest)))
    return before


def check_saved(path: Path, step: int) -> None:
    """`last/` has the tensors of `trained(step)`, for any number of readers."""
    model, optimizer = trained(step)
    save = RunDirectory(path).load_last(CONFIG)
    assert save.state["step"] == step
    for shard in (Shard(index, readers) for readers in (1, 2, 3) for index in range(readers)):
        for found, expected in (
            (save.read_weights(shard), model.state_dict()),
            (save.read_optimizer(shard), optimizer_tensors(optimizer, model)),
        ):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], shard.rows(expected[name])) for name in expected)


@pytest.mark.usefixtures("writing")
def test_the_rows_of_all_ranks_are_one_save_that_any_number_of_ranks_reads(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> int:
        with saving(tmp_path / "run", ranks) as (store, save):
            for step in (1, 2, 3):
                save(step)
        return store.saved_step

    assert in_ranks(SIZE, work) == [3] * SIZE
    check_saved(tmp_path / "run", 3)
    files = {f"{kind}-0000{i}-of-00004.safetensors" for kind in ("model", "optimizer") for i in (1, 2, 3, 4)}
    assert {file.name for file in (tmp_path / "run" / "last").iterdir()} == {*files, "state.json", "manifest.json"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("sharded", [True, False])
def test_a_save_is_committed_when_all_ranks_have_written_their_rows(
    sharded: bool, tmp_path: Path, writing: Mock
) -> None:
    """With replicas, only rank 0 writes; another rank may run out of memory meanwhile, and then names the save."""
    may_write = threading.Event()

    def wait(path: Path) -> None:
        if (not sharded or "00002-of" in path.name) and (tmp_path / "run").exists():  # after the first save
            assert may_write.wait(60)

    writing.side_effect = wait

    def work(ranks: Ranks) -> tuple[int, int]:
        with saving(tmp_path / "run", ranks, sharded) as (store, save):
            save(1)
            save(2)
            for _ in range(3):
                store.check()
            before = store.saved_step
            if ranks.is_first:
                check_saved(tmp_path / "run", 1)
                may_write.set()
        return before, store.saved_step

    assert in_ranks(SIZE, work) == [(1, 2)] * SIZE
    check_saved(tmp_path / "run", 2)


@pytest.mark.parametrize(("failing", "step"), [(0, 1), (2, 1), (0, 2), (3, 2)])
def test_a_full_disk_of_one_rank_leaves_the_save_before_and_no_files_of_the_new_one(
    failing: int, step: int, tmp_path: Path, writing: Mock
) -> None:
    """Before the first save, the folder at the path is one that `force` replaces, and the error names no save."""
    run, messages = tmp_path / "run", []
    run.mkdir()

    def fill(path: Path) -> None:
        if f"0000{failing + 1}-of" in path.name and (run / "last").exists() == (step == 2):
            raise OSError(errno.ENOSPC, "No space left on device")

    writing.side_effect = fill

    def work(ranks: Ranks) -> None:
        with saving(run, ranks) as (store, save):
            try:
                save(1)
                save(2)
                store.finish()
            except SaveError as error:
                messages.append(str(error))
                raise

    with pytest.raises(SaveError):
        in_ranks(SIZE, work)
    intact = "the last save is intact" if step == 2 else "remove the cause, or choose another `out`"
    assert len(messages) == 1 and f"run: No space left on device; {intact}" in messages[0]
    if step == 1:
        assert not list(run.iterdir())
    else:
        check_saved(run, 1)
    assert not list(tmp_path.glob("*/last.new/*"))
