"""Batches that are made in a thread while the device computes the previous step."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from tinylm.ranks import ONE_RANK, Ranks
from tinylm.text.batches import Batch

T = TypeVar("T")


def prefetch(
    batch: Callable[[int], Batch], device: torch.device, ranks: Ranks = ONE_RANK
) -> Callable[[int], tuple[Batch, Batch]]:
    """A function that returns the batch of a number, and the part of this rank.

    For a CUDA device, the parts are pinned, and made by a `BatchPrefetcher`. A CPU has no idle time to fill.
    """

    def load(number: int) -> tuple[Batch, Batch]:
        whole = batch(number)
        part = ranks.part(whole)
        return whole, part.pin_memory() if device.type == "cuda" else part

    return BatchPrefetcher(load) if device.type == "cuda" else load


class BatchPrefetcher(Generic[T]):
    """Calls `batch(number)`, and in a thread `batch(number + 1)`, which the next call probably needs.

    The result depends only on the number, as that of `batch`. An error in the thread is raised by the call for that
    batch.
    """

    def __init__(self, batch: Callable[[int], T]) -> None:
        self._batch = batch
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._made: dict[int, Future[T]] = {}

    def __call__(self, number: int) -> T:
        self._made = {n: self._made.get(n) or self._thread.submit(self._batch, n) for n in (number, number + 1)}
        return self._made[number].result()
