"""The machine of a run, chosen by capabilities and by measurements that are made once."""

import itertools
import platform
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import LAYER_SECONDS, MATMUL_RATE
from tinylm import machine as module
from tinylm.machine import (
    COMPARED_DTYPES,
    choose_machine,
    matmul_rates_entry,
    measure_layer_seconds,
    measure_matmul_rates,
    round_measured,
)
from tinylm.run_config import RuntimeConfig

posix_clock = pytest.mark.skipif(sys.platform == "win32", reason="thread time has a resolution of 16 ms there")


class Recorder:
    """A reporter that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.note = self.warn = self.notes.append


def test_a_machine_has_the_rate_of_the_profile_and_a_run_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Recorder()
    monkeypatch.setattr(module, "free_memory", lambda device: 123)
    found = choose_machine("cpu", "fp32", reporter)
    assert (found.device, found.dtype) == ("cpu", "fp32")
    assert found.threads == torch.get_num_threads()
    assert found.reasons.startswith("cpu (")
    assert "requested; fp32: requested" in found.reasons
    assert found.matmul_rate == round_measured(MATMUL_RATE)
    assert found.free_memory == 123
    assert found.layer_seconds == round_measured(LAYER_SECONDS)
    measured = {"matmul_rate": found.matmul_rate, "layer_seconds": found.layer_seconds}
    expected = RuntimeConfig(device="cpu", dtype="fp32", compile=True, threads=found.threads, **measured)
    assert found.runtime(compile=True) == expected
    assert reporter.notes == []


def test_compiled_is_faster_with_a_compiler_unless_eager_code_uses_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, dtype, onednn, faster in (
        ("cpu", "bf16", True, True),
        ("cpu", "fp32", True, False),
        ("cpu", "fp32", False, True),
        ("cuda", "fp32", True, True),
    ):
        monkeypatch.setattr("tinylm.kernels.onednn.is_preferred", lambda onednn=onednn: onednn)
        for compiler in (True, False):
            monkeypatch.setattr(module, "can_compile", lambda device, compiler=compiler: compiler)
            assert module.compiled_is_faster(device, dtype) == (faster and compiler), (device, dtype, onednn)


def test_the_number_format_is_the_faster_one_unless_capabilities_determine_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = {"fp32": 1e11, "bf16": 5e10}, {"fp32": 1e11, "bf16": 5e11}
    for bf16, amx, rates, dtype in (
        (True, False, slow, "fp32"),
        (True, False, fast, "bf16"),
        (True, True, slow, "bf16"),
        (False, False, fast, "fp32"),
    ):
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda bf16=bf16: bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        for names in (COMPARED_DTYPES, ("fp32",), ("bf16",)):
            matmul_rates_entry("cpu", names).write({name: rates[name] for name in names})
        found = choose_machine("cpu", "auto", Recorder())
        assert (found.dtype, found.matmul_rate) == (dtype, round_measured(rates[dtype]))


def test_formats_are_timed_in_turns_and_the_best_rate_of_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds but one are slow, as if another process were busy."""
    timed: list[str] = []

    def rate(device: str, dtype: str) -> float:
        timed.append(dtype)
        return {"fp32": 2e11, "bf16": 4e11}[dtype] / (1 if len(timed) in (5, 6) else 50)

    monkeypatch.setattr(module, "_measure_matmul_rate", rate)
    monkeypatch.setattr(module, "MEASURE_SECONDS", 0.0)
    assert measure_matmul_rates("cpu", COMPARED_DTYPES) == {"fp32": 2e11, "bf16": 4e11}
    assert timed == ["fp32", "bf16"] * module.MIN_ROUNDS


@posix_clock
def test_rates_and_times_are_the_shortest_processor_time_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the thread is replaced: by one that advances by 2 ms at each reading, and by one that advances by
    4, 2, 4, 4 and 4 s during five steps of a layer."""
    threads, seen = torch.get_num_threads(), set()

    def clock() -> float:
        seen.add(torch.get_num_threads())
        return next(ticks)

    monkeypatch.setattr(module.time, "thread_time", clock)
    monkeypatch.setattr(module, "MEASURE_SECONDS", 0.0)
    ticks: Iterator[float] = (0.002 * i for i in itertools.count())
    torch.set_num_threads(2)
    try:
        rates = measure_matmul_rates("cpu", ("fp32",))
    finally:
        torch.set_num_threads(threads)
    assert rates["fp32"] == pytest.approx(2 * 2 * 2048 * 512 * 512 / 0.002)  # of two threads
    ticks = itertools.accumulate(itertools.chain.from_iterable((1, 2 if i == 1 else 4) for i in range(5)), initial=0)
    next(ticks)
    before = torch.get_rng_state()
    assert measure_layer_seconds("fp32") == {"fp32": 2 / (8 * 256) / 2}  # tokens, layers
    assert seen == {1} and torch.get_num_threads() == threads
    assert torch.get_rng_state().equal(before)


@given(st.floats(1e6, 1e18), st.floats(-0.04, 0.04))
def test_a_rounded_rate_is_close_and_mostly_equal_in_another_measurement(rate: float, error: float) -> None:
    assert 2**-0.126 < round_measured(rate) / rate < 2**0.126
    middle = round_measured(rate)
    assert round_measured(middle * (1 + error)) == middle
