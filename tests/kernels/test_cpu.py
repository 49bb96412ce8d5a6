"""Features of processors, and the placement of threads beside busy processes.

For the placement, the machine is a double whose speed depends on it; one test moves the threads of this process.
"""

import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tinylm.kernels import cpu
from tinylm.kernels.cpu import HOLD, INTERVAL, TASKS, SecondTeam, ThreadPlacement, Threads

TOKENS = 1000

two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)


class Machine(Threads):
    """Four cores, which the threads of a process may use."""

    def __init__(self) -> None:
        self.used = {0, 1, 2, 3}
        self.busy: float | None = 0.0
        self.teams = 0  # second teams that exist

    def cores(self) -> set[int]:
        return self.used

    def move(self, old: set[int], new: set[int]) -> None:
        assert old == self.used
        self.used = new

    def second_team(self) -> SecondTeam:
        def count(change: int) -> Any:
            self.teams += change
            return SimpleNamespace(end=lambda: count(-1))

        return count(1)

    def placement(self) -> ThreadPlacement:
        return ThreadPlacement(lambda: self.busy, lambda busy: busy >= 0.5, self)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def intervals(placement: ThreadPlacement, count: int, spread: float, confined: float) -> Iterator[bool]:
    """Train for intervals at the speeds (tokens per second) of both placements; yields the placement of each."""
    for _ in range(count):
        before = placement.confined
        placement.step(TOKENS, max(INTERVAL, TOKENS / (confined if before else spread)))
        yield before


def test_threads_share_the_free_cores_beside_a_busy_process_while_that_is_faster(machine: Machine) -> None:
    with machine.placement() as placement:
        for machine.busy in (0.0, None):  # the system may not tell
            assert not any(intervals(placement, 100, spread=100, confined=900))
        machine.busy = 1.0
        found = [*intervals(placement, 3 + HOLD, spread=100, confined=300)]
        assert found == [False, False] + [True] * (HOLD + 1)
        assert (machine.used, machine.teams) == ({0, 1, 2}, 1)
        # The other placement is tried again for one interval.
        assert [*intervals(placement, 4, spread=100, confined=300)] == [True, False, True, True]
        machine.busy = 0.0
        assert [*intervals(placement, 3, spread=900, confined=300)] == [True, False, False]
        assert (machine.used, machine.teams) == ({0, 1, 2, 3}, 0)


def test_threads_use_all_cores_where_that_is_faster_and_other_cores_in_the_next_trial(machine: Machine) -> None:
    placement = machine.placement()
    machine.busy = 2.2
    assert [*intervals(placement, 3 + HOLD, spread=300, confined=100)] == [False, False, True] + [False] * HOLD
    assert (machine.used, machine.teams) == ({0, 1, 2, 3}, 0)
    assert [*intervals(placement, 1, spread=300, confined=100)] == [False]
    assert (machine.used, machine.teams) == ({1, 2}, 1)  # {0, 1} in the first trial
    assert [*intervals(placement, 2, spread=300, confined=100)] == [True, False]


def test_as_many_cores_are_left_as_other_processes_use_and_all_are_used_again_after_an_error(machine: Machine) -> None:
    for busy, count in ((0.5, 3), (1.4, 3), (2.2, 2), (3.9, 1)):
        machine.busy = busy
        with pytest.raises(KeyError), machine.placement() as placement:
            assert [*intervals(placement, 2, spread=100, confined=100)] == [False, False]
            assert (len(machine.used), placement.confined) == (count, True), busy
            raise KeyError
        assert (machine.used, machine.teams) == ({0, 1, 2, 3}, 0)


