"""Output of the command line: results on stdout, everything else on stderr. The only importer of rich and tqdm."""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import typer
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.text import Text
from tqdm import tqdm

from tinylm.reporter import shorten_number


def long_flag(parameter: Any, value: Any = None) -> str:
    """The long flag of an option, such as --kv-heads. If `value` is False, the flag that turns the option off, such as
    --no-bias, if it has one. Of an argument, its name in the usage, such as CORPUS.
    """
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    spellings = parameter.secondary_opts if value is False and parameter.secondary_opts else parameter.opts
    return str(max(spellings, key=len))


def find_option(ctx: typer.Context, name: str) -> Any | None:
    """The option or argument of the running command with this Python name, or `None`."""
    return next((parameter for parameter in ctx.command.params if parameter.name == name), None)


FIELD_NAME_COLUMNS = 20
PLAIN_SECONDS = 5.0  # between two lines of progress without a terminal
BAR_START = "{percentage:3.0f}% {desc}"
BAR = BAR_START + " |{bar}| {elapsed}"
UNKNOWN_BAR = "{desc} {elapsed}"  # if the fraction done is unknown
MIN_BAR = 14  # columns of the bar and the elapsed time; with less room they are left out
# Characters that a terminal interprets: C0 without tab and newline, delete, C1, and bidirectional controls.
_CONTROLS = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
# Bytes decoded with surrogateescape (U+DC80 to U+DCFF) would be written unchanged, and may be C1 codes.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *range(0xDC80, 0xDD00))}
_COMMAND = re.compile(r"(?<=: )( *)((?:tinylm|torchrun|pip) .+?)(?=; to |\.?$)")  # up to the next one, or to the end
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")  # of a command
_KEPT, _CONTINUED = "\0", "\1"  # in `wrap`: a space that stays, and a command that goes on if the line ends here
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_UNICODE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # lone surrogates, as from "\\ud800" in a JSON file


