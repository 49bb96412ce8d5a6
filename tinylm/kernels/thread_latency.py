"""The cost of splitting a matrix multiplication among the threads of a CPU (decisions 013, 015)."""

import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tinylm.kernels.cpu_features import identify_torch
from tinylm.kernels.openmp_spin import SPIN_VARIABLES
from tinylm.machine_profile import Measurement
from tinylm.reporter import Reporter

ELEMENTS_PER_THREAD = 32_768  # torch does not split smaller elementwise operations
WIDTH = 1024  # of a square fp32 matrix (4 MiB), too large for the cache of one core
SERIES, ROUNDS = 25, 7  # series of measurements, and rounds of each
BOUNDS = {"wake_up": (0.0, 1.0), "bandwidth": (1e6, 1e13)}


class ThreadLatency(NamedTuple):
    """wake_up: seconds to start all threads on one operation and to join them.
    bandwidth: bytes of weights per second that one thread reads in a matrix-vector product.
    """

    wake_up: float
    bandwidth: float


def thread_latency(reporter: Reporter) -> ThreadLatency:
    """The values recorded in the machine profile, or a new measurement, which is recorded.

    They must not change between commands: the number of threads depends on them, and affects the rounding of logits.
    """
    return ThreadLatency(**thread_latency_entry().get(lambda: measure_thread_latency()._asdict(), reporter))


def thread_latency_entry() -> Measurement:
    """The machine profile's entry for both values, which depend on the spin settings."""
    spin = {name: os.environ.get(name) for name in SPIN_VARIABLES}
    return Measurement("threads", {**identify_torch(), **spin}, BOUNDS)


@torch.inference_mode()
def measure_thread_latency() -> ThreadLatency:
    """Measure, in about 15 ms if the cores are idle. Each time is the minimum of SERIES medians, since other processes
    disturb some of them.
    """
    threads = torch.get_num_threads()
    x = torch.ones(threads * ELEMENTS_PER_THREAD, device="cpu")
    row, matrix = torch.ones(1, WIDTH, device="cpu"), torch.ones(WIDTH, WIDTH, device="cpu")

    def median(threads: int, work: Callable[[], object]) -> float:
        torch.set_num_threads(threads)
        times = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
        return sorted(times)[ROUNDS // 2]

    read = one_thread = all_threads = math.inf  # seconds
    for _ in range(SERIES):
        read = min(read, median(1, lambda: F.linear(row, matrix)))
        one_thread = min(one_thread, median(1, lambda: x.add_(1)))
        all_threads = min(all_threads, median(threads, lambda: x.add_(1)))
    return ThreadLatency(max(0.0, all_threads - one_thread / threads), matrix.nbytes / max(read, 1e-9))
