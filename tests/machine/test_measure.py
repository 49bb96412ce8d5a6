"""The machine of a run, chosen by capabilities and by measurements that are made once, and the load of others."""

import contextlib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import LAYER_SECONDS, MATMUL_RATE, pretend_bf16
from tests.shell import TINY, child_process, run_ok, story
from tinylm.config.run import RuntimeConfig
from tinylm.machine import measure as module
from tinylm.machine.doctor import diagnose
from tinylm.machine.measure import LoadMeter, LoadNotes, slows_training
from tinylm.reporter import LogReporter
from tinylm.system.machine_profile import usable_cores


def test_a_machine_has_the_rate_of_the_profile_and_a_run_records_it() -> None:
    reporter = Mock()
    found = module.choose_machine("cpu", "fp32", reporter)
    assert (found.device, found.dtype) == ("cpu", "fp32")
    assert found.threads == torch.get_num_threads()
    assert found.reasons.startswith("cpu (")
    assert "requested; fp32: requested" in found.reasons
    assert found.matmul_rate == module.round_measured(MATMUL_RATE)
    assert found.free_memory is not None and found.free_memory > 0
    assert found.layer_seconds == module.round_measured(LAYER_SECONDS)
    measured = {"matmul_rate": found.matmul_rate, "layer_seconds": found.layer_seconds}
    expected = RuntimeConfig(device="cpu", dtype="fp32", compile=True, threads=found.threads, **measured)
    assert found.runtime(compile=True) == expected
    assert not reporter.mock_calls


def test_compiled_is_faster_with_a_compiler_unless_eager_code_uses_onednn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device, dtype, onednn, faster in (
        ("cpu", "bf16", True, True),
        ("cpu", "fp32", True, False),
        ("cpu", "fp32", False, True),
    ):
        monkeypatch.setenv("CXX", sys.executable)  # a compiler that exists
        assert module.compiled_is_faster(device, dtype, onednn) == faster, (device, dtype, onednn)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not module.compiled_is_faster("cpu", "bf16") and module.compiled_is_faster("cuda", "fp32")


@pytest.fixture
def rated(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, float], dict[str, float]]:
    """Makes a machine with or without bf16 instructions, whose products are so many times as fast in bf16."""

    def pretend(bf16: bool, times: float) -> dict[str, float]:
        pretend_bf16(monkeypatch, bf16)
        rates = {"fp32": 1e11, "bf16": times * 1e11}
        for names in (module.COMPARED_DTYPES, ("fp32",), ("bf16",)):
            module.matmul_rates_entry("cpu", names).write({name: rates[name] for name in names})
        return rates

    return pretend


Rated = Callable[[bool, float], dict[str, float]]


def test_the_number_format_is_the_faster_one_unless_capabilities_determine_it(rated: Rated) -> None:
    for bf16, times, dtype in ((True, 0.5, "fp32"), (True, 5.0, "bf16"), (False, 5.0, "fp32")):
        rates = rated(bf16, times)
        found = module.choose_machine("cpu", "auto", Mock())
        assert (found.dtype, found.matmul_rate) == (dtype, module.round_measured(rates[dtype]))


def test_losses_are_in_the_format_of_training_or_of_16_bit_weights_or_of_this_machine(rated: Rated) -> None:
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    for wanted, weights, recorded, has_bf16, faster, expected in (
        ("auto", fp32, "fp32", True, 3.0, "fp32: as in training"),
        ("auto", fp32, "bf16", True, 0.5, "bf16: as in training"),
        ("auto", bf16, "fp32", True, 3.0, "fp32: as in training"),
        ("auto", fp32, "bf16", False, 3.0, "fp32: the device has no fast bf16"),
        ("auto", fp32, "fp16", True, 3.0, "bf16: the device computes in it"),
        ("auto", fp32, None, True, 3.0, "bf16: the device computes in it"),
        ("auto", fp32, None, True, 1.1, "fp32: bf16 is less than 1.2 times as fast as fp32"),
        ("auto", bf16, None, False, 3.0, "bf16: that of the weights"),
        ("auto", fp16, "fp16", True, 3.0, "fp16: that of the weights"),
        ("fp32", bf16, "bf16", True, 3.0, "fp32: requested"),
        ("bf16", fp32, "fp32", False, 3.0, "bf16: requested"),
    ):
        rated(has_bf16, faster)
        found = module.choose_loss_dtype(wanted, "cpu", weights, recorded, Mock())
        assert f"{found.value}: {found.reason}" == expected, (wanted, weights, recorded, has_bf16, faster)
    assert module.choose_loss_dtype("auto", "cuda", fp32, "fp16", Mock()).value == "fp16"


