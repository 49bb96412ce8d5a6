"""Ctrl-C, SIGTERM and a closed terminal: at any moment they end the process quietly, after cleaning up."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

NUMBERS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class Interrupted(BaseException):
    """A signal came; raised once, so that temporary files are removed on the way out."""


class _Handler:
    """Handles the first signal by raising Interrupted, a second one by ending the process at once."""

    def __init__(self) -> None:
        self.number = 0  # of the signal that came

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # An import that is broken off leaves half a module behind, and turns the exception into others.
        if self.number or _is_importing(frame):
            end_by_signal(number)
        self.number = number
        raise Interrupted

    def end_if_lost(self, unraisable: Any) -> None:
        """For sys.unraisablehook: from a finalizer or a callback the exception would not arrive anywhere."""
        if issubclass(unraisable.exc_type, Interrupted):
            end_by_signal(self.number)
        sys.__unraisablehook__(unraisable)


def run_interruptibly(program: Callable[[], object]) -> None:
    """Run the program of this process. A signal ends it as the signal would, whatever becomes of the exception.

    Signals that were ignored when the process began (nohup, a background job of a script) stay ignored.
    """
    handler = _Handler()
    try:
        try:
            sys.unraisablehook = handler.end_if_lost
            for number in catchable():
                signal.signal(number, handler)
            program()
        finally:  # nothing is left to clean up while Python shuts down
            for number in catchable():
                signal.signal(number, signal.SIG_DFL)
    except BaseException:
        if handler.number:
            end_by_signal(handler.number)
        raise


def catchable() -> list[signal.Signals]:
    """The signals among `NUMBERS` that are not ignored, and not handled by something other than Python."""
    return [number for number in NUMBERS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


def was_interrupted() -> bool:
    """Whether a signal is on its way out of `run_interruptibly`, as Interrupted or as what that was turned into."""
    handlers = [signal.getsignal(number) for number in NUMBERS]
    return any(isinstance(handler, _Handler) and handler.number for handler in handlers)


def end_by_signal(number: int) -> None:
    """End the process as the signal does by default, so that a shell sees it: 130 for SIGINT, 143 for SIGTERM."""
    if os.name == "posix":
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 + number)  # Windows, and the first process of a container, to which the default does nothing


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
