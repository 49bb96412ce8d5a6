import itertools
from collections.abc import Iterator

import pytest
import torch

from tinylm.kernels import thread_latency as module
from tinylm.kernels.thread_latency import ThreadLatency, measure_thread_latency, thread_latency, thread_latency_entry
from tinylm.reporter import SilentReporter


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_wake_up_latency_is_the_time_of_all_threads_less_their_share_of_the_time_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a clock on which all work takes 10 us with one thread and 8 us with two."""
    ticks = itertools.accumulate(10e-6 if torch.get_num_threads() == 1 else 8e-6 for _ in itertools.count())
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    for threads, wake_up in ((2, 3e-6), (1, 0.0)):
        torch.set_num_threads(threads)
        found = measure_thread_latency()
        assert found.wake_up == pytest.approx(wake_up, abs=1e-12)
        assert found.bandwidth == pytest.approx(1024 * 1024 * 4 / 10e-6)
        assert torch.get_num_threads() == threads


def test_the_latency_is_measured_once_for_each_spin_setting_and_again_if_it_is_out_of_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latencies = [ThreadLatency(1e-5, 2e10), ThreadLatency(3e-5, 4e10), ThreadLatency(13e-6, 40e9)]
    measured = iter(latencies)
    monkeypatch.setattr(module, "measure_thread_latency", lambda: next(measured))
    found = []
    for spin_count in ("11", "22", "11", "22"):
        monkeypatch.setenv("GOMP_SPINCOUNT", spin_count)
        found.append(thread_latency(SilentReporter()))
    thread_latency_entry().write({"wake_up": -1.0, "bandwidth": 1e10})
    found.append(thread_latency(SilentReporter()))
    assert found == [*latencies[:2], *latencies]
