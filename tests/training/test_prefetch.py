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


def test_batches_are_those_asked_for_in_any_order_and_an_error_is_raised_when_its_batch_is() -> None:
    prefetched = BatchPrefetcher(batch_of)
    numbers = [0, 1, 2, 2, 3, 5, 4, 0, 1, 6]  # a resumed run starts anywhere, and a repeated step asks again
    assert [int(prefetched(number).ids) for number in numbers] == numbers
    with pytest.raises(OSError, match="the disk is gone"):
        prefetched(7)


def test_the_next_batch_is_made_in_a_thread_without_being_asked_for() -> None:
    made, threads = threading.Event(), []

    def batch(number: int) -> Batch:
        threads.append(threading.current_thread())
        if number == 4:
            made.set()
        return batch_of(number)

    prefetched = BatchPrefetcher(batch)
    assert int(prefetched(3).ids) == 3
    assert made.wait(timeout=30)
    assert int(prefetched(4).ids) == 4
    assert len(threads) >= 2 and threading.current_thread() not in threads


class PinnableTensor(torch.Tensor):
    """A tensor that is pinned without a GPU. A patch of `torch.Tensor` would be undone while the thread still uses it,
    and crash the process."""

    pinned = False

    def pin_memory(self, device: object = None) -> "PinnableTensor":
        self.pinned = True
        return self


def pinnable_batch(number: int) -> Batch:
    batch = random_batch(number)
    return Batch(batch.ids.as_subclass(PinnableTensor), batch.targets.as_subclass(PinnableTensor))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_the_rows_of_this_rank_are_pinned_and_only_for_cuda(device: str) -> None:
    ranks = ProcessRanks(Launch(rank=1, size=4), Rendezvous(None, None, 0), 1)
    whole, own = prefetch(pinnable_batch, torch.device(device), ranks)(3)
    expected = random_batch(3)
    for part, all_rows, rows in ((own.ids, whole.ids, expected.ids), (own.targets, whole.targets, expected.targets)):
        assert isinstance(part, PinnableTensor) and isinstance(all_rows, PinnableTensor)
        assert part.equal(rows[1::4]) and all_rows.equal(rows)
        assert part.pinned == (device == "cuda") and not all_rows.pinned
        if part.pinned:
            assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
