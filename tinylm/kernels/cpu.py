"""The processor: its features as this version of torch reports them, and the cores on which training runs.

The threads of training wait for each other after every operation. If a busy process uses one of two cores as well, a
wait can last a time slice of the scheduler. Threads that share the free core and do not spin wait for each other only
(decision 042).
"""

import contextlib
import hashlib
import json
import os
import platform
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tinylm.system.machine_profile import identify_processor


def capabilities() -> Mapping[str, Any]:
    """Instruction sets, cache sizes and name of the processor; empty if torch does not report them, as in torch 2.9."""
    return getattr(torch.cpu, "get_capabilities", dict)()


def is_intel() -> bool:
    """Whether the processor is known to be an Intel CPU."""
    return "Intel" in (capabilities().get("cpu_name") or identify_processor().get("vendor_id", ""))


def computes_bf16() -> bool:
    """Whether an x86 processor has bf16 dot-product or matrix instructions (AVX512_BF16, AMX)."""
    return is_x86() and (_supports("_is_avx512_bf16_supported", "avx512_bf16") or has_amx())


def computes_fp16() -> bool:
    """Whether torch reports fp16 arithmetic or matrix instructions of an x86 processor (AVX512_FP16, AMX_FP16)."""
    return bool(capabilities().get("avx512_fp16") or capabilities().get("amx_fp16"))


def is_x86() -> bool:
    """Whether this is a 64-bit x86 processor."""
    return platform.machine().lower() in ("x86_64", "amd64")


def has_avx512() -> bool:
    """Whether torch uses AVX-512 on this x86 processor. Other processors do not have it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def has_amx() -> bool:
    """Whether the processor has AMX, the matrix units of Intel CPUs."""
    return _supports("_is_amx_tile_supported", "amx_tile")


def instruction_sets() -> list[str]:
    """The instructions in which torch multiplies matrices on this processor, as far as it reports them."""
    found = {
        torch.backends.cpu.get_cpu_capability(): True,
        "AVX512_BF16": _supports("_is_avx512_bf16_supported", "avx512_bf16"),
        "AVX512_FP16": bool(capabilities().get("avx512_fp16")),
        "AMX": has_amx(),
    }
    return [name for name, is_there in found.items() if is_there]


def _supports(function: str, capability: str) -> bool:
    if hasattr(torch.cpu, function):
        return getattr(torch.cpu, function)()
    return bool(capabilities().get(capability, False))


def identify_torch() -> dict[str, Any]:
    """Key of a speed measurement on this processor, as JSON values: processor, torch, libraries, threads."""
    return {
        **identify_processor(),
        "capabilities": _digest(json.dumps(capabilities(), sort_keys=True, default=str)),
        "torch": torch.__version__,
        "libraries": _digest(torch.__config__.show()),  # versions of MKL and oneDNN, instruction sets
        "threads": torch.get_num_threads(),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


ELEMENTS_PER_THREAD = 32_768  # torch does not split smaller elementwise operations
TASKS = Path("/proc/self/task")  # one entry per thread of this process
INTERVAL = 1.0  # seconds of training over which a speed is measured
HOLD = 30  # intervals until both placements are compared again


class ThreadPlacement:
    """Keeps the threads of this process on fewer cores while that trains faster, and only beside busy processes.

    The number of threads stays the same, so results do not depend on the placement. A context manager that lets the
    threads use all cores again at its end.

    busy_cores: returns the cores that other processes have used since its last call, `None` if that is not known
    is_disturbing: whether so many busy cores slow training
    threads: those of this process
    """

    def __init__(
        self,
        busy_cores: Callable[[], float | None],
        is_disturbing: Callable[[float], bool],
        threads: "Threads | None" = None,
    ) -> None:
        self._busy_cores = busy_cores
        self._is_disturbing = is_disturbing
        self._threads = threads or Threads()
        self._cores = sorted(self._threads.cores()) if threads or can_place_threads() else []
        self._first = 0  # index of the first core that a confined process uses
        self._team: SecondTeam | None = None  # while the threads are confined
        self._speeds: dict[bool, float] = {}  # tokens per second when confined (True) and when not (False)
        self._hold = 1  # the interval in which a process starts or ends says nothing
        self._tokens, self._seconds = 0, 0.0

    def __enter__(self) -> "ThreadPlacement":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()

    @property
    def confined(self) -> bool:
        """Whether the threads run on fewer cores than the process may use."""
        return self._team is not None

    def step(self, tokens: int, seconds: float) -> None:
        """Take the tokens and the duration of a training step, and change the placement if that pays."""
        self._tokens += tokens
        self._seconds += seconds
        if self._seconds < INTERVAL or not self._cores:
            return
        speed, self._tokens, self._seconds = self._tokens / self._seconds, 0, 0.0
        busy = self._busy_cores()
        if busy is None or not self._is_disturbing(busy):
            self._release()
            self._speeds, self._hold = {}, 1
        elif self._hold > 0:
            self._hold -= 1
        else:
            self._compare(speed, busy)

    def _compare(self, speed: float, busy: float) -> None:
        """Note the speed of the current placement; try the other one, or keep the faster of both."""
        self._speeds[self.confined] = speed
        if len(self._speeds) == 1:
            faster = not self.confined
        else:
            faster = self._speeds[True] > self._speeds[False]
            self._first += not faster  # other cores in the next trial
            self._speeds, self._hold = {}, HOLD
        if faster and not self.confined:
            first, count = self._first % len(self._cores), max(1, len(self._cores) - max(1, round(busy)))
            self._team = self._threads.second_team()
            self._threads.move({*self._cores}, {*(self._cores[first:] + self._cores[:first])[:count]})
        elif not faster:
            self._release()

    def _release(self) -> None:
        if self._team is not None:
            self._team.end()
            self._team = None
            self._threads.move(self._threads.cores(), {*self._cores})


def can_place_threads() -> bool:
    """Whether this is Linux, and the process may use several cores and computes with several threads."""
    return hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1 and torch.get_num_threads() > 1


class Threads:
    """The threads of this process, and the cores that they may use."""

    def cores(self) -> set[int]:
        """The cores of the calling thread."""
        return set(os.sched_getaffinity(0))

    def move(self, old: set[int], new: set[int]) -> None:
        """Allow the threads that may use the cores `old` to use the cores `new` instead.

        Threads that have other cores, set by someone else, or that end meanwhile, are left as they are.
        """
        with contextlib.suppress(OSError):
            for task in TASKS.iterdir():
                with contextlib.suppress(OSError):
                    if os.sched_getaffinity(int(task.name)) == old:
                        os.sched_setaffinity(int(task.name), new)

    def second_team(self) -> "SecondTeam":
        """A new one."""
        return SecondTeam()


class SecondTeam:
    """A second team of OpenMP threads, which sleeps, and whose existence ends the spinning of the first.

    libgomp polls at most 100 times if it has more threads than there are cores ("GOMP_SPINCOUNT" in its manual).
    Threads that share a core and spin would wait for a whole time slice each.
    """

    def __init__(self) -> None:
        self._started, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tinylm-second-team", daemon=True)
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        torch.ones(ELEMENTS_PER_THREAD * torch.get_num_threads(), device="cpu").add_(1)  # starts the team
        self._started.set()
        self._ended.wait()

    def end(self) -> None:
        """End the thread, and with it its team."""
        self._ended.set()
        self._thread.join()
