"""The report during training: tinylm train --report FILE."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_page import data_of
from tests.shell import TINY, assert_error, run_ok, story, tinylm
from tinylm.report import page as live
from tinylm.reporter import LogReporter
from tinylm.training.events import Evaluated

STEPS = ("--steps", 6, "--eval-every", 2, "--log-every", 1)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(story(3000))
    return tmp_path / "text.txt"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The content of each page that is written; the interval between two is 0."""
    pages: list[Any] = []
    write_page = live.write_page
    monkeypatch.setattr(live, "write_page", lambda report, path: (pages.append(report), write_page(report, path)))
    monkeypatch.setattr(live, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(live, "MAX_SHARE", 1e9)
    return pages


def test_the_report_follows_the_run_and_stops_reloading_at_its_end(text: Path, written: list[Any]) -> None:
    run_ok("train", text, "--out", "run", "--report", "live.html", *STEPS, *TINY)
    logged = [report["runs"][0]["curves"]["train"]["step"] for report in written]
    assert logged[0] == [1], "the page is there after the second step, before its log line"
    assert [steps[-1] for steps in logged] == sorted(steps[-1] for steps in logged)
    assert {steps[-1] for steps in logged} == set(range(1, 7))
    assert [report["refresh"] is None for report in written] == [False] * (len(written) - 1) + [True]
    page: Any = data_of(Path("live.html").read_text())
    assert page == json.loads(json.dumps(written[-1]))
    assert page["runs"][0]["step"] == 6
    assert page["models"] is False


def test_a_resumed_run_is_whole_and_a_replaced_one_is_not_in_the_report(text: Path, written: list[Any]) -> None:
    run_ok("train", text, "--out", "run", *STEPS, *TINY)
    run_ok("train", "--resume", "run", "--steps", 8, "--report", "live.html")
    assert written[-1]["runs"][0]["curves"]["train"]["step"] == list(range(1, 9))
    written.clear()
    run_ok("train", text, "--out", "run", "--force", "--report", "live.html", "--steps", 3, "--log-every", 1, *TINY)
    assert max(max(report["runs"][0]["curves"]["train"]["step"], default=0) for report in written) == 3


def test_a_report_that_cannot_be_written_does_not_end_the_training(
    text: Path, written: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(report: Any, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(live, "write_page", full)
    result = run_ok("train", text, "--out", "run", "--report", "live.html", *STEPS, *TINY)
    assert result.stderr.count("The report live.html was not written") == 1
    assert result.stdout == "run\n"


def test_writes_take_at_most_one_percent_of_the_time_with_the_last_one(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(live, "collect_run", lambda run: {})

    def slow(report: Any, path: Path) -> None:
        clock[0] += 2.0

    monkeypatch.setattr(live, "write_page", slow)
    report = live.LiveReport(text.with_name("live.html"), LogReporter())
    report._run = text
    for step in range(1, 2000):
        clock[0] += 1.0
        report(Evaluated(step, 1.0, True, clock[0]))
        assert step < 500 or report.seconds + 2.0 <= live.MAX_SHARE * clock[0] + 0.1
    assert report.seconds >= 9 * 2.0


def test_a_report_in_a_folder_that_does_not_exist_is_an_error_before_training(text: Path) -> None:
    arguments = ("train", text, "--out", "run", *STEPS, *TINY)
    assert_error(tinylm(*arguments, "--report", "nowhere/live.html"), 2, "--report", "existing folder")
    assert_error(tinylm(*arguments, "--report", "."), 2, "--report")
    assert not Path("run").exists()
