"""How much of the processor other processes take, and what a training run says about it."""

import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tinylm.config.duration import format_duration
from tinylm.system.machine_profile import usable_cores

PROC_STAT = Path("/proc/stat")
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; user includes the time of guests
MIN_LOAD = 0.25  # cores; measured on two idle cores: up to 0.06, beside a process at nice 19: 0.3 and more
FIRST_SECONDS, LATER_SECONDS = 10.0, 60.0  # between readings during training, before and after the first note
MIN_CHANGE = 0.5  # cores, or this fraction of the last load: a smaller change is not worth another note


class LoadMeter:
    """Measures how many cores other processes use, from one reading to the next.

    On Linux, it compares the busy time of the cores that this process may use, steal included, with the processor time
    of this process. On other systems, it takes the load average, which lags by a minute, in place of the busy time.

    cores: number of cores that this process might use at the beginning; training may keep its threads on some of them
    """

    def __init__(self, processes: int = 1) -> None:
        """Begin to measure. processes: number of processes on this machine that work like this one."""
        self._processes = processes
        self.cores = usable_cores()
        self._core_ids = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._last = self._times()

    def read(self) -> float | None:
        """The cores that other processes used on average since the last reading; `None` if the system does not tell.

        Busy time is counted in steps of 10 ms per core: after a second, the result is right to a few hundredths.
        """
        (begun, busy_before, own_before), self._last = self._last, self._times()
        now, busy, own = self._last
        seconds = max(now - begun, 1e-3)
        if busy is not None and busy_before is not None:
            used = (busy - busy_before) / seconds
        elif hasattr(os, "getloadavg"):
            used = os.getloadavg()[0]
        else:
            return None
        return min(max(used - self._processes * (own - own_before) / seconds, 0.0), float(self.cores))

    def _times(self) -> tuple[float, float | None, float]:
        """Three times in seconds: now, busy time of the cores, and processor time of this process."""
        return time.monotonic(), _busy_seconds(self._core_ids), time.process_time()


def _busy_seconds(cores: Iterable[int]) -> float | None:
    """The time that the cores have been busy, for any process; `None` if /proc/stat cannot be read."""
    try:
        rows = (line.split() for line in PROC_STAT.read_text(encoding="ascii").splitlines() if line[:3] == "cpu")
        times = {name.removeprefix("cpu"): fields for name, *fields in rows}
        ticks = sum(int(times[str(core)][field]) for core in cores for field in BUSY_FIELDS)
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, LookupError, AttributeError):
        return None


def slows_training(others: float, threads: int, cores: int) -> bool:
    """Whether other processes that use `others` of the cores slow training with `threads` threads.

    They do if they need cores that the threads need. A core may be half of a physical one, whose other half then slows.
    """
    return others >= max(MIN_LOAD, 0.75 * cores - threads)


class LoadNotes:
    """Says during training that other processes slow it, with the time or steps to expect, and says when that changes.

    note: receives the messages. threads: of training. timed: whether the budget is a time.
    planned_steps: of an idle machine, for a time budget; `None` if not known
    """

    def __init__(
        self, note: Callable[[str], None], meter: LoadMeter, *, threads: int, timed: bool, planned_steps: int | None
    ) -> None:
        self._note = note
        self._meter = meter
        self._threads = threads
        self._timed = timed
        self._planned_steps = planned_steps
        self._said = 0.0  # cores, of the last note
        self._last: tuple[float, int, float] | None = None  # time, step and progress at the last reading

    def step(self, step: int, progress: float) -> None:
        """Take the step and the used fraction of the budget, after each step."""
        now = time.monotonic()
        if self._last is None:
            self._meter.read()
            self._last = now, step, progress
        begun, first_step, first_progress = self._last
        seconds, used = now - begun, progress - first_progress
        if seconds < (LATER_SECONDS if self._said else FIRST_SECONDS) or used <= 0:
            return
        others, self._last = self._meter.read(), (now, step, progress)
        if others is None:
            return
        ended = self._said > 0 and others < MIN_LOAD / 2
        if self._said and not ended:
            is_news = abs(others - self._said) >= MIN_CHANGE * max(1.0, self._said)
        else:
            is_news = ended or slows_training(others, self._threads, self._meter.cores)
        if not is_news:
            return
        self._said = 0.0 if ended else others
        speed = f"at the speed of the last {format_duration(seconds)}"
        if self._timed:
            steps = step + math.floor((step - first_step) / used * (1 - progress))
            planned = f"; {self._planned_steps:,} were planned" if self._planned_steps else ""
            expected = f"{speed}, about {steps:,} steps fit into the time{planned}."
        else:
            expected = f"{speed}, it ends in about {format_duration(seconds / used * (1 - progress))}."
        if ended:
            self._note(f"Other processes no longer slow training: {expected}")
        else:
            self._note(
                f"Other processes take {others:.1f} of the {self._meter.cores} cores, which slows training: {expected} "
                "The plan is for an idle machine. The command top shows those processes."
            )
