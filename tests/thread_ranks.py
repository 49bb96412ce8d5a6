"""Ranks that are threads of one process, for tests: what they exchange goes through memory."""

import copy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tinylm.system.ranks import AnyBatch, Launch, Ranks

LIMIT = 60.0  # seconds that a rank may take between two exchanges


class _Exchange:
    """The values of all ranks, until every rank has read them."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LIMIT)
        self.values: list[Any] = [None] * size


class ThreadRanks(Ranks):
    """One of the ranks of `in_ranks`."""

    def __init__(self, rank: int, size: int, exchange: _Exchange) -> None:
        super().__init__(Launch(rank=rank, size=size, local_rank=rank, local_size=size))
        self._exchange = exchange

    def gather(self, value: Any) -> list[Any]:
        self._exchange.values[self.launch.rank] = value
        self._exchange.barrier.wait()
        found = copy.deepcopy(self._exchange.values)
        self._exchange.barrier.wait()
        return found

    def first(self, value: Any) -> Any:
        return self.gather(value)[0]

    def broadcast(
        self, tensors: Mapping[str, Tensor], keep: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> dict[str, Tensor]:
        return {n: keep(t) for n, t in self.first({n: tensor.detach() for n, tensor in tensors.items()}).items()}

    def add(self, tensors: Sequence[Tensor]) -> None:
        for number, parts in enumerate(zip(*self.gather(list(tensors)), strict=True)):
            tensors[number].copy_(torch.stack(parts).sum(dim=0))

    def part(self, batch: AnyBatch) -> AnyBatch:
        return batch.every(self.size, self.launch.rank)


def in_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Call `work` in `size` ranks; returns its results. If one raises an exception, the others end as well."""
    exchange = _Exchange(size)

    def run(rank: int) -> Any:
        try:
            return work(ThreadRanks(rank, size, exchange))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        found = [pool.submit(run, rank) for rank in range(size)]
    if "torch._dynamo" in sys.modules:  # the stance is global, and threads may have left `force_eager` in another order
        torch.compiler.set_stance("default")
    errors = [error for future in found if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in found]
