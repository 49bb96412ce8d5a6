"""Ctrl-C, SIGTERM and a closed terminal during training: the first asks to stop and save, a later one stops at once."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

from tinylm.training.trainer import StopTraining

HANGUP = getattr(signal, "SIGHUP", None)  # which Windows has not
SAME_PRESS = 0.5  # seconds within which two signals are one wish: a shell and a timer may both pass it on


class StopRequest:
    """`signal_number` is the signal that came, 0 while none has."""

    def __init__(self) -> None:
        self.signal_number = 0
        self._came = 0.0
        # Looked up now: once it has hung up, a terminal no longer says that it is one.
        self._on_terminal = [s.fileno() for s in (sys.stdin, sys.stdout, sys.stderr) if s.isatty()]

    def check(self) -> None:
        """Raises StopTraining once a signal has come."""
        if self.signal_number:
            raise StopTraining

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == HANGUP:
            self._leave_terminal()
        if not self.signal_number:
            self.signal_number, self._came = number, now
        elif now - self._came > SAME_PRESS:
            raise KeyboardInterrupt

    def _leave_terminal(self) -> None:
        """What is said from now on leads nowhere, instead of failing."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in self._on_terminal:
            os.dup2(nowhere, number)
        os.close(nowhere)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    request = StopRequest()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN:  # as nohup would have it
        numbers.append(HANGUP)
    handlers = {number: signal.signal(number, request._handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
