"""The interface through which library code reports notes, warnings and progress."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol


def counted(number: int, noun: str) -> str:
    """A number with its noun, for a message: "1 step", "1,469 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shorten_number(number: float) -> str:
    """A number for people to read: 1,234,567 as 1.2M."""
    for size, least, suffix in ((1e9, 999.95e6, "G"), (1e6, 999.95e3, "M"), (1e3, 999.5, "k")):
        if number >= least:  # `least` instead of `size`: 999,950 would be 1000.0k
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


class Reporter(Protocol):
    """Receives notes, warnings and progress. The command line uses `tinylm.commands.console.Console`."""

    def note(self, message: str) -> None:
        """Report information, such as a default that was chosen."""
        ...

    def warn(self, message: str) -> None:
        """Report something that the user may not intend."""
        ...

    def counting(self, what: str, total: int | None, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """Context manager for the progress of work that is counted, for example in bytes.

        what: name of the work. total: number of units, if known. unit: name of the unit.

        Yields a function that takes the number of units done since its last call.
        """
        ...


class LogReporter:
    """Sends notes and warnings to the logger `tinylm`, at the levels INFO and WARNING. Ignores progress."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("tinylm")

    def note(self, message: str) -> None:
        """Log at the level INFO."""
        self._logger.info(message)

    def warn(self, message: str) -> None:
        """Log at the level WARNING."""
        self._logger.warning(message)

    @contextlib.contextmanager
    def counting(self, what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        """Context manager whose function ignores the progress."""
        yield lambda done: None


class SilentReporter(LogReporter):
    """Reports nothing."""

    def note(self, message: str) -> None:
        pass

    def warn(self, message: str) -> None:
        pass
