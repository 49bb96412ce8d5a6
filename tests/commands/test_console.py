"""The console: results on stdout, messages and progress on stderr, with control characters escaped on a terminal."""

import contextlib
import io
import itertools
import json
import os
import re
import select
import time
from collections.abc import Callable, Iterator

import pytest

from tinylm.commands.console import PLAIN_SECONDS, Console, wrap
from tinylm.reporter import shorten_number

posix = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX terminal")

END = b"\0end of what was written\0"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def terminal(columns: int = 80) -> Iterator[Callable[[], str]]:
    """Connect both streams to a terminal; yields a function that returns its output since the last call."""
    import fcntl
    import struct
    import termios
    import tty

    ours, theirs = os.openpty()
    tty.setraw(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def shown() -> str:
        os.write(theirs, END)
        text = b""
        while not text.endswith(END) and select.select([ours], [], [], 60)[0]:
            text += os.read(ours, 1 << 16)
        return text.removesuffix(END).decode()

    stream = os.fdopen(theirs, "w", encoding="utf-8", errors="surrogateescape")
    with stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield shown
    os.close(ours)


@pytest.fixture(autouse=True)
def columns_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_message_is_one_line_on_stderr_and_a_result_is_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    words = " word" * 50
    text, line = f"[red]a\nError: b\nc{words}", f"[red]a\\nError: b\\nc{words}"
    for quiet in (False, True):
        console = Console(quiet=quiet)
        for show in (console.note, console.warn, console.error):
            show(text)
        console.result("[bold]a\tb[/bold]\r\n", end="")
        captured = capsys.readouterr()
        shown = [line, f"Warning: {line}", f"Error: {line}"][quiet:]
        assert (captured.out, captured.err.splitlines()) == ("[bold]a\tb[/bold]\r\n", shown)


@posix
def test_a_long_value_goes_on_below_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Elsewhere, a field is one line."""
    words = [f"word{n}" for n in range(20)]
    for columns in (40, 80):
        with terminal(columns) as shown:
            Console().field("context", ", ".join(words))
            Console().field("norm", "")
            *lines, norm = shown().splitlines()
        assert norm.rstrip() == "  norm"
        assert len(lines) > 1 and max(map(len, lines)) <= columns
        assert lines[0].startswith("  context              word0, ")
        assert all(line.startswith(" " * 23 + "word") for line in lines[1:])
        assert re.findall(r"word\d+", " ".join(lines)) == words
    Console().field("norm", "x" * 300)
    Console().field("base", "a\n  rank                 9")
    shown_in_a_pipe = f"  norm                 {'x' * 300}\n  base                 a\\n  rank                 9\n"
    assert capsys.readouterr().out == shown_in_a_pipe


SENTENCES = (
    "Stopped at step 38; the run is saved. Its weights are those of step 0, the best that were evaluated until then.",
    "text:      391,074 tokens to train on, 43,679 to validate with (each time 20,000 of them); 12 labels",
    "Cannot read a/path/that-has/no-blank/and/more-columns-than-most/terminals-have/at-all.txt: No such file.",
)


@posix
def test_a_terminal_breaks_messages_and_lines_at_spaces_with_an_indent() -> None:
    for sentence, columns in itertools.product(SENTENCES, (200, 80, 40)):
        with terminal(columns) as shown:
            for say, prefix in (("line", ""), ("note", ""), ("warn", "Warning: "), ("error", "Error: ")):
                getattr(Console(), say)(sentence)
                lines = re.sub(r"\x1b\[[0-9;]*m", "", shown()).splitlines()
                assert " ".join(line.strip() for line in lines) == prefix + sentence
                assert all(re.match(r"  \S", line) for line in lines[1:])
                assert all(len(line) <= columns or " " not in line.strip() for line in lines)
                assert len(lines) == 1 or columns < len(prefix + sentence)


def test_a_wrapped_line_is_indented_by_its_label_unless_a_word_needs_the_columns() -> None:
    assert wrap("text:  one two three", 12, 7) == "text:  one\n       two\n       three"
    assert wrap("text:  one seventeen", 12, 7) == "text:  one\n  seventeen"
    assert wrap("text:      eleven-long", 20, 11) == "text:\n    eleven-long"
    assert wrap("name  日本 日本 日本", 12, 6) == "name  日本\n      日本\n      日本"  # of two columns each
    assert wrap("/" + "x" * 29 + " a b c d", 12) == "/" + "x" * 29 + " a b c\n  d"  # the terminal breaks the long word
    assert wrap("", 12) == "" and wrap("  a", 12) == "  a"


def test_a_command_in_a_wrapped_message_can_be_copied() -> None:
    """It stays on one line, or goes on after a backslash."""
    commands = ("tinylm train 'my text.txt' --out checkpoints/my-text-2", "tinylm train --resume checkpoints/my-text")
    message = f"It exists. To keep both: {commands[0]}; to continue it: {commands[1]}."
    for columns in range(24, 200):
        text = wrap(message, columns)
        lines = re.sub(r" \\\n *", " ", text).splitlines()  # as a shell joins them
        assert all(any(command in line for line in lines) for command in commands), text
        assert columns < 64 or "\\" not in text


@posix
def test_highlights_are_coloured_or_bracketed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marked = (("user\nHi ", False), ("[b]Hello\x07<|im_end|>", True), ("\n", False))
    Console(quiet=True).print_highlighted("Example 1:", marked)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "Example 1:\nuser\nHi [[[b]Hello\x07<|im_end|>]]\n\n")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with terminal() as shown:
        Console().print_highlighted("Example 1:", marked)
        text = shown()
    assert "\x1b[32m[b]Hello\\u0007<|im_end|>\x1b[0m" in text
    assert "user\nHi " in text.replace("\r", "") and "[[" not in text


# Characters that a terminal interprets, written out here instead of computed as in the console.
HOSTILE = "\x00\x07\x08\x0b\x0c\r\x1b]0;title\x07\x1b[2J\x7f\x80\x9b31m\x9f\u202e\u202a\u2066\u2069\udc9b"
ESCAPED = (
    r"\u0000\u0007\u0008\u000b\u000c\u000d\u001b]0;title\u0007\u001b[2J\u007f\u0080\u009b31m\u009f"
    r"\u202e\u202a\u2066\u2069\udc9b"
)
HARMLESS = "tab\tnewline\né 日本 👍🏽 עברית \u200d\u200f [bold]x[/bold] \\u001b :smile:"


@posix
def test_on_a_terminal_only_control_characters_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")  # no colours
    monkeypatch.setenv("COLUMNS", "200")  # the table fits
    with terminal() as shown:
        console = Console()
        for say in (console.result, console.note, console.warn, console.error):
            say(HARMLESS + HOSTILE)
        text = HARMLESS + ESCAPED + "\n"
        line = HARMLESS.replace("\n", r"\n") + ESCAPED + "\n"  # a message is one line
        assert shown() == f"{text}{line}Warning: {line}Error: {line}"
        console.table(("name", "n"), [(HOSTILE, "1")])
        assert shown().splitlines()[1] == ESCAPED + "  1"
        console.record({"text": HARMLESS + HOSTILE})
        record = shown().removesuffix("\n")
    assert json.loads(record) == {"text": HARMLESS + HOSTILE}
    assert not {character for character in HOSTILE if not character.isprintable()} & {*record}


@posix
def test_a_traceback_progress_and_text_in_chunks_on_a_terminal_are_escaped() -> None:
    with terminal() as shown:
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            Console().traceback()
        text = shown()
        assert text.startswith("Traceback (most recent call last):\n") and text.endswith(f"ValueError: {ESCAPED}\n")
        with Console().progress() as show:
            show(0.5, "half")
            time.sleep(0.25)
            show(0.75, "\x1b[2J\x07")
            text = shown()
        assert r"\u001b[2J\u0007" in text
        assert "\x1b[2J" not in text and "\x07" not in text
        shown()
        for character in HARMLESS + HOSTILE:
            Console().result(character, end="")
        assert shown() == HARMLESS + ESCAPED


def test_all_characters_are_written_into_a_pipe_unchanged() -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape", newline="") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        console = Console()
        console.result(HARMLESS + HOSTILE)
        console.table(("name", "n"), [(HOSTILE, "1")])
        console.record({"run": os.fsdecode(b"caf\xe9 \xc3\xa9")})  # a path that is not UTF-8 is escaped in JSON only
        console.error(HARMLESS + HOSTILE)
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode(errors="surrogateescape") for stream in streams)
    assert out.startswith(HARMLESS + HOSTILE + "\nname")
    assert out.endswith(f'\n{HOSTILE}  1\n{{"run": "caf\\udce9 é"}}\n')
    assert err == f"Error: {HARMLESS}{HOSTILE}".replace("\n", r"\n") + "\n"


def test_a_record_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A lone surrogate of a JSON file is escaped: it has no UTF-8 encoding, so printing it would raise an error."""
    Console().record({"text": "é\n", "n": 1})
    text = json.loads('"\\ud83d and \\udfff"')
    Console().result(text)
    Console().record({"text": text})
    record, plain, escaped = capsys.readouterr().out.splitlines()
    assert record == '{"text": "é\\n", "n": 1}'
    assert plain == r"\ud83d and \udfff"
    assert json.loads(escaped) == {"text": text}


def test_progress_elsewhere_is_a_plain_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No environment variable changes it. The time left of a resumed run counts from its first fraction, here a half
    at 1/64 per second (regression: the half before was taken for progress of this process).
    """
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    now = [0.0]
    console = Console(clock=lambda: now[0])
    assert not console.on_terminal
    with console.progress() as show:
        for second in range(int(3 * PLAIN_SECONDS)):
            now[0] = second + 1.0
            show(second / 20, f"step {second}")
    with console.progress() as show:
        for second in range(11):
            now[0] = 15.0 + second
            show(0.5 + second / 64, "resumed")
    captured = capsys.readouterr()
    lines = [" 20%  00:16 left  step 4", " 45%  00:11 left  step 9", " 70%  00:06 left  step 14"]
    lines += [" 58%  00:27 left  resumed", " 66%  00:22 left  resumed"]
    assert (captured.out, captured.err) == ("", "".join(f"{line}\n" for line in lines))


def test_progress_on_a_terminal_is_a_moving_bar_that_is_removed() -> None:
    with contextlib.redirect_stderr(Terminal()) as stderr:
        console = Console()
        assert console.on_terminal
        with console.progress() as show:
            show(0.5, "half")
            time.sleep(0.25)
            show(0.75, "more")
            console.note("said meanwhile")
    shown = stderr.getvalue()
    assert "\r" in shown and " 75%" in shown and "more" in shown
    assert "said meanwhile\n" in shown
    assert "\x1b" not in shown
    assert shown.rstrip(" ").endswith("\r")


@posix
def test_a_narrow_terminal_shows_the_first_fields_of_progress_in_full() -> None:
    fields = "loss 1.234  val 1.607 @300  step 450  12,345 tok/s"
    for columns, first in (
        (80, f"{fields} |"),
        (60, "loss 1.234  val 1.607 @300  step 450"),
        (40, "loss 1.234  val 1.607 @300"),
        (38, "loss 1.234 |"),
        (20, "loss"),
    ):
        with terminal(columns) as shown, Console().progress() as show:
            show(0.0, "")
            time.sleep(0.25)
            show(0.75, fields)
            line = next(line for line in shown().split("\r") if "75%" in line)
        assert line.startswith(f" 75% -00:00 {first}") and len(line) <= columns
        assert "tok/s" in first or not re.search(r"@\d\d?\b|12|step \d\d?\b", line.replace("1.234", ""))
    for columns, clock in ((60, " 00:00"), (40, "")):
        with terminal(columns) as shown, Console().counting("training the tokenizer", None, "seconds") as advance:
            advance(7)
            lines = [line.rstrip() for line in shown().split("\r")]
        assert lines[-1] == f"training the tokenizer: 7 seconds{clock}"  # no percentage without a total


def test_counting_shows_units_done_and_units_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    for quiet, total, unit, counts in (
        (False, 40_000, "characters", (10_000, 10_000)),
        (False, None, "characters", (50,)),
        (False, None, "seconds", (10,)),
        (True, 40_000, "characters", (10_000,)),
    ):
        with Console(quiet, clock=lambda: now[0]).counting("reading", total, unit) as advance:
            for count in counts:
                now[0] += 10
                advance(count)
    assert capsys.readouterr().err.splitlines() == [
        " 25%  reading: 10.0k characters, 1.0k/s",
        " 50%  00:20 left  reading: 20.0k characters, 1.0k/s",
        "reading: 50 characters, 5/s",
        "reading: 10 seconds",
    ]


def test_a_table_aligns_numbers_and_truncates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table(("name", "loss", "age"), [("a" * 200, "10.25", "-"), ("[b]", "9.5", "3s")])
    Console().table(("", ""), [("loss", "1.5")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "name" + " " * 198 + " loss  age",
        "a" * 200 + "  10.25    -",
        "[b]" + " " * 197 + "    9.5   3s",
        "loss  1.5",
    ]
    texts = {0: "0", 999: "999", 1000: "1.0k", 1_234_567: "1.2M", 2e9: "2.0G", 999_999: "1.0M", 999_999_999: "1.0G"}
    assert {number: shorten_number(number) for number in texts} == texts


@posix
def test_a_table_too_wide_for_the_terminal_names_its_cells_on_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    titles = ("name", "kind", "parameters", "validation loss", "age")
    rows = [("corpus", "model", "748.4k", "0.9137", "5m 03s"), ("b\x1b[2J", "-", "1.2M", "-", "3s")]
    for columns in (200, 80, 40):
        with terminal(columns) as shown:
            Console().table(titles, rows)
            lines = shown().splitlines()
        assert max(map(len, lines)) <= columns
        assert not any("\x1b" in line for line in lines)
        assert columns == 40 or len(lines) == 3
    first = lines.index("corpus")
    text = " ".join(line.strip() for line in lines[first + 1 : lines.index(r"b\u001b[2J")])
    assert re.sub(" +", " ", text) == "kind model parameters 748.4k validation loss 0.9137 age 5m 03s"
    with terminal(30) as shown:
        Console().table(("", ""), [("bits per byte, overlapping windows", "1.4973"), ("loss", "1.5")])
        assert shown() == "bits per byte, overlapping\n    windows  1.4973\nloss  1.5\n"
