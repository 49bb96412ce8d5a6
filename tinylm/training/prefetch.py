"""Making the next batch in a thread while a GPU computes a step."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from tinylm.distributed.ranks import ONE_RANK, Ranks
from tinylm.text.batches import Batch

T = TypeVar("T")


def prefetch(
    batch: Callable[[int], Batch], device: torch.device, ranks: Ranks = ONE_RANK
) -> Callable[[int], tuple[Batch, Batch]]:
    """A function that returns the batch with a given number, and the part of it that this rank computes.

    For a CUDA device, a `BatchPrefetcher` makes both, and the part is in pinned memory.
    """

    def load(number: int) -> tuple[Batch, Batch]:
        whole = batch(number)
        part = ranks.part(whole)
        return whole, part.pin_memory() if device.type == "cuda" else part

    return BatchPrefetcher(load) if device.type == "cuda" else load


class BatchPrefetcher(Generic[T]):
    """Returns `batch(number)`, and calls `batch(number + 1)` in a thread for the next call.

    The result depends only on the number, if that of `batch` does. An error of `batch(number)` is raised by the call
    with this number.
    """

    def __init__(self, batch: Callable[[int], T]) -> None:
        self._batch = batch
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._made: dict[int, Future[T]] = {}

    def __call__(self, number: int) -> T:
        self._made = {n: self._made.get(n) or self._thread.submit(self._batch, n) for n in (number, number + 1)}
        return self._made[number].result()
