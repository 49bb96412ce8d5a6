"""The machine of a run, chosen by capabilities and by measurements that are made once, and the load of others."""

import itertools
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import LAYER_SECONDS, MATMUL_RATE
from tests.shell import TINY, child_process, run_ok, story
from tinylm.config.run import RuntimeConfig
from tinylm.machine import measure as machine_load
from tinylm.machine import measure as module
from tinylm.machine.doctor import diagnose
from tinylm.machine.measure import LoadMeter, LoadNotes, slows_training
from tinylm.reporter import LogReporter

posix_clock = pytest.mark.skipif(sys.platform == "win32", reason="thread time has a resolution of 16 ms there")


def test_a_machine_has_the_rate_of_the_profile_and_a_run_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Mock()
    monkeypatch.setattr(module, "free_memory", lambda device: 123)
    found = module.choose_machine("cpu", "fp32", reporter)
    assert (found.device, found.dtype) == ("cpu", "fp32")
    assert found.threads == torch.get_num_threads()
    assert found.reasons.startswith("cpu (")
    assert "requested; fp32: requested" in found.reasons
    assert found.matmul_rate == module.round_measured(MATMUL_RATE)
    assert found.free_memory == 123
    assert found.layer_seconds == module.round_measured(LAYER_SECONDS)
    measured = {"matmul_rate": found.matmul_rate, "layer_seconds": found.layer_seconds}
    expected = RuntimeConfig(device="cpu", dtype="fp32", compile=True, threads=found.threads, **measured)
    assert found.runtime(compile=True) == expected
    assert not reporter.mock_calls


def test_compiled_is_faster_with_a_compiler_unless_eager_code_uses_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, dtype, onednn, faster in (
        ("cpu", "bf16", True, True),
        ("cpu", "fp32", True, False),
        ("cpu", "fp32", False, True),
        ("cuda", "fp32", True, True),
    ):
        monkeypatch.setattr("tinylm.machine.measure.prefers_onednn", lambda onednn=onednn: onednn)
        for compiler in (True, False):
            monkeypatch.setattr(module, "can_compile", lambda device, compiler=compiler: compiler)
            assert module.compiled_is_faster(device, dtype) == (faster and compiler), (device, dtype, onednn)


def test_the_number_format_is_the_faster_one_unless_capabilities_determine_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = {"fp32": 1e11, "bf16": 5e10}, {"fp32": 1e11, "bf16": 5e11}
    for bf16, amx, rates, dtype in (
        (True, False, slow, "fp32"),
        (True, False, fast, "bf16"),
        (True, True, slow, "fp32"),
        (False, True, fast, "bf16"),
        (False, False, fast, "fp32"),
    ):
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda bf16=bf16: bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        for names in (module.COMPARED_DTYPES, ("fp32",), ("bf16",)):
            module.matmul_rates_entry("cpu", names).write({name: rates[name] for name in names})
        found = module.choose_machine("cpu", "auto", Mock())
        assert (found.dtype, found.matmul_rate) == (dtype, module.round_measured(rates[dtype]))


def test_losses_are_in_the_format_of_training_or_of_16_bit_weights_or_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
        monkeypatch.setattr("tinylm.kernels.cpu_features.computes_bf16", lambda has_bf16=has_bf16: has_bf16)
        rates = {"fp32": 1e11, "bf16": faster * 1e11}
        monkeypatch.setattr(module, "_matmul_rate", lambda device, reporter, rates=rates: rates.__getitem__)
        found = module.choose_loss_dtype(wanted, "cpu", weights, recorded, Mock())
        assert f"{found.value}: {found.reason}" == expected, (wanted, weights, recorded, has_bf16, faster)
    assert module.choose_loss_dtype("auto", "cuda", fp32, "fp16", Mock()).value == "fp16"


