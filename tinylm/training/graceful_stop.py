"""Graceful stop of training: the first signal (Ctrl-C, SIGTERM) saves the run and stops; a second one stops at once.

The signal handlers outside of training are in `tinylm.system.process_signals`.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from tinylm.system.process_signals import catchable_signals
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.training.trainer import StopTraining

# A second signal within these seconds counts as a copy of the first, as a shell or timeout(1) may send it. With
# torchrun, a scheduler may send one to all processes of a job, and torchrun another one.
DUPLICATE_SECONDS, SHARED_DUPLICATE_SECONDS = 0.5, 5.0


class StopRequest:
    """Records the signal that stops training: `signal_number` is the first signal received, or 0.

    After `check`, it is the same on all ranks.

    ranks: the processes of the run, which stop together if one of them receives a signal
    """

    def __init__(self, ranks: Ranks, now: Callable[[], float] = time.monotonic) -> None:
        self.signal_number = 0
        self._ranks, self._now = ranks, now
        self._duplicate_seconds = DUPLICATE_SECONDS if ranks.is_alone else SHARED_DUPLICATE_SECONDS
        self._received = 0.0
        self._checked = False

    def check(self) -> None:
        """Raise StopTraining if a signal was received by any rank."""
        self._checked = True
        received = [number for number in self._ranks.gather(self.signal_number) if number]
        if received:
            if not self.signal_number:
                self._received = self._now()
            self.signal_number = received[0]
            raise StopTraining

    def receive(self, number: int) -> bool:
        """Record a signal. Returns whether to stop at once, without a save.

        True for a second signal that is no copy of the first (see DUPLICATE_SECONDS), and for a signal before the first
        `check`: there is nothing to save yet, and compiling the model may take a minute.
        """
        if not self._checked:
            return True
        now = self._now()
        if not self.signal_number:
            self.signal_number, self._received = number, now
            return False
        return now - self._received > self._duplicate_seconds


@contextlib.contextmanager
def stop_on_signals(
    numbers: Collection[int], ranks: Ranks = ONE_RANK, now: Callable[[], float] = time.monotonic
) -> Iterator[StopRequest]:
    """Context manager that yields a StopRequest, which records the first of the given signals.

    If `receive` returns True, the previous handler is called, and KeyboardInterrupt is raised if it returns. Ignored
    signals (nohup, background jobs of a script) stay ignored. Does nothing outside of the main thread, the only one in
    which Python handles signals.
    """
    request = StopRequest(ranks, now)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handled = [number for number in catchable_signals() if number in numbers] if in_main_thread else []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in handled}

    def handle(number: int, frame: FrameType | None) -> None:
        if request.receive(number):
            if callable(before[number]):
                before[number](number, frame)
            raise KeyboardInterrupt

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