@two_cores
def test_all_threads_of_the_process_move_and_return_and_compute_the_same() -> None:
    """Except for a thread that someone else has placed on one core."""
    placed, end = threading.Event(), threading.Event()

    def elsewhere() -> None:
        os.sched_setaffinity(0, {max(cores)})
        placed.set()
        end.wait()

    def cores_of_threads() -> set[frozenset[int]]:
        tasks = [int(task.name) for task in TASKS.iterdir()]
        assert os.sched_getaffinity(other.native_id or 0) == {max(cores)}
        return {frozenset(os.sched_getaffinity(task)) for task in tasks if task != other.native_id}

    cores, other = os.sched_getaffinity(0), threading.Thread(target=elsewhere, daemon=True)
    other.start()
    placed.wait()
    before = len(list(TASKS.iterdir()))
    torch.set_num_threads(2)
    try:
        x = torch.randn(256, 1024)
        expected = x @ x.T
        with ThreadPlacement(lambda: len(cores) - 1, lambda busy: True) as placement:
            [*intervals(placement, 2, spread=100, confined=100)]
            assert placement.confined
            assert {*map(len, cores_of_threads())} == {1}
            assert torch.equal(x @ x.T, expected)
        assert cores_of_threads() == {frozenset(cores)}
        assert torch.equal(x @ x.T, expected)
        limit = time.monotonic() + 20  # libgomp ends the threads of the second team after the end of their first one
        while len(list(TASKS.iterdir())) > before + 1:  # the second thread of torch, where it was not yet started
            assert time.monotonic() < limit
            time.sleep(0.05)
    finally:
        end.set()
        torch.set_num_threads(1)


def pretend(patch: pytest.MonkeyPatch, capabilities: dict[str, object] | None) -> None:
    """Make torch report these capabilities; `None`: remove the function that reports them."""
    patch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    if capabilities is None:
        patch.delattr(torch.cpu, "get_capabilities")


def test_an_intel_cpu_is_recognised_by_torch_or_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, vendor, intel in (
        ({"cpu_name": "Intel Xeon"}, {}, True),
        ({"cpu_name": "AMD EPYC"}, {"vendor_id": "GenuineIntel"}, False),
        (None, {"vendor_id": "GenuineIntel"}, True),
        (None, {"vendor_id": "AuthenticAMD"}, False),
        ({}, {}, False),
    ):
        with monkeypatch.context() as patch:
            pretend(patch, capabilities)
            patch.setattr(cpu, "identify_processor", lambda vendor=vendor: vendor)
            assert cpu.is_intel() == intel, (capabilities, vendor)


def test_bf16_is_read_from_the_capabilities_if_torch_has_no_private_names_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without capabilities, bf16 is not used."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name)
    for avx, amx in ((True, False), (False, True), (False, False)):
        pretend(monkeypatch, {"avx512_bf16": avx, "amx_tile": amx})
        assert (cpu.computes_bf16(), cpu.has_amx()) == (avx or amx, amx)
    pretend(monkeypatch, None)
    assert not cpu.computes_bf16() and not cpu.has_amx()
    assert cpu.capabilities() == {}
    assert cpu.identify_torch()["capabilities"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_the_features_equal_those_in_proc_cpuinfo() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = {*next((line.split() for line in lines if line.startswith("flags")), [])}
    assert cpu.has_amx() == ("amx_tile" in flags)
    assert cpu.computes_bf16() == bool({"avx512_bf16", "amx_tile"} & flags)
    assert cpu.computes_fp16() == bool({"avx512_fp16", "amx_fp16"} & flags)
    assert cpu.has_avx512() == ({"avx512vl", "avx512bw", "avx512dq"} <= flags)
    names = {"AVX512_BF16": "avx512_bf16", "AVX512_FP16": "avx512_fp16", "AMX": "amx_tile"}
    assert cpu.instruction_sets()[1:] == [name for name, flag in names.items() if flag in flags]


def test_the_identity_changes_with_threads_and_the_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu.identify_torch()
    assert before == cpu.identify_torch()
    monkeypatch.setattr(torch, "__version__", "9.9")
    torch.set_num_threads(2)
    try:
        after = cpu.identify_torch()
    finally:
        torch.set_num_threads(1)
    assert {name for name in after if after[name] != before[name]} == {"threads", "torch"}
