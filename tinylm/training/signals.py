"""Ctrl-C and SIGTERM during training: the first asks the loop to stop and save, a later one stops at once."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from tinylm.training.trainer import StopTraining

SAME_PRESS = 0.5  # seconds within which two signals are one wish: a shell and a timer may both pass it on


class StopRequest:
    """`signal_number` is the signal that came, 0 while none has."""

    def __init__(self) -> None:
        self.signal_number = 0
        self._came = 0.0

    def check(self) -> None:
        """Raises StopTraining once a signal has come."""
        if self.signal_number:
            raise StopTraining

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal_number:
            self.signal_number, self._came = number, now
        elif now - self._came > SAME_PRESS:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    request = StopRequest()
    handlers = {number: signal.signal(number, request._handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
