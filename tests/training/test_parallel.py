"""Sums over ranks, with ranks that are simulated in one process."""

import pytest
import torch

from tests.training.test_trainer import random_batch
from tinylm.launch import Launch
from tinylm.ranks import BUCKET_BYTES, ProcessRanks, Ranks, _buckets
from tinylm.training.graceful_stop import StopRequest
from tinylm.training.parallel import sum_gradients
from tinylm.training.trainer import StopTraining


class OtherGives(Ranks):
    """Rank 0 of two: rank 1 gives a signal number, and gradients of ones."""

    def __init__(self, signal_number: int = 0) -> None:
        super().__init__(Launch(size=2))
        self.signal_number = signal_number

    def gather(self, value: object) -> list[object]:
        return [value, self.signal_number]

    def add(self, tensors: object) -> None:
        for tensor in tensors:  # type: ignore[attr-defined]
            tensor += 1


def test_a_parameter_without_a_gradient_on_one_rank_gets_that_of_the_other_and_none_if_both_lack_it() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([1.0, 2.0])
    sum_gradients(parameters, [[1, 2], [2]], OtherGives())
    assert parameters[0].grad.tolist() == [2.0, 3.0]
    assert parameters[1].grad is not None and parameters[1].grad.tolist() == [1.0, 1.0]
    assert parameters[2].grad is None


def test_a_signal_at_another_rank_stops_this_one_with_its_number() -> None:
    stop = StopRequest(OtherGives(signal_number=15))
    with pytest.raises(StopTraining):
        stop.check()
    assert stop.signal_number == 15


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_parts_of_a_batch_have_each_row_once(size: int) -> None:
    batch = random_batch(0, rows=6)
    parts = [ProcessRanks(Launch(rank=rank, size=size), None, 1).part(batch).ids for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == sorted(batch.ids.tolist())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_ranks_are_dealt_each_batch_once_in_the_same_number_of_turns(size: int) -> None:
    batches = [random_batch(number, rows=1 + number) for number in range(5)]
    dealt = [list(Ranks(Launch(rank=rank, size=size)).deal(batches)) for rank in range(size)]
    assert {len(turns) for turns in dealt} == {-(-5 // size)}
    found = [batch for turns in dealt for batch, _ in turns if batch is not None]
    assert sorted(map(id, found)) == sorted(map(id, batches))
    assert all(sum(targets for _, targets in turns) == sum(batch.n_targets for batch in batches) for turns in dealt)


def test_buckets_have_all_tensors_in_order_and_are_bounded() -> None:
    sizes = [1, BUCKET_BYTES // 4, 5, BUCKET_BYTES // 8, BUCKET_BYTES // 8, 7]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    found = list(_buckets(tensors))
    assert [tensor.numel() for bucket in found for tensor in bucket] == sizes
    assert all(len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket) <= BUCKET_BYTES for bucket in found)
