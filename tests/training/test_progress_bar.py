"""What a program that trains shows in a terminal. Reference: the plan and the result of the command."""

import io
import logging
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

import tinylm
from tests.shell import run_ok, story
from tinylm.training.events import Stepped
from tinylm.training.progress_bar import watched_stream

SMALL: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 4, "steps": 6}
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", value)]


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder with a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(story(3000))
    monkeypatch.setenv("COLUMNS", "150")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Function that makes standard error a terminal, and takes the handlers of pytest from the logger; called in the
    test, since pytest sets both after fixtures.
    """

    def begin() -> Terminal:
        monkeypatch.setattr(logging.getLogger("tinylm"), "propagate", False)
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        return terminal

    return begin


Watch = Callable[[], Terminal]


def lines_of(terminal: Terminal) -> list[str]:
    return [line.strip() for line in re.split(r"[\r\n]+", terminal.getvalue()) if line.strip()]


def test_a_terminal_shows_the_plan_of_the_command_a_bar_and_the_end(watch: Watch) -> None:
    terminal = watch()
    result = tinylm.train("text", "run", eval_every=3, **SMALL)
    shown = lines_of(terminal)
    planned = run_ok("train", "text", *FLAGS, "--eval-every", 3, "--dry-run").stdout.splitlines()
    assert planned[1].startswith("text:") and set(planned[:-2]) <= set(shown)  # the last ones are time and memory
    assert shown[0].startswith("On cpu")
    assert any(re.match(r"100%\|.*\| .*loss \d", line) for line in shown)
    bits = f"{result.best_val_bits_per_byte:.4f} bits per byte"
    assert shown[-1].startswith(f"Stopped at step 6: all steps are done. Best validation loss: {bits}")
    assert shown[-1].endswith("Saved in run.")


def test_nothing_is_shown_without_progress_or_without_somebody_who_watches(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = watch()
    tinylm.train("text", "run", progress=False, **SMALL)
    assert "%" not in terminal.getvalue() and "text:" not in terminal.getvalue()
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert watched_stream() is None
    tinylm.train("text", "other", **SMALL)
    assert stream.getvalue() == ""


def test_a_line_that_a_callback_writes_by_tqdm_stands_above_the_bar(watch: Watch) -> None:
    terminal = watch()
    tinylm.train("text", "run", callbacks=lambda event: tqdm.write("a line", file=sys.stderr), **SMALL)
    before = [text[-1:] for text in terminal.getvalue().split("a line\n")[:-1]]
    assert len(before) > 6 and set(before) <= {"", "\r", "\n"}


class FailingTerminal(io.StringIO):
    """A terminal that is closed after some writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self._left = writes

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(5, "Input/output error")
        return super().write(text)


class Tee:
    """What some programs put in place of standard error."""

    def write(self, text: str) -> int:
        return len(text)


def test_training_goes_on_without_its_terminal(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch()  # outside of a notebook
    closed, no_stream = FailingTerminal(9), io.StringIO()
    closed.close()
    no_stream.close()
    for number, stream in enumerate(
        (FailingTerminal(0), FailingTerminal(5), FailingTerminal(40), Tee(), closed, no_stream, None)
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        assert tinylm.train("text", str(number), **SMALL).step == 6


def test_notes_go_to_the_handlers_of_the_program_where_it_has_any(watch: Watch) -> None:
    terminal = watch()
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = logging.getLogger("tinylm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    before = list(logging.getLogger().handlers)
    try:
        tinylm.train("text", "run", **SMALL)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert "On cpu" in text.getvalue()
    assert "On cpu" not in terminal.getvalue() and "text:" in terminal.getvalue()
    assert logging.getLogger().handlers == before


def test_an_interrupted_run_says_how_to_continue_and_a_failed_one_leaves_no_bar_behind(watch: Watch) -> None:
    terminal = watch()

    def interrupt(event: object) -> None:
        if isinstance(event, Stepped) and event.step == 3:
            signal.raise_signal(signal.SIGINT)

    tinylm.train("text", "run", callbacks=[interrupt], **SMALL)
    assert (
        lines_of(terminal)[-1] == "Stopped at step 3: a signal stopped it. The run is saved; resume='run' continues it."
    )

    def fail(event: object) -> None:
        if isinstance(event, Stepped):
            raise ValueError("of the callback")

    with pytest.raises(ValueError, match="of the callback"):
        tinylm.train("text", "other", callbacks=[fail], **SMALL)
    terminal.truncate(0)
    assert tinylm.train(resume="run").step == 6
    assert "100%" in terminal.getvalue()