def test_formats_are_timed_in_turns_and_the_best_rate_of_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds but one are slow, as if another process were busy."""
    timed: list[str] = []

    def rate(device: str, dtype: str) -> float:
        timed.append(dtype)
        return {"fp32": 2e11, "bf16": 4e11}[dtype] / (1 if len(timed) in (5, 6) else 50)

    monkeypatch.setattr(module, "_measure_matmul_rate", rate)
    monkeypatch.setattr(module, "MEASURE_SECONDS", 0.0)
    assert module.measure_matmul_rates("cpu", module.COMPARED_DTYPES) == {"fp32": 2e11, "bf16": 4e11}
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
        rates = module.measure_matmul_rates("cpu", ("fp32",))
    finally:
        torch.set_num_threads(threads)
    assert rates["fp32"] == pytest.approx(2 * 2 * 2048 * 512 * 512 / 0.002)  # of two threads
    ticks = itertools.accumulate(itertools.chain.from_iterable((1, 2 if i == 1 else 4) for i in range(5)), initial=0)
    next(ticks)
    before = torch.get_rng_state()
    assert module.measure_layer_seconds("fp32") == {"fp32": 2 / (8 * 256) / 2}  # tokens, layers
    assert seen == {1} and torch.get_num_threads() == threads
    assert torch.get_rng_state().equal(before)


@given(st.floats(1e6, 1e18), st.floats(-0.04, 0.04))
def test_a_rounded_rate_is_close_and_mostly_equal_in_another_measurement(rate: float, error: float) -> None:
    assert 2**-0.126 < module.round_measured(rate) / rate < 2**0.126
    middle = module.round_measured(rate)
    assert module.round_measured(middle * (1 + error)) == middle


BUSY_LOOP = (sys.executable, "-c", "while True: pass")
needs_proc = pytest.mark.skipif(not machine_load.PROC_STAT.exists(), reason="needs /proc/stat")


class Clock:
    """The time, processor time and cores of a made-up machine with cores 0 to 3, of which this process may use 1 and 3.

    A tick is 10 ms.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.seconds, self.own, self.stat = 100.0, 7.0, folder / "stat"
        patch.setattr(machine_load, "PROC_STAT", self.stat)
        patch.setattr(machine_load.os, "sched_getaffinity", lambda pid: {1, 3}, raising=False)
        patch.setattr(machine_load.os, "sysconf", lambda name: 100, raising=False)
        patch.setattr(machine_load.os, "getloadavg", lambda: (1.75, 9.0, 9.0), raising=False)
        patch.setattr(machine_load.time, "monotonic", lambda: self.seconds)
        patch.setattr(machine_load.time, "process_time", lambda: self.own)
        self.show(())

    def show(self, ticks: tuple[int, ...]) -> None:
        """Write /proc/stat: every core with the given ticks of each kind, in the order of the manual page."""
        fields = " ".join(map(str, ticks or (0,) * 10))
        self.stat.write_text("".join(f"cpu{core} {fields}\n" for core in ("", 0, 1, 2, 3)) + "intr 5 0 0\nctxt 7\n")


def test_the_load_of_others_is_the_busy_time_less_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tmp_path, monkeypatch)
    for processes, expected in ((1, 0.9), (2, 0.4)):
        clock.show(())
        meter = LoadMeter(processes)
        clock.seconds, clock.own = clock.seconds + 10, clock.own + 5
        # user 300, nice 200, system 100, idle 200, iowait 100, irq 40, softirq 30, steal 30, guests, within user: 150
        clock.show((300, 200, 100, 200, 100, 40, 30, 30, 150, 0))
        # 7.0 s busy on each of two cores in 10 s are 1.4 cores, of which each process uses 0.5.
        assert meter.read() == pytest.approx(expected)
    clock.seconds, clock.own = clock.seconds + 10, clock.own + 30
    assert meter.read() == 0.0


def test_without_proc_stat_it_is_the_load_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tmp_path, monkeypatch)
    for content in ("", "cpu 1 2 3\n", "cpu1 a b c d e f g h\ncpu3 1 2 3 4 5 6 7 8\n", None):
        clock.stat.unlink() if content is None else clock.stat.write_text(content)
        meter = LoadMeter()
        clock.seconds, clock.own = clock.seconds + 10, clock.own + 5
        assert meter.read() == pytest.approx(1.25), content
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert meter.read() is None


def test_training_is_slowed_by_load_on_the_cores_that_it_needs() -> None:
    rows = ((2, 2, 0.2, False), (2, 2, 0.3, True), (64, 32, 10, False), (64, 32, 20, True), (8, 1, 1, False))
    for cores, threads, others, slow in rows:
        assert slows_training(others, threads, cores) == slow


@pytest.mark.parametrize("timed", [False, True])
def test_others_that_slow_training_are_noted(timed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tmp_path, monkeypatch)
    monkeypatch.setattr(machine_load, "usable_cores", lambda: 2)
    said: list[str] = []
    notes = LoadNotes(said.append, meter := LoadMeter(), threads=2, timed=timed, planned_steps=5000)
    load = 0.05
    monkeypatch.setattr(meter, "read", lambda: load)
    loads = {0: 0.05, 201: 1.0, 400: 1.3, 500: 1.8, 700: 0.3, 801: 0.0}
    spoken = []
    for step in range(1000):
        load = loads.get(step, load)
        clock.seconds += 2 if 201 <= step < 801 else 1
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
def test_the_doctor_warns_of_a_process_that_keeps_a_core_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "usable_cores", lambda: 1)  # however many there are
    with child_process(BUSY_LOOP):
        time.sleep(0.2)
        diagnosis = diagnose("cpu", LogReporter())
    assert diagnosis.sections["threads"]["cores_of_other_processes"] > 0.6
    (message,) = [problem.message for problem in diagnosis.problems if problem.subject == "load"]
    assert message.startswith("Other processes take") and "renice -n 19" in message and "top shows them" in message


@pytest.mark.slow
@needs_proc
def test_a_training_beside_a_busy_process_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "usable_cores", lambda: 1)
    monkeypatch.setattr(machine_load, "FIRST_SECONDS", 0.3)
    (tmp_path / "text.txt").write_text(story(3000))
    with child_process(BUSY_LOOP):
        result = run_ok("train", tmp_path / "text.txt", "--steps", 500, "--out", tmp_path / "run", *TINY)
    (note,) = [line for line in result.stderr.splitlines() if "Other processes" in line]
    assert re.search(r", it ends in about [\dms ]+\. The plan is for an idle machine\.", note)
