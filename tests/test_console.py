import io
import json
import sys
import time

import pytest

from tinylm.console import PLAIN_SECONDS, Console, duration, shorten


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock whose hand is moved by changing its one number."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_results_go_to_stdout_as_they_are_and_notes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.result("[bold]a\tb[/bold]\r\n", end="")
    console.note("[red]" + "word " * 50 + "/path/1")
    captured = capsys.readouterr()
    assert captured.out == "[bold]a\tb[/bold]\r\n"
    assert captured.err == "[red]" + "word " * 50 + "/path/1\n"


def test_warnings_and_errors_are_said_even_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=True)
    console.note("a note")
    console.warn("look out")
    console.error("it broke")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Warning: look out\nError: it broke\n"


def test_a_record_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    Console().record({"text": "é\n", "n": 1})
    out = capsys.readouterr().out
    assert out == '{"text": "é\\n", "n": 1}\n'
    assert json.loads(out) == {"text": "é\n", "n": 1}


def test_progress_off_a_terminal_is_a_plain_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with Console().progress() as show:
        for second in range(int(3 * PLAIN_SECONDS)):
            clock[0] = 1000.0 + second + 1
            show(second / 20, f"step {second}")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == " 20%  step 4\n 45%  step 9\n 70%  step 14\n"
    assert "\r" not in captured.err and "\x1b" not in captured.err


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_no_variable_makes_a_bar_where_there_is_no_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    console = Console()
    assert not console.on_terminal
    with console.progress() as show:
        show(0.5, "half")
    assert "\r" not in capsys.readouterr().err


def test_progress_on_a_terminal_is_a_bar_that_moves_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    console = Console()
    assert console.on_terminal
    with console.progress() as show:
        show(0.5, "half")
        time.sleep(0.25)
        show(0.75, "more")
        console.note("said meanwhile")
    shown = sys.stderr.getvalue()
    assert "\r" in shown and " 75%" in shown and "more" in shown
    assert "said meanwhile\n" in shown
    assert "\x1b" not in shown
    assert shown.rstrip(" ").endswith("\r")


def test_quiet_shows_no_progress_anywhere(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with Console(quiet=True).progress() as show:
        clock[0] += 100
        show(0.5, "half")
    assert capsys.readouterr().err == ""


def test_counting_says_how_much_is_done_and_how_fast(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with Console().counting("reading", 40_000, "characters") as advance:
        clock[0] += 10
        advance(10_000)
        clock[0] += 10
        advance(10_000)
    assert (
        capsys.readouterr().err == " 25%  reading: 10.0k characters, 1.0k/s\n 50%  reading: 20.0k characters, 1.0k/s\n"
    )


def test_counting_to_an_unknown_number_works(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with Console().counting("reading", None, "characters") as advance:
        clock[0] += 10
        advance(50)
    assert "reading: 50 characters" in capsys.readouterr().err


def test_a_table_sets_numbers_to_the_right_and_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table(("name", "loss", "age"), [("a" * 200, "10.25", "-"), ("[b]", "9.5", "3s")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "name" + " " * 198 + " loss  age",
        "a" * 200 + "  10.25    -",
        "[b]" + " " * 197 + "    9.5   3s",
    ]


def test_a_table_without_titles_has_no_empty_line_on_top(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table(("", ""), [("loss", "1.5")])
    assert capsys.readouterr().out == "loss  1.5\n"


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0k"),
        (1_234_567, "1.2M"),
        (2e9, "2.0G"),
        (999_999, "1.0M"),
        (999_999_999, "1.0G"),
    ],
)
def test_numbers_are_shortened(number: float, text: str) -> None:
    assert shorten(number) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.9, "1m 00s"),
        (60, "1m 00s"),
        (3599.9, "1h 00m"),
        (3725, "1h 02m"),
        (90_000, "25h 00m"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
