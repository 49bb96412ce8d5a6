"""The report during training: tinylm train --report FILE."""

import contextlib
import json
from pathlib import Path
from typing import Any, cast

import pytest

import tinylm
from tests.run_report.test_page import data_of
from tests.shell import TINY, run_ok, story
from tinylm.reporter import LogReporter
from tinylm.run_directory.loading import read_config
from tinylm.run_report.page import MAX_SHARE, LiveReport, write_page
from tinylm.training.events import Evaluated, Event, Started

STEPS: dict[str, Any] = {"steps": 6, "eval_every": 2, "log_every": 1}
SHAPE: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 4}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(story(3000))
    return tmp_path / "text.txt"


def reported(**settings: Any) -> list[Any]:
    """The content of each page that is written while a model is trained. An hour passes between two events."""
    pages: list[Any] = []
    clock = [0.0]

    def write(content: Any, path: Path) -> None:
        pages.append(content)
        write_page(content, path)

    report = LiveReport(Path("live.html"), LogReporter(), lambda: clock[0], write)

    def follow(event: Event) -> None:
        clock[0] += 3600
        report(event)

    with contextlib.closing(report):
        tinylm.train(callbacks=[follow], **settings)
    return pages


def test_the_report_follows_the_run_and_stops_reloading_at_its_end(text: Path) -> None:
    written = reported(files=text, out="run", **STEPS, **SHAPE)
    logged = [report["runs"][0]["curves"]["train"]["step"] for report in written]
    assert logged[0] == [1], "the page is there after the second step, before its log line"
    assert [steps[-1] for steps in logged] == sorted(steps[-1] for steps in logged)
    assert {steps[-1] for steps in logged} == set(range(1, 7))
    assert [report["refresh"] is None for report in written] == [False] * (len(written) - 1) + [True]
    page: Any = data_of(Path("live.html").read_text())
    assert page == json.loads(json.dumps(written[-1]))
    assert page["runs"][0]["step"] == 6
    assert page["models"] is False


def test_a_resumed_run_is_whole_and_a_replaced_one_is_not_in_the_report(text: Path) -> None:
    reported(files=text, out="run", **STEPS, **SHAPE)
    written = reported(resume="run", steps=8)
    assert written[-1]["runs"][0]["curves"]["train"]["step"] == list(range(1, 9))
    written = reported(files=text, out="run", force=True, steps=3, log_every=1, **SHAPE)
    assert max(max(report["runs"][0]["curves"]["train"]["step"], default=0) for report in written) == 3


def test_the_option_writes_the_report_and_a_failure_does_not_end_the_training(text: Path) -> None:
    command = ("train", text, "--steps", 6, "--log-every", 1, *TINY, "--force", "--out", "run", "--report")
    assert run_ok(*command, "live.html").stdout == "run\n"
    page: Any = data_of(Path("live.html").read_text())
    assert page["runs"][0]["curves"]["train"]["step"] == list(range(1, 7))
    name = "x" * 250 + ".html"  # the name of the temporary file is longer than file systems allow
    result = run_ok(*command, name)
    assert result.stderr.count(f"The report {name} was not written") == 1
    assert result.stdout == "run\n"


def test_writes_take_at_most_one_percent_of_the_time_with_the_last_one(run: Path, tmp_path: Path) -> None:
    clock = [0.0]

    def slow(content: Any, path: Path) -> None:
        clock[0] += 2.0

    report = LiveReport(tmp_path / "live.html", LogReporter(), lambda: clock[0], slow)
    report(Started(run, read_config(run), cast(Any, None), cast(Any, None), 5.0, None))
    for step in range(1, 2000):
        clock[0] += 1.0
        report(Evaluated(step, 1.0, True, clock[0]))
        assert step < 500 or report.seconds + 2.0 <= MAX_SHARE * clock[0] + 0.1
    assert report.seconds >= 9 * 2.0
