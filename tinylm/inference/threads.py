"""How many of a CPU's threads compute a token: waking one costs as much as a small product (decisions 013 to 017)."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.device import identify_device
from tinylm.inference.arrange import PackedLinear
from tinylm.inference.generator import NextTokenModel
from tinylm.inference.quantize import Int8Linear
from tinylm.machine import Measurement, Reporter
from tinylm.model.cache import Cache
from tinylm.model.decoder import Decoder

COMPUTING = 100e9  # operations of one thread a second
SHARED_ELEMENTS = 32_768  # of a sum, for each thread: torch shares out no less
WIDTH = 1024  # of a matrix too large for a core's own cache
POSSIBLE = {"waking": (0.0, 1.0), "reading": (1e6, 1e13)}


class ThreadPace(NamedTuple):
    """`waking`: seconds that it costs to share out a product among all threads. `reading`: bytes of weights that a
    product of one row reads a second, on one thread.
    """

    waking: float
    reading: float


def thread_pace(reporter: Reporter) -> ThreadPace:
    """From the machine profile, or measured for it: the number of threads changes how logits are rounded."""
    return ThreadPace(**pace_entry().get(lambda: measure_threads()._asdict(), reporter))


def pace_entry() -> Measurement:
    """The profile's entry, which depends on how threads wait for each other."""
    spinning = {name: os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    return Measurement("threads", {**identify_device("cpu"), **spinning}, POSSIBLE)


@torch.inference_mode()
def measure_threads(series: int = 25, rounds: int = 7) -> ThreadPace:
    """The least of many medians of short series: a busy machine leaves gaps that are long enough for some of them."""
    threads = torch.get_num_threads()
    x = torch.ones(threads * SHARED_ELEMENTS, device="cpu")
    row, matrix = torch.ones(1, WIDTH, device="cpu"), torch.ones(WIDTH, WIDTH, device="cpu")

    def median(threads: int, work: Callable[[], object]) -> float:
        torch.set_num_threads(threads)
        times = []
        for _ in range(rounds):
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
        return sorted(times)[rounds // 2]

    reading = alone = together = math.inf
    for _ in range(series):
        reading = min(reading, median(1, lambda: F.linear(row, matrix)))
        alone = min(alone, median(1, lambda: x.add_(1)))
        together = min(together, median(threads, lambda: x.add_(1)))
    return ThreadPace(max(0.0, together - alone / threads), matrix.nbytes / max(reading, 1e-9))


class WakingDecoder:
    """A decoder on a CPU that wakes other threads where they gain more than that costs: for many rows, or much to read.

    `writer` is what computes for the decoder, if not itself. The generator takes it in the decoder's place.
    """

    def __init__(self, decoder: Decoder, pace: ThreadPace, writer: NextTokenModel | None = None) -> None:
        self._writer = writer or decoder
        self._pace = pace
        weights = [m.weight for m in decoder.modules() if isinstance(m, nn.Linear | PackedLinear | Int8Linear)]
        self._products = len(weights)
        self._bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        self._operations = sum(2 * weight.numel() for weight in weights)
        size = decoder.embedding.weight.element_size()
        self._bytes_of_token = 2 * size * len(decoder.windows) * decoder.n_kv_heads * decoder.head_width
        self._threads = torch.get_num_threads()

    @property
    def context(self) -> int:
        return self._writer.context

    @property
    def device(self) -> torch.device:
        return self._writer.device

    def make_cache(self, batch: int, length: int, starts: Tensor | None = None) -> list[Cache]:
        return self._writer.make_cache(batch, length, starts)

    def last_logits(self, ids: Tensor, cache: Sequence[Cache] | None, count: int) -> Tensor:
        """(B, T) -> (B, count, V)"""
        with self._awake(ids.numel(), len(ids) * cache[0].offset if cache else 0):
            return self._writer.last_logits(ids, cache, count)

    @contextmanager
    def _awake(self, rows: int, cached: int) -> Iterator[None]:
        reading = (self._bytes + cached * self._bytes_of_token) / self._pace.reading
        gained = max(reading, self._operations * rows / COMPUTING) * (1 - 1 / self._threads)
        if gained > self._pace.waking * self._products:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)
