"""Prefetched batches are those of the function, in any order. Pinned memory needs a GPU: tests/test_gpu.py."""

import threading

import pytest
import torch

from tests.training.trainer_bench import random_batch
from tinylm.launch import Launch
from tinylm.ranks import ProcessRanks
from tinylm.rendezvous import Rendezvous
from tinylm.text.batches import Batch
from tinylm.training.prefetch import BatchPrefetcher, prefetch


def batch_of(number: int) -> Batch:
    if number == 7:
        raise OSError("the disk is gone")
    return Batch(torch.tensor([[number]]), torch.tensor([[number + 1]]))


def ids(batch: Batch) -> int:
    return int(batch.ids)


def test_batches_are_those_asked_for_in_any_order() -> None:
    prefetched = BatchPrefetcher(batch_of)
    numbers = [0, 1, 2, 2, 3, 5, 4, 0, 1]  # a resumed run starts anywhere, and a repeated step asks again
    assert [ids(prefetched(number)) for number in numbers] == numbers


def test_the_next_batch_is_made_in_a_thread_without_being_asked_for() -> None:
    made, threads = threading.Event(), []

    def batch(number: int) -> Batch:
        threads.append(threading.current_thread())
        if number == 4:
            made.set()
        return batch_of(number)

    prefetched = BatchPrefetcher(batch)
    assert ids(prefetched(3)) == 3
    assert made.wait(timeout=30)
    assert ids(prefetched(4)) == 4
    assert len(threads) >= 2 and threading.current_thread() not in threads


def test_an_error_of_a_batch_is_raised_when_it_is_asked_for() -> None:
    prefetched = BatchPrefetcher(batch_of)
    assert ids(prefetched(6)) == 6
    with pytest.raises(OSError, match="the disk is gone"):
        prefetched(7)


def test_only_the_rows_of_this_rank_are_pinned_and_only_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    ranks = ProcessRanks(Launch(rank=1, size=4), Rendezvous(None, None, 0), 1)
    whole, own = prefetch(random_batch, torch.device("cpu"), ranks)(3)
    assert not pinned and own.ids.equal(whole.ids[1::4]) and whole.ids.equal(random_batch(3).ids)
    prefetched = prefetch(random_batch, torch.device("cuda"), ranks)
    whole, own = prefetched(3)
    assert own.ids.equal(whole.ids[1::4]) and whole.ids.equal(random_batch(3).ids)
    assert pinned[0] is own.ids and pinned[1] is own.targets
    assert all(tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in pinned)