def test_rates_and_times_are_the_shortest_processor_time_of_one_thread_or_of_all() -> None:
    """By a clock whose two readings of one measurement are 50 ms apart, except for two that are 2 and 1 ms apart, as if
    another process were busy. Formats are timed in turns."""
    threads, seen = torch.get_num_threads(), set()

    def clock_of(durations: Iterable[float]) -> Callable[[], float]:
        readings = itertools.accumulate(itertools.chain.from_iterable((1.0, seconds) for seconds in durations))

        def clock() -> float:
            seen.add(torch.get_num_threads())
            return next(readings)

        return clock

    durations = [0.002 if i == 4 else 0.001 if i == 5 else 0.05 for i in range(2 * module.MIN_ROUNDS)]
    before = torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        rates = module.measure_matmul_rates("cpu", module.COMPARED_DTYPES, clock_of(durations))
        assert seen == {1} and torch.get_num_threads() == 2
        seen.clear()
        layers = module.measure_layer_seconds(
            "fp32", clock_of(2.0 if i == 1 else 4.0 for i in range(module.MIN_LAYER_ROUNDS))
        )
        assert seen == {2}
    finally:
        torch.set_num_threads(threads)
    work = 2 * 2 * 2048 * 512 * 512  # of two threads
    assert rates == {"fp32": pytest.approx(work / 0.002), "bf16": pytest.approx(work / 0.001)}
    assert layers == {"fp32": 2 / (8 * 256) / 2}  # tokens, layers
    assert torch.get_rng_state().equal(before)


@given(st.floats(1e6, 1e18), st.floats(-0.04, 0.04))
def test_a_rounded_rate_is_close_and_mostly_equal_in_another_measurement(rate: float, error: float) -> None:
    assert 2**-0.126 < module.round_measured(rate) / rate < 2**0.126
    middle = module.round_measured(rate)
    assert module.round_measured(middle * (1 + error)) == middle


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """As many processes as slow the single thread of a test, however many cores there are, keep a core busy each."""
    with contextlib.ExitStack() as stack:
        for _ in range(max(1, usable_cores() - 1)):
            stack.enter_context(child_process((sys.executable, "-c", "while True: pass")))
        time.sleep(0.2)
        yield


needs_proc = pytest.mark.skipif(not module.PROC_STAT.exists(), reason="needs /proc/stat")


class Clock:
    """A time and a processor time that advance only where a test adds to them, and a file like /proc/stat."""

    def __init__(self, folder: Path) -> None:
        self.seconds, self.own, self.stat = 100.0, 7.0, folder / "stat"
        self.show((0,) * 10)

    def show(self, ticks: tuple[int, ...]) -> None:
        """Every core has the given ticks of 10 ms of each kind, in the order of the manual page."""
        cores = ("", *range((os.cpu_count() or 1) + 1))
        lines = [f"cpu{core} {' '.join(map(str, ticks))}\n" for core in cores]
        self.stat.write_text("".join(lines) + "intr 5 0 0\nctxt 7\n")

    def meter(self, processes: int = 1, *average: Any) -> LoadMeter:
        return LoadMeter(processes, self.stat, lambda: self.seconds, lambda: self.own, *average)


