"""Batches that are made in a thread while the device computes the previous step."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from tinylm.text.batches import Batch


def prefetch(batch: Callable[[int], Batch], device: torch.device) -> Callable[[int], Batch]:
    """`batch`, or for a CUDA device a `BatchPrefetcher` of pinned batches. A CPU has no idle time to fill."""
    return BatchPrefetcher(lambda number: batch(number).pin_memory()) if device.type == "cuda" else batch


class BatchPrefetcher:
    """Calls `batch(number)`, and in a thread `batch(number + 1)`, which the next call probably needs.

    The result depends only on the number, as that of `batch`. An error in the thread is raised by the call for that
    batch.
    """

    def __init__(self, batch: Callable[[int], Batch]) -> None:
        self._batch = batch
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._made: dict[int, Future[Batch]] = {}

    def __call__(self, number: int) -> Batch:
        self._made = {n: self._made.get(n) or self._thread.submit(self._batch, n) for n in (number, number + 1)}
        return self._made[number].result()
