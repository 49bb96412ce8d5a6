"""Signal handlers of the process: Ctrl-C, SIGTERM and a closed terminal end it after cleanup, without a traceback.

During training, `tinylm.training.session` replaces these handlers: a signal then saves the run first.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

TERMINATION_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]

WAIT_SECONDS = 1  # on Windows, only the end of a wait lets Ctrl-C through

Result = TypeVar("Result")

_temporary: set[Path] = set()  # see `temporary`


class Interrupted(BaseException):
    """Raised in the main thread by the first signal, so that `finally` blocks run and remove temporary files.

    number: number of the signal
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


class _Handler:
    """Signal handler: the first signal raises Interrupted, the second one ends the process immediately."""

    def __init__(self) -> None:
        self.number = 0  # of the first signal; 0 before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # An exception within an import would leave a partly initialised module, and some libraries raise another one
        # in its place.
        if self.number:
            end_by_signal(number)
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                _delete_temporary()
                end_by_signal(number)
            frame = frame.f_back
        self.number = number
        raise Interrupted(number)

    def end_if_lost(self, unraisable: Any) -> None:
        """Hook for sys.unraisablehook: ends the process if Interrupted was raised where Python ignores exceptions."""
        if issubclass(unraisable.exc_type, Interrupted):
            end_by_signal(self.number)
        sys.__unraisablehook__(unraisable)


def run_with_signal_handlers(program: Callable[[], object]) -> None:
    """Run `program`. A signal raises Interrupted in the program, and then ends the process as it does by default.

    Signals that were ignored when the process started (nohup, background jobs of a script) stay ignored.
    """
    handler = _Handler()
    try:
        try:
            sys.unraisablehook = handler.end_if_lost
            for number in catchable_signals():
                signal.signal(number, handler)
            program()
        finally:  # while Python shuts down, signals end the process
            for number in catchable_signals():
                signal.signal(number, signal.SIG_DFL)
    except BaseException:
        if handler.number:
            end_by_signal(handler.number)
        raise


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[None]:
    """Context manager: a signal within an import, at which no `finally` block runs, deletes this file or folder."""
    _temporary.add(path)
    try:
        yield
    finally:
        _temporary.discard(path)


def _delete_temporary() -> None:
    if _temporary:
        import shutil  # whoever makes such files has imported it

    for path in tuple(_temporary):
        with contextlib.suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def catchable_signals() -> list[signal.Signals]:
    """The TERMINATION_SIGNALS that are neither ignored nor handled outside of Python."""
    return [number for number in TERMINATION_SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


def was_interrupted() -> bool:
    """Whether a handler of `run_with_signal_handlers` has received a signal.

    The exception being handled is then Interrupted, or was caused by Interrupted.
    """
    handlers = [signal.getsignal(number) for number in TERMINATION_SIGNALS]
    return any(isinstance(handler, _Handler) and handler.number for handler in handlers)


def end_by_signal(number: int) -> None:
    """End the process as the signal does by default. A shell then reports 130 for SIGINT and 143 for SIGTERM."""
    if os.name == "posix":
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 + number)  # on Windows, and in process 1 of a container, where signals have no default effect


def end_at_next_signal() -> None:
    """End the process at the next signal, without cleanup: for a program that has nothing to save."""
    for number in catchable_signals():
        signal.signal(number, lambda number, frame: end_by_signal(number))


def interruptible(call: Callable[[], Result], waiting: Callable[[int], object] = lambda seconds: None) -> Result:
    """The result of `call`, a long call into a library that releases the interpreter lock. Raises the error of `call`.

    Python handles a signal between two instructions of the main thread, so not before such a call returns. Here the
    call runs in another thread, and a signal interrupts the main thread, which waits. The call itself then goes on
    until the process ends: it must not write anything that remains.

    waiting: called every second with the number of seconds since its last call, 1
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[Result] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    while not ended.wait(WAIT_SECONDS):
        waiting(WAIT_SECONDS)
    if errors:
        raise errors[0]
    return results[0]
