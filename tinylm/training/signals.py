"""Ctrl-C, SIGTERM and a closed terminal during training: the first asks to stop and save, a later one stops at once."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tinylm.interrupts import catchable
from tinylm.training.trainer import StopTraining

SAME_PRESS = 0.5  # seconds within which two signals are one wish: a shell and a timer may both pass it on


class StopRequest:
    """`signal_number` is the signal that came, 0 while none has."""

    def __init__(self) -> None:
        self.signal_number = 0
        self._came = 0.0
        self._checked = False

    def check(self) -> None:
        """Raises StopTraining once a signal has come."""
        self._checked = True
        if self.signal_number:
            raise StopTraining

    def came(self, number: int) -> bool:
        """Note a signal. Returns whether to stop at once.

        That is so before the first check, when there is nothing to save and compiling may take a minute, and for a
        signal that is a wish of its own after another.
        """
        if not self._checked:
            return True
        now = time.monotonic()
        if not self.signal_number:
            self.signal_number, self._came = number, now
            return False
        return now - self._came > SAME_PRESS


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """The first signal only asks to stop; a later one does what it did before, or raises KeyboardInterrupt.

    Signals that are ignored, as under nohup and in the background of a script, stay ignored.
    """
    request = StopRequest()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in catchable()}

    def handle(number: int, frame: FrameType | None) -> None:
        if request.came(number):
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
