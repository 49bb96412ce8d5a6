"""OpenMP spin: how long idle threads of torch poll for work before they sleep (decision 015).

The environment variable `GOMP_SPINCOUNT` sets the number of polls; libgomp reads it when torch is imported.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from tinylm.system.machine_profile import Measurement, identify_processor

SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # values that the user has set are kept
NO_SPIN = 0  # if another process is busy, spinning makes a training step many times slower
SPIN_COUNT = 10_000  # iterations, a fraction of a millisecond
SLOW_WAKE_UP = 7e-6  # seconds; above it, spinning gains more on an idle machine than it loses on a busy one
SERIES, PAUSE = 5, 0.005  # number of medians, some of which other processes disturb, and seconds between them


def set_spin_count() -> None:
    """Set `GOMP_SPINCOUNT` for this process and its children, unless the user has set how threads wait.

    Called before torch is imported: OpenMP reads the variable when it is loaded.
    """
    if not any(name in os.environ for name in SPIN_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(choose_spin_count())


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """Context manager for the import of another library with OpenMP, whose threads poll `count` times.

    Values that the user has set are kept.
    """
    before = os.environ.get("GOMP_SPINCOUNT")
    if "OMP_WAIT_POLICY" in os.environ or before not in (None, str(NO_SPIN), str(SPIN_COUNT)):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = str(count)
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]
        if before is not None:
            os.environ["GOMP_SPINCOUNT"] = before


def choose_spin_count() -> int:
    """The value for `GOMP_SPINCOUNT`: threads spin if waking one takes long, as on some virtual machines.

    The wake-up latency is read from the machine profile, or measured in about 30 ms and recorded there.
    """
    if not can_measure_wake_up():
        return NO_SPIN
    try:
        latency = wake_up_entry().get(measure_wake_up)["seconds"]
    except (OSError, RuntimeError):  # a sandbox may forbid setting the affinity or starting a thread
        return NO_SPIN
    return SPIN_COUNT if latency > SLOW_WAKE_UP else NO_SPIN


def can_measure_wake_up() -> bool:
    """Whether this is Linux and the process may use several cores. Other systems have other thread libraries."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


def wake_up_entry() -> Measurement:
    """The machine profile's entry for the wake-up latency."""
    return Measurement("wake-up", identify_processor(), {"seconds": (1e-9, 1.0)})


def measure_wake_up() -> dict[str, float]:
    """The wake-up latency between the first and the last core, in seconds: the minimum of SERIES medians.

    Raises OSError or RuntimeError if the affinity cannot be set or no thread can be started.
    """
    cores = sorted(os.sched_getaffinity(0))
    found = []
    for _ in range(SERIES):
        found.append(_wake_up_seconds(cores[0], cores[-1]))
        time.sleep(PAUSE)
    return {"seconds": min(found)}


def _wake_up_seconds(core: int, other: int, rounds: int = 21) -> float:
    """The median time to wake a sleeping thread on another core, in seconds: half of a round trip through two pipes."""
    affinity = os.sched_getaffinity(0)
    (ping_reader, ping_writer), (pong_reader, pong_writer) = os.pipe(), os.pipe()

    def answer() -> None:
        while os.read(ping_reader, 1):
            os.write(pong_writer, b"!")

    def one_way() -> float:
        begun = time.perf_counter()
        os.write(ping_writer, b"?")
        os.read(pong_reader, 1)
        return (time.perf_counter() - begun) / 2

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        os.sched_setaffinity(thread.native_id or 0, {other})
        os.sched_setaffinity(0, {core})
        return sorted(one_way() for _ in range(rounds))[rounds // 2]
    finally:
        os.close(ping_writer)  # ends `answer`
        thread.join()
        for end in (ping_reader, pong_reader, pong_writer):
            os.close(end)
        os.sched_setaffinity(0, affinity)
