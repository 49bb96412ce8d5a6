"""What a person or a script sees: results on stdout, everything else on stderr. The only importer of rich and tqdm."""

import contextlib
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.text import Text
from tqdm import tqdm

PLAIN_SECONDS = 5.0  # between two lines of progress where there is no terminal
BEFORE_WORDS = "{percentage:3.0f}% -{remaining} "  # the time left, as players of music show it
BAR = BEFORE_WORDS + "{desc} |{bar}| {elapsed}"  # a narrow terminal cuts the end
# What a terminal may act on: C0 but tab and newline, delete, C1, and what reverses the direction of text.
_CONTROLS = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
# A byte of a path that is not UTF-8 would reach the terminal as it is, and may be a C1 code to it.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *range(0xDC80, 0xDD00))}
_NOT_UNICODE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # "\\ud800" in a JSON file, which has no encoding


class Console:
    """Prints for one command. `quiet` leaves out notes and progress; warnings and errors are always said."""

    def __init__(self, quiet: bool = False, as_json: bool = False) -> None:
        self.quiet = quiet
        self.as_json = as_json
        self._stderr = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        self._bar: tqdm[Any] | None = None

    @property
    def on_terminal(self) -> bool:
        """Whether someone is watching: progress is shown as a bar that moves."""
        return sys.stderr.isatty() and not self.quiet

    def note(self, message: str) -> None:
        if not self.quiet:
            self._say(message, "")

    def warn(self, message: str) -> None:
        self._say(message, "yellow", "Warning: ")

    def error(self, message: str) -> None:
        self._say(message, "red", "Error: ")

    def traceback(self) -> None:
        """The exception that is being handled, and where it was raised."""
        self._say(traceback.format_exc().rstrip("\n"), "")

    def _say(self, message: str, style: str, prefix: str = "") -> None:
        if self._bar is not None:
            self._bar.clear()
        if prefix:
            self._stderr.print(Text(prefix, f"bold {style}"), end="")
        sys.stderr.write(printable(message, sys.stderr) + "\n")  # rich would drop some control characters
        sys.stderr.flush()
        if self._bar is not None:
            self._bar.refresh()

    def result(self, text: str, end: str = "\n") -> None:
        """Text on stdout: into a pipe or a file exactly as it is, on a terminal with control characters escaped.

        Raises OutputError when it cannot be written (see tinylm.streams).
        """
        self._write(printable(text, sys.stdout) + end)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def record(self, values: dict[str, Any]) -> None:
        """One JSON object on a line of stdout."""
        self.result(json.dumps(values, ensure_ascii=False))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table on stdout; numbers, which begin with a digit, are set to the right."""
        rows = [[printable(cell, sys.stdout) for cell in row] for row in rows]
        places = []
        for index, column in enumerate(columns):
            cells = [row[index] for row in rows if row[index] not in ("", "-")]
            numeric = bool(cells) and all(cell[0].isdigit() for cell in cells)
            places.append((max(map(cell_len, (column, *(row[index] for row in rows)))), numeric))
        if any(columns):
            bold = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)
            bold.print(Text(_line(columns, places), "bold"))
        self._write("".join(_line(row, places) + "\n" for row in rows))

    @contextlib.contextmanager
    def counting(self, what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        """Progress of work that is counted in units; the yielded function is told how many more are done."""
        with self.progress() as show:
            done = 0
            begun = time.monotonic()

            def advance(more: int) -> None:
                nonlocal done
                done += more
                rate = done / max(time.monotonic() - begun, 1e-9)
                show(done / total if total else 0.0, f"{what}: {shorten(done)} {unit}, {shorten(rate)}/s")

            yield advance

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[float, str], None]]:
        """Progress from 0 to 1 with a few words: a bar on a terminal, elsewhere a plain line every few seconds.

        Two spaces separate the fields of the words, the most important first: a narrow terminal shows only those.
        """
        if self.quiet:
            yield lambda fraction, words: None
            return
        if not self.on_terminal:
            yield self._plain_progress()
            return
        with _Bar(total=1.0, bar_format=BAR, file=sys.stderr, dynamic_ncols=True, leave=False, mininterval=0.2) as bar:
            self._bar = bar

            def show(fraction: float, words: str) -> None:
                bar.set_description_str(printable(words, sys.stderr), refresh=False)
                bar.update(min(fraction, 1.0) - bar.n)

            try:
                yield show
            finally:
                self._bar = None

    def _plain_progress(self) -> Callable[[float, str], None]:
        last = time.monotonic()

        def show(fraction: float, words: str) -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_SECONDS:
                last = time.monotonic()
                self.note(f"{fraction:4.0%}  {words}")

        return show


class _Bar(tqdm):  # type: ignore[misc]
    """A bar that shows as many fields of its words as there is room for, and no part of one: 12,3 is not 12,345."""

    @staticmethod
    def format_meter(*args: Any, ncols: int | None = None, prefix: str = "", bar_format: str = BAR, **rest: Any) -> str:
        if ncols:
            room = ncols - len(tqdm.format_meter(*args, bar_format=BEFORE_WORDS, **rest))
            fields = prefix.split("  ")
            while len(fields) > 1 and cell_len("  ".join(fields)) > room:
                fields.pop()
            prefix = "  ".join(fields)
        return tqdm.format_meter(*args, ncols=ncols, prefix=prefix, bar_format=bar_format, **rest)


def printable(text: str, stream: TextIO) -> str:
    """The text as it may be written to a stream: on a terminal, characters that it would act on are escaped.

    They are written as in JSON strings, so that JSON stays what it is. Each character stands for itself, so that text
    may come in chunks.
    """
    if stream.isatty():
        text = text.translate(_ESCAPES)
    return _NOT_UNICODE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _line(cells: Sequence[str], places: Sequence[tuple[int, bool]]) -> str:
    """A line of a table; a place is the width of a column and whether it is set to the right."""
    padded = []
    for cell, (width, numeric) in zip(cells, places, strict=True):
        space = " " * (width - cell_len(cell))
        padded.append(space + cell if numeric else cell + space)
    return "  ".join(padded).rstrip(" ")


def shorten(number: float) -> str:
    """1,234,567 as 1.2M: for people, not for scripts."""
    for size, least, suffix in ((1e9, 999.95e6, "G"), (1e6, 999.95e3, "M"), (1e3, 999.5, "k")):
        if number >= least:  # what would round up to 1,000 of the smaller unit
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """3725 as 1h 02m."""
    minutes, seconds = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
