"""What a person or a script sees: results on stdout, everything else on stderr. The only importer of rich and tqdm."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

PLAIN_SECONDS = 5.0  # between two lines of progress where there is no terminal
LONGEST_LINE = 10_000  # of a table, which is never cut to the terminal's width
BAR = "{percentage:3.0f}% |{bar}| {desc} [{elapsed}<{remaining}]"


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

    def _say(self, message: str, style: str, prefix: str = "") -> None:
        if self._bar is not None:
            self._bar.clear()
        self._stderr.print(Text.assemble((prefix, f"bold {style}"), message) if prefix else Text(message))
        if self._bar is not None:
            self._bar.refresh()

    def result(self, text: str, end: str = "\n") -> None:
        """Text on stdout, exactly as it is."""
        sys.stdout.write(text + end)
        sys.stdout.flush()

    def record(self, values: dict[str, Any]) -> None:
        """One JSON object on a line of stdout."""
        self.result(json.dumps(values, ensure_ascii=False))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table on stdout; numbers, which begin with a digit, are set to the right."""
        table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
        for index, column in enumerate(columns):
            cells = [row[index] for row in rows if row[index] not in ("", "-")]
            numeric = bool(cells) and all(cell[0].isdigit() for cell in cells)
            table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        console = RichConsole(file=sys.stdout, highlight=False, width=LONGEST_LINE)
        with console.capture() as captured:
            console.print(table)
        self.result(captured.get(), end="")

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
        """Progress from 0 to 1 with a few words: a bar on a terminal, elsewhere a plain line every few seconds."""
        if self.quiet:
            yield lambda fraction, words: None
            return
        if not self.on_terminal:
            yield self._plain_progress()
            return
        with tqdm(total=1.0, bar_format=BAR, file=sys.stderr, dynamic_ncols=True, leave=False, mininterval=0.2) as bar:
            self._bar = bar

            def show(fraction: float, words: str) -> None:
                bar.set_description_str(words, refresh=False)
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
