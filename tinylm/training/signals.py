"""Ctrl-C and SIGTERM during training: the first asks the loop to stop and save, a second one stops at once."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from tinylm.training.trainer import StopTraining


class StopRequest:
    """`signal_number` is the signal that came, 0 while none has."""

    def __init__(self) -> None:
        self.signal_number = 0

    def check(self) -> None:
        """Raises StopTraining once a signal has come."""
        if self.signal_number:
            raise StopTraining

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number:
            raise KeyboardInterrupt
        self.signal_number = number


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    request = StopRequest()
    handlers = {number: signal.signal(number, request._handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
