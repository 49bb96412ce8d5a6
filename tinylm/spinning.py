"""How long torch's threads look for work before they sleep, which is settled when torch is loaded (decision 004)."""

import os
import threading
import time

from tinylm.machine import Measurement, identify_processor

ASLEEP = 0  # beside a busy neighbour, threads that spin make a step many times slower
SPINS = 10_000  # a fraction of a millisecond
SLOW_WAKING = 15e-6  # seconds, from which spinning gains more on a quiet machine than it loses on a busy one
SERIES, PAUSE = 5, 0.005  # of measurements, and the seconds between them: a busy neighbour disturbs some of them


def choose_spin_count() -> int:
    """For GOMP_SPINCOUNT: virtual machines may take ten times as long as others to wake a core (decision 015).

    The wake-up latency is read from the machine profile, and measured if it is not there.
    """
    try:
        cores = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux, whose builds of torch have other threads
        return ASLEEP
    if len(cores) == 1:
        return ASLEEP
    try:
        waking = wake_up_entry().get(lambda: {"seconds": _least_waking_seconds(cores[0], cores[-1])})["seconds"]
    except (OSError, RuntimeError):  # a sandbox may forbid to choose a core, or to have another thread
        return ASLEEP
    return SPINS if waking > SLOW_WAKING else ASLEEP


def wake_up_entry() -> Measurement:
    """The machine profile's entry."""
    return Measurement("wake-up", identify_processor(), {"seconds": (1e-9, 1.0)})


def _least_waking_seconds(core: int, other: int) -> float:
    found = []
    for _ in range(SERIES):
        found.append(_waking_seconds(core, other))
        time.sleep(PAUSE)
    return min(found)


def _waking_seconds(core: int, other: int, rounds: int = 21) -> float:
    """The median time for a thread on one core to wake one that sleeps on another, half of there and back."""
    before = os.sched_getaffinity(0)
    (asked, asking), (answered, answering) = os.pipe(), os.pipe()

    def answer() -> None:
        while os.read(asked, 1):
            os.write(answering, b"!")

    def ask() -> float:
        begun = time.perf_counter()
        os.write(asking, b"?")
        os.read(answered, 1)
        return (time.perf_counter() - begun) / 2

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        os.sched_setaffinity(thread.native_id or 0, {other})
        os.sched_setaffinity(0, {core})
        return sorted(ask() for _ in range(rounds))[rounds // 2]
    finally:
        os.close(asking)  # ends the other thread
        thread.join()
        for end in (asked, answered, answering):
            os.close(end)
        os.sched_setaffinity(0, before)
