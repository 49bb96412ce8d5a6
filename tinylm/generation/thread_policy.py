"""The number of CPU threads per decoding step: waking them takes as long as a small matrix product (decisions 013 to
015).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tinylm.generation.quantize import Int8Linear
from tinylm.kernels.thread_latency import ThreadLatency
from tinylm.model.decoder import Decoder
from tinylm.model.kv_cache import Cache

OPERATIONS_PER_SECOND = 100e9  # floating-point operations of one thread, an estimate


class ThreadPolicyDecoder:
    """Runs each step of a decoder on one CPU thread, or on all threads where that saves more time than waking them
    takes: for many rows, large weights or a long cache. Implements `NextTokenModel`.
    """

    def __init__(self, decoder: Decoder, latency: ThreadLatency) -> None:
        self._decoder = decoder
        self._latency = latency
        weights = [module.weight for module in decoder.modules() if isinstance(module, nn.Linear | Int8Linear)]
        self._products = len(weights)  # matrix products per step, each of which wakes the threads
        self._weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        self._operations = sum(2 * weight.numel() for weight in weights)  # per token
        size = decoder.embedding.weight.element_size()
        self._cache_bytes = 2 * size * len(decoder.windows) * decoder.n_kv_heads * decoder.head_dim  # per token
        self._threads = torch.get_num_threads()

    @property
    def context(self) -> int:
        """Context length in tokens."""
        return self._decoder.context

    def make_cache(self, batch: int, length: int, starts: Any | None = None) -> list[Cache]:
        """See `NextTokenModel.make_cache`."""
        return self._decoder.make_cache(batch, length, starts)

    def last_logits(self, ids: Any, cache: Sequence[Cache] | None) -> Tensor:
        """See `NextTokenModel.last_logits`: (B, T) -> (B, V)."""
        with self._threads_for(math.prod(ids.shape), len(ids) * cache[0].offset if cache else 0):
            return self._decoder.last_logits(ids, cache)

    @contextmanager
    def _threads_for(self, rows: int, cached: int) -> Iterator[None]:
        """Context manager that sets the number of threads for a step.

        rows: number of tokens that the step computes. cached: number of tokens that it reads from the cache. Both are
        totals of the batch.
        """
        read_time = (self._weight_bytes + cached * self._cache_bytes) / self._latency.bandwidth
        compute_time = self._operations * rows / OPERATIONS_PER_SECOND
        saved_time = max(read_time, compute_time) * (1 - 1 / self._threads)
        if saved_time > self._latency.wake_up * self._products:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)