class Console:
    """The output of one command. Implements `tinylm.reporter.Reporter`.

    quiet: print no notes and no progress; warnings and errors are always printed.
    as_json: whether the command prints its results as JSON, with `record`.
    rewrite: applied to each note and warning; replaces names of settings in backticks by flags.
    clock: the time in seconds, for progress
    """

    def __init__(
        self,
        quiet: bool = False,
        as_json: bool = False,
        rewrite: Callable[[str], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quiet = quiet
        self.as_json = as_json
        self._rewrite, self._clock = rewrite, clock
        self._stderr = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        self._bar: tqdm[Any] | None = None

    @property
    def on_terminal(self) -> bool:
        """Whether progress is shown as a moving bar: stderr is a terminal, and the console is not quiet."""
        return sys.stderr.isatty() and not self.quiet

    def with_flags(self, message: str) -> str:
        """The message with its settings in backticks as flags, as notes and warnings show them."""
        return self._rewrite(message)

    def note(self, message: str, indent: int = 2) -> None:
        """Print a message on stderr, unless quiet. indent: as in `line`."""
        if not self.quiet:
            self._print_message(self.with_flags(message), indent=indent)

    def warn(self, message: str) -> None:
        """Print a warning on stderr."""
        self._print_message(self.with_flags(message), "yellow", "Warning: ")

    def print_highlighted(self, title: str, parts: Sequence[tuple[str, bool]]) -> None:
        """Print a title and a text on stderr. Parts flagged True are green, or in [[ ]] if colours are not available.

        A terminal shows lines that are broken at spaces. Printed even if the console is quiet.
        """
        coloured = sys.stderr.isatty() and not self._stderr.no_color
        shown = [
            (f"[[{text}]]" if mark and not coloured else text, "green" if mark and coloured else "")
            for text, mark in ((printable(text, sys.stderr), mark) for text, mark in parts)
        ]
        with self._beside_bar():
            if sys.stderr.isatty():
                lines = Text.assemble((title, "bold"), "\n", *shown)
                self._stderr.print(lines, soft_wrap=False, width=terminal_columns(sys.stderr))
            else:  # rich would drop some control characters
                sys.stderr.write("".join([title, "\n", *(text for text, _ in shown), "\n"]))

    def error(self, message: str) -> None:
        """Print an error on stderr."""
        self._print_message(message, "red", "Error: ")

    def traceback(self) -> None:
        """Print the traceback of the exception that is being handled on stderr."""
        for line in traceback.format_exc().rstrip("\n").split("\n"):
            self._print_message(line, indent=None)

    def _print_message(self, message: str, style: str = "", prefix: str = "", indent: int | None = 2) -> None:
        """Print one line, which a terminal shows as several if it is long and `indent` is not `None`.

        Newlines are escaped, so that a name from an untrusted file cannot start a new line.
        """
        line = printable(message, sys.stderr).replace("\n", "\\n")
        if indent is not None and sys.stderr.isatty():
            line = wrap(line, terminal_columns(sys.stderr), indent, len(prefix))
        with self._beside_bar():
            if prefix:
                self._stderr.print(Text(prefix, f"bold {style}"), end="")
            sys.stderr.write(line + "\n")  # rich would drop some control characters

    @contextlib.contextmanager
    def _beside_bar(self) -> Iterator[None]:
        """Context manager for writing to stderr: a bar that is shown is removed, and drawn again below."""
        if self._bar is not None:
            self._bar.clear()
        yield
        sys.stderr.flush()
        if self._bar is not None:
            self._bar.refresh()

    def result(self, text: str, end: str = "\n") -> None:
        """Print text on stdout, escaped by `printable`.

        Raises OutputError when it cannot be written (see tinylm.commands.streams).
        """
        self._write(printable(text, sys.stdout) + end)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def line(self, text: str, indent: int = 2) -> None:
        """Print one line on stdout; a terminal shows a long one as several, broken at spaces.

        indent: of the lines after the first. Raises OutputError.
        """
        line = printable(text, sys.stdout).replace("\n", "\\n")
        if sys.stdout.isatty():
            line = wrap(line, terminal_columns(sys.stdout), indent)
        self._write(line + "\n")

    def record(self, values: dict[str, Any]) -> None:
        """Print one JSON object as a line on stdout. Raises OutputError.

        JSON is UTF-8, so a byte of a path that is not is written as the escape of a surrogate: \\udce9 for the byte E9.
        """
        self.result(_escape_surrogates(json.dumps(values, ensure_ascii=False)))

    def field(self, name: str, value: str) -> None:
        """Print a name and a value on stdout; on a terminal, a long value is wrapped and indented.

        Raises OutputError.
        """
        start = f"  {name:<{FIELD_NAME_COLUMNS}} "
        self.line(start + value, len(start))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table on stdout, with columns of numbers aligned to the right. If all `columns` are empty, it has no
        header.

        On a terminal that is too narrow, each row takes several lines: the first cell, then the other cells, each with
        the name of its column.

        Raises OutputError.
        """
        rows = [[printable(cell, sys.stdout) for cell in row] for row in rows]
        widths = []
        for index, column in enumerate(columns):
            cells = [row[index] for row in rows if row[index] not in ("", "-")]
            numeric = bool(cells) and all(cell[0].isdigit() for cell in cells)
            widths.append((max(map(cell_len, (column, *(row[index] for row in rows)))), numeric))
        if sys.stdout.isatty() and sum(width + 2 for width, _ in widths) - 2 > terminal_columns(sys.stdout):
            self._write("".join(_stacked(row, columns, terminal_columns(sys.stdout)) for row in rows))
            return
        if any(columns):
            bold = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)
            bold.print(Text(_line(columns, widths), "bold"))
        self._write("".join(_line(row, widths) + "\n" for row in rows))

    @contextlib.contextmanager
    def counting(self, what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        """Context manager for the progress of work that is counted, for example in bytes.

        what: name of the work. total: number of units, if known. unit: name of the unit.

        Yields a function that takes the number of units done since its last call.
        """
        with self.progress() as show:
            done = 0
            start = self._clock()

            def advance(count: int) -> None:
                nonlocal done
                done += count
                rate = done / max(self._clock() - start, 1e-9)
                speed = "" if unit == "seconds" else f", {shorten_number(rate)}/s"
                show(None if total is None else done / max(total, 1), f"{what}: {shorten_number(done)} {unit}{speed}")

            yield advance

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[float | None, str], None]]:
        """Context manager that yields a function, which takes the fraction done and a description.

        The fraction is from 0 to 1, or `None` if it is unknown.

        A terminal shows a bar, other streams at most one line per PLAIN_SECONDS, both with the expected time left. A
        quiet console shows nothing. Fields of the description are separated by two spaces, the most important first: a
        narrow terminal shows only those that fit.
        """
        if self.quiet:
            yield lambda fraction, description: None
            return
        time_left = _TimeLeft(self._clock)
        if not self.on_terminal:
            last = self._clock()

            def write(fraction: float | None, description: str) -> None:
                nonlocal last
                seconds = None if fraction is None else time_left(fraction)
                if self._clock() - last >= PLAIN_SECONDS:
                    last = self._clock()
                    done = "" if fraction is None else f"{fraction:4.0%}  "
                    left = "" if seconds is None else f"{tqdm.format_interval(seconds)} left  "
                    self.note(f"{done}{left}{description}")

            yield write
            return
        with _Bar(total=1.0, bar_format=BAR, file=sys.stderr, dynamic_ncols=True, leave=False, mininterval=0.2) as bar:
            self._bar = bar

            def show(fraction: float | None, description: str) -> None:
                if fraction is None:
                    bar.bar_format = UNKNOWN_BAR
                    bar.set_description_str(printable(description, sys.stderr))
                    return
                seconds = time_left(fraction)
                clock = "" if seconds is None else f"-{tqdm.format_interval(seconds)} "  # as in -01:23
                bar.set_description_str(clock + printable(description, sys.stderr), refresh=False)
                bar.update(min(fraction, 1.0) - bar.n)

            try:
                yield show
            finally:
                self._bar = None


class _TimeLeft:
    """Estimates the time until a fraction is 1 from its mean rate since the first call.

    The fraction of a resumed run starts above 0.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: tuple[float, float] | None = None

    def __call__(self, fraction: float) -> float | None:
        """Seconds left; `None` before the fraction has grown."""
        now = self._clock()
        if self._first is None:
            self._first = (now, fraction)
        start, done = self._first
        return (now - start) * max(1 - fraction, 0.0) / (fraction - done) if fraction > done else None


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no annotations
    """A bar that drops the last fields of a description that does not fit, instead of truncating it."""

    @staticmethod
    def format_meter(*args: Any, ncols: int | None = None, prefix: str = "", bar_format: str = BAR, **rest: Any) -> str:
        if ncols:
            start = "{desc}" if bar_format == UNKNOWN_BAR else BAR_START
            room = ncols - len(tqdm.format_meter(*args, bar_format=start, **rest))  # without a description
            fields = prefix.split("  ")
            while len(fields) > 1 and cell_len("  ".join(fields)) > room:
                fields.pop()
            prefix = "  ".join(fields)
            if room - cell_len(prefix) < MIN_BAR:
                bar_format = start
        return tqdm.format_meter(*args, ncols=ncols, prefix=prefix, bar_format=bar_format, **rest)


def printable(text: str, stream: TextIO) -> str:
    """Escape lone surrogates in a text that is written to `stream`, and control characters if it is a terminal.

    The surrogates U+DC80 to U+DCFF, which stand for undecodable bytes (surrogateescape), are escaped on a terminal
    only. The escapes are those of JSON strings, which keeps JSON valid. Each character is escaped independently, so
    that text can be written in chunks.
    """
    if stream.isatty():
        text = text.translate(_ESCAPES)
    return _escape_surrogates(text, _NOT_UNICODE)


def terminal_columns(stream: TextIO) -> int:
    """$COLUMNS if it is set, otherwise the width of the terminal that `stream` writes to, or 80."""
    chosen = os.environ.get("COLUMNS", "")
    if chosen.isdecimal() and int(chosen):
        return int(chosen)
    with contextlib.suppress(ValueError, OSError):  # not a terminal
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def wrap(text: str, columns: int, indent: int = 2, start: int = 0) -> str:
    """Break a printable line at spaces, so that each line has at most `columns` terminal columns.

    A word that is longer is left to the terminal. A command at the end of a message stays on one line or goes on after
    a backslash, so that it can be copied.

    indent: columns before each line but the first; 4 or 2 where a word does not fit. start: columns before the text.
    """

    def keep(match: re.Match[str]) -> str:
        words = [word.replace(" ", _KEPT) for word in _WORD.findall(match[2])]
        return match[1] + (_KEPT if cell_len(match[2]) <= columns - 2 else f"{_CONTINUED} ").join(words)

    words = re.findall("( *)([^ ]+)", _COMMAND.sub(keep, text))
    sizes = [cell_len(word.replace(_KEPT, " ").replace(_CONTINUED, " \\")) for _, word in words]
    indent = next((wide for wide in (indent, 4) if wide + max(sizes, default=0) <= columns), 2)
    lines, column = [""], start
    for (space, word), size in zip(words, sizes, strict=True):
        if column + len(space) > indent and column + len(space) + size > columns:
            lines.append(" " * indent)
            space, column = "", indent
        lines[-1] += space + word
        column += len(space) + size - 2 * word.endswith(_CONTINUED)
        column = (column - 1) % columns + 1  # of a longer word, the terminal breaks the line
    wrapped = "\n".join(lines).replace(f"{_CONTINUED}\n", " \\\n")
    return wrapped.replace(_CONTINUED, "").replace(_KEPT, " ")


def _escape_surrogates(text: str, which: re.Pattern[str] = _SURROGATE) -> str:
    return which.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _line(cells: Sequence[str], columns: Sequence[tuple[int, bool]]) -> str:
    """A line of a table. `columns`: the width of each column, and whether it is aligned to the right."""
    padded = []
    for cell, (width, numeric) in zip(cells, columns, strict=True):
        space = " " * (width - cell_len(cell))
        padded.append(space + cell if numeric else cell + space)
    return "  ".join(padded).rstrip(" ")


def _stacked(cells: Sequence[str], columns: Sequence[str], width: int) -> str:
    """A row of a table as lines: the first cell, then the other cells, wrapped at `width` terminal columns."""
    if not any(columns):
        return wrap("  ".join(cells), width, 4) + "\n"
    pairs = [f"{column} {cell}" for column, cell in zip(columns[1:], cells[1:], strict=True)]
    pairs = [pair.replace(" ", _KEPT) if cell_len(pair) <= width - 2 else pair for pair in pairs]
    return f"{wrap(cells[0], width)}\n{wrap('  ' + '  '.join(pairs), width)}\n"
