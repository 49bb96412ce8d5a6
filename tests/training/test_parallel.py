"""Batches of ranks and sums over them, simulated in one process. Pinned memory needs a GPU: tests/test_gpu.py."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.shell import run_child
from tests.training.trainer_bench import random_batch
from tinylm.distributed import ranks
from tinylm.distributed.ranks import ProcessRanks, Rendezvous, machine_threads
from tinylm.errors import DivergedError, PeerError, UsageError
from tinylm.system.process_signals import Interrupted
from tinylm.system.ranks import Launch, Ranks
from tinylm.text.batches import Batch, load_ahead, prefetch
from tinylm.training import parallel
from tinylm.training.parallel import sum_gradients
from tinylm.training.session import SHARED_DUPLICATE_SECONDS, StopRequest
from tinylm.training.trainer import StopTraining


class OtherGives(Ranks):
    """Rank 0 of two: rank 1 gives a signal number, and gradients of ones."""

    def __init__(self, signal_number: int = 0) -> None:
        super().__init__(Launch(size=2))
        self.signal_number = signal_number

    def gather(self, value: object) -> list[object]:
        return [value, self.signal_number]

    def add(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor += 1


def process_ranks(size: int) -> list[ProcessRanks]:
    """The ranks of a launch, which are not connected."""
    return [ProcessRanks(Launch(rank=rank, size=size), Rendezvous(None, None, 0), 1) for rank in range(size)]


def test_a_parameter_without_a_gradient_on_one_rank_gets_that_of_the_other_and_none_if_both_lack_it() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([1.0, 2.0])
    sum_gradients(parameters, [[1, 2], [2]], OtherGives())
    assert parameters[0].grad.tolist() == [2.0, 3.0]
    assert parameters[1].grad is not None and parameters[1].grad.tolist() == [1.0, 1.0]
    assert parameters[2].grad is None


def test_ranks_have_the_threads_of_one_process_unless_more_are_set_and_share_its_memory_but_no_gpu() -> None:
    variables = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    of_one_process = int(run_child(command, env=variables).stdout)
    found, before = {}, torch.get_num_threads()
    for threads in (3, 1):
        torch.set_num_threads(threads)
        found |= {(threads, local): machine_threads(Launch(size=4, local_size=local)) for local in (1, 4)}
    torch.set_num_threads(before)
    assert found == {(1, 1): 1, (1, 4): of_one_process, (3, 1): 3, (3, 4): 12}
    two = Ranks(Launch(size=2, local_size=2))
    assert [parallel.rank_memory(device, two, lambda device: 1000) for device in ("cuda", "cpu")] == [1000, 500]


@pytest.mark.parametrize(("rows", "size"), [(6, 4), (4, 1), (5, 2), (2, 4)])
def test_sharded_ranks_have_equally_many_micro_batches_and_each_row_counts_once(rows: int, size: int) -> None:
    batch = random_batch(0, rows=rows)
    found = [list(parallel.micro_batches(batch, ranks.part(batch), 1, True, ranks)) for ranks in process_ranks(size)]
    assert len({len(parts) for parts in found}) == 1
    counted = torch.cat([part.ids for parts in found for part, counts in parts if counts])
    assert sorted(counted.tolist()) == sorted(batch.ids.tolist())


def test_the_ranks_are_dealt_each_batch_once_in_the_same_number_of_turns() -> None:
    batches = [random_batch(number, rows=1 + number) for number in range(5)]
    for size in (1, 2, 4, 8):
        dealt = [list(Ranks(Launch(rank=rank, size=size)).deal(batches)) for rank in range(size)]
        assert {len(turns) for turns in dealt} == {-(-5 // size)}
        found = [batch for turns in dealt for batch, counts, _ in turns if counts]
        assert sorted(map(id, found)) == sorted(map(id, batches))
        every = sum(batch.n_targets for batch in batches)
        assert all(sum(targets for *_, targets in turns) == every for turns in dealt)


def test_a_large_contiguous_gradient_is_summed_in_place_and_all_others_in_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of the gradient of a large embedding would need as much memory again."""
    large, transposed = torch.arange(100.0), torch.arange(90.0).view(9, 10).t()
    tensors = [torch.ones(3), torch.ones(2, 2), large, torch.ones(5), transposed]
    expected = [2 * tensor for tensor in tensors]
    summed: list[torch.Tensor] = []

    def double(tensor: torch.Tensor, async_op: bool) -> SimpleNamespace:
        summed.append(tensor)
        return SimpleNamespace(wait=lambda: tensor.mul_(2))

    monkeypatch.setattr(ranks, "BUCKET_BYTES", 40)
    monkeypatch.setattr(torch.distributed, "all_reduce", double)
    process_ranks(2)[0].add(tensors)
    assert all(torch.equal(found, tensor) for found, tensor in zip(tensors, expected, strict=True))
    assert [tensor.numel() for tensor in summed] == [3 + 4, 100, 5, 90], "a bucket has up to 40 bytes"
    assert [tensor.data_ptr() == large.data_ptr() for tensor in summed] == [False, True, False, False]