@needs_proc
def test_the_load_of_others_is_the_busy_time_less_ours(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for processes in (1, 2):
        clock.show((0,) * 10)
        meter = clock.meter(processes)
        clock.seconds, clock.own = clock.seconds + 10, clock.own + 1
        # user 300, nice 200, system 100, idle 200, iowait 100, irq 40, softirq 30, steal 30, guests, within user: 150
        clock.show((300, 200, 100, 200, 100, 40, 30, 30, 150, 0))
        # Of each core, 7.0 s are busy in 10 s; each process uses 0.1 cores.
        assert meter.read() == pytest.approx(0.7 * meter.cores - 0.1 * processes)
    clock.seconds, clock.own = clock.seconds + 10, clock.own + 30
    assert meter.read() == 0.0


def test_without_proc_stat_it_is_the_load_average(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for content in ("", "cpu 1 2 3\n", "cpu0 a b c d e f g h\ncpu1 1 2 3 4 5 6 7 8\n", None):
        clock.stat.unlink() if content is None else clock.stat.write_text(content)
        meter, unknown = clock.meter(1, lambda: (0.75, 9.0, 9.0)), clock.meter(1, None)
        clock.seconds, clock.own = clock.seconds + 10, clock.own + 5
        assert (meter.read(), unknown.read()) == (pytest.approx(0.25), None), content


def test_training_is_slowed_by_load_on_the_cores_that_it_needs() -> None:
    rows = ((2, 2, 0.2, False), (2, 2, 0.3, True), (64, 32, 10, False), (64, 32, 20, True), (8, 1, 1, False))
    for cores, threads, others, slow in rows:
        assert slows_training(others, threads, cores) == slow


@pytest.mark.parametrize("timed", [False, True])
def test_others_that_slow_training_are_noted(timed: bool) -> None:
    seconds, load, said = 0.0, 0.05, list[str]()
    meter: Any = SimpleNamespace(cores=2, read=lambda: load)
    settings: dict[str, Any] = {"threads": 2, "timed": timed, "planned_steps": 5000, "now": lambda: seconds}
    notes = LoadNotes(said.append, meter, **settings)
    loads = {0: 0.05, 201: 1.0, 400: 1.3, 500: 1.8, 700: 0.3, 801: 0.0}
    spoken = []
    for step in range(1000):
        load = loads.get(step, load)
        seconds += 2 if 201 <= step < 801 else 1
        notes.step(step + 1, step / 1000)
        spoken += [step] * (len(said) - len(spoken))
    # Readings are 10 s apart before the first note, then 60 s.
    assert spoken == [205, 505, 715, 810]
    slowed = "Other processes take 1.0 of the 2 cores, which slows training: at the speed of the last "
    assert said[0].startswith(slowed)
    assert said[0].endswith(" The plan is for an idle machine. The command top shows those processes.")
    assert said[3].startswith("Other processes no longer slow training: at the speed of the last ")
    if timed:
        assert "10s, about 1,001 steps fit into the time; 5,000 were planned." in said[0]
    else:
        assert "10s, it ends in about 26m 30s." in said[0]  # 795 steps of two seconds


@needs_proc
def test_the_doctor_warns_of_processes_that_keep_cores_busy() -> None:
    with busy_cores():
        diagnosis = diagnose("cpu", LogReporter())
    assert diagnosis.sections["threads"]["cores_of_other_processes"] > 0.6
    (message,) = [problem.message for problem in diagnosis.problems if problem.subject == "load"]
    assert message.startswith("Other processes take") and "renice -n 19" in message and "top shows them" in message


@pytest.mark.slow
@needs_proc
def test_a_training_beside_a_busy_process_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.3)
    (tmp_path / "text.txt").write_text(story(3000))
    with busy_cores():
        result = run_ok("train", tmp_path / "text.txt", "--steps", 500, "--out", tmp_path / "run", *TINY)
    (note,) = [line for line in result.stderr.splitlines() if "Other processes" in line]
    assert re.search(r", it ends in about [\dms ]+\. The plan is for an idle machine\.", note)