def test_the_other_ranks_end_with_the_exit_code_of_the_first_error() -> None:
    codes = {Interrupted(signal.SIGTERM): 143, KeyboardInterrupt(): 130, DivergedError("x"): 3, ValueError(): 1}
    for error, exit_code in codes.items():
        found = ProcessRanks(Launch(size=2), Rendezvous(torch.distributed.HashStore(), None, 0), 1)
        found.publish(error)
        found.publish(UsageError("later"))
        with pytest.raises(PeerError) as caught, found._communication():
            raise RuntimeError("closed")
        assert caught.value.exit_code == exit_code


def test_a_signal_at_another_rank_stops_this_one_which_takes_its_own_signal_as_a_copy() -> None:
    """A scheduler's signals do not reach all processes at once; the rank must finish its save."""
    request = StopRequest(OtherGives(signal.SIGTERM))
    with pytest.raises(StopTraining):
        request.check()
    assert not request.receive(signal.SIGTERM)
    assert request.signal_number == signal.SIGTERM


def test_signals_in_several_processes_may_be_seconds_apart() -> None:
    """A scheduler sends SIGTERM to every process of a job, and torchrun, when it has received its own, another one."""
    for others in (OtherGives(), Ranks(Launch(has_store=True))):
        clock = iter([10.0, 11.0, 10.0 + 2 * SHARED_DUPLICATE_SECONDS])
        request = StopRequest(others, functools.partial(next, clock))
        request.check()
        assert [request.receive(signal.SIGTERM) for _ in range(3)] == [False, False, True]
        with pytest.raises(StopTraining):
            request.check()


# Prefetched batches are those of the function, in any order.


def test_batches_are_made_ahead_in_a_thread_and_an_error_is_raised_when_its_batch_is_asked_for() -> None:
    made, threads = threading.Event(), []

    def batch(number: int) -> Batch:
        threads.append(threading.current_thread())
        if number == 4:
            made.set()
        if number == 7:
            raise OSError("the disk is gone")
        return Batch(torch.tensor([[number]]), torch.tensor([[number + 1]]))

    prefetched = load_ahead(batch)
    assert int(prefetched(3).ids) == 3
    assert made.wait(timeout=30)
    assert int(prefetched(4).ids) == 4
    assert len(threads) >= 2 and threading.current_thread() not in threads
    numbers = [0, 1, 2, 2, 3, 5, 4, 0, 1, 6]  # a resumed run starts anywhere, and a repeated step asks again
    assert [int(prefetched(number).ids) for number in numbers] == numbers
    with pytest.raises(OSError, match="the disk is gone"):
        prefetched(7)


class PinnableTensor(torch.Tensor):
    """A tensor that is pinned without a GPU. A patch of `torch.Tensor` would be undone while the thread still uses it,
    and crash the process."""

    pinned = False

    def pin_memory(self, device: object = None) -> "PinnableTensor":
        self.pinned = True
        return self


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_the_rows_of_this_rank_are_pinned_and_only_for_cuda(device: str) -> None:
    expected = random_batch(3)
    pinnable = Batch(expected.ids.as_subclass(PinnableTensor), expected.targets.as_subclass(PinnableTensor))
    whole, own = prefetch({3: pinnable, 4: pinnable}.__getitem__, torch.device(device), process_ranks(4)[1])(3)
    for part, all_rows, rows in ((own.ids, whole.ids, expected.ids), (own.targets, whole.targets, expected.targets)):
        assert isinstance(part, PinnableTensor) and isinstance(all_rows, PinnableTensor)
        assert part.equal(rows[1::4]) and all_rows.equal(rows)
        assert part.pinned == (device == "cuda") and not all_rows.pinned
        if part.pinned:
            assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
