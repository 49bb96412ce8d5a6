"""How commands find a run by path or name; plans without a run; runs that are finished."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.test_foreign_runs import set_state
from tests.shell import TINY, assert_error, copied, edit_config, run_ok, snapshot, story, tinylm
from tinylm.config.settings import parse_duration


@pytest.fixture
def shelved(run: Path, adapter: Path, here: Path) -> Path:
    """A model and an adapter under checkpoints/."""
    copied(run, here / "checkpoints/base")
    copied(adapter, here / "checkpoints/group/tune")
    (here / "text.txt").write_text(story(1500))
    return here


@pytest.mark.usefixtures("shelf_cache")
def test_a_run_is_found_by_the_name_that_runs_prints(shelved: Path) -> None:
    (shelved / "prompts.jsonl").write_text(json.dumps({"prompt": "the", "adapter": "group/tune"}))
    for line in (
        "sample -n 1 --model base",
        "sample -n 1 --adapter group/tune",
        "sample -n 1 --adapter group/tune=0.5 --model base",
        "sample -n 1 --prompt-file prompts.jsonl --model base",
        "eval text.txt --model base",
        "info base",
        "info group/tune",
        "train text.txt --init-from base --steps 1 --out new",
        "finetune-lora text.txt --model base --steps 1 --batch-size 4",
        "merge-lora group/tune --model base --out merged",
        "finetune-lora --resume group/tune --model base --steps 21",
        "train --resume base --steps 201",
    ):
        run_ok(*line.split())


def test_a_path_but_no_folder_of_texts_takes_precedence_over_a_run_name(shelved: Path, run: Path) -> None:
    (shelved / "base").mkdir()
    (shelved / "base" / "chapter.txt").write_text("the text that the run was trained on")
    assert run_ok("info", "base").stdout == run_ok("info", "checkpoints/base").stdout
    (shelved / "base").rename(shelved / "texts")
    copied(run, shelved / "base")
    edit_config(shelved / "base", model={"dropout": 0.25})
    result = run_ok("info", "base", "--all")
    assert "Using the path base; the run of that name under checkpoints/ is checkpoints/base." in result.stderr
    assert "0.25" in result.stdout
    assert "Using the path" not in run_ok("info", "checkpoints/base").stderr
    assert "Using the path" not in run_ok("info", shelved / "base").stderr


def test_a_misspelled_name_is_answered_with_similar_names(shelved: Path) -> None:
    for command in (("sample", "--model"), ("train", "--resume"), ("info",), ("sample", "--adapter")):
        assert_error(tinylm(*command, "bas"), 2, "There is no run at bas; perhaps you mean base.")
        assert_error(tinylm(*command, "checkpoints/bas"), 2, "perhaps you mean base.")
        assert_error(tinylm(*command, "group/tun"), 2, "perhaps you mean group/tune.")
        assert_error(tinylm(*command, "xyz"), 2, "There is no run at xyz. List the runs with: tinylm runs.")
    shelved.joinpath("checkpoints/base").rename(shelved / "run")  # a name cannot leave checkpoints/
    assert_error(tinylm("info", "../run"), 2, "There is no file or folder at ../run; check the path.")


# Dry runs

THERE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda there: None,
    "a run": lambda there: copied(there.parent / "checkpoints/base", there),
    "a folder": lambda there: (there.mkdir(), (there / "notes.txt").write_text("mine")),
    "a file": lambda there: there.write_text("mine"),
}
TUNING = ("--model", "base", "--steps", 1, "--batch-size", 4)


COMMANDS = ("train text.txt --steps 1", "train - --steps 1", "finetune-lora text.txt", "finetune-adapter text.txt")


@pytest.mark.parametrize("line", COMMANDS)
def test_a_dry_run_works_whatever_exists_at_out_and_writes_nothing(line: str, shelved: Path) -> None:
    command = (*line.split(), *(TUNING if "tune" in line else TINY))
    for number, (what, make) in enumerate(THERE.items()):
        make(there := shelved / f"there{number}")
        before = snapshot(shelved)
        times = {path: path.stat().st_mtime_ns for path in [shelved, *shelved.rglob("*")]}
        result = run_ok(*command, "--out", there.name, "--dry-run", stdin=story(1500))
        assert "model:" in result.stdout
        note = f"{there.name} already exists; set --force to replace it, or choose another --out."
        assert (note in result.stderr) == (what != "nothing")
        assert "already" not in run_ok(*command, "--out", there, "--dry-run", "--force", stdin=story(1500)).stderr
        assert snapshot(shelved) == before
        assert {path: path.stat().st_mtime_ns for path in [shelved, *shelved.rglob("*")]} == times
    for place in ("there3/run", "/proc/there"):  # below a file, and in a folder that cannot be written
        run_ok(*command, "--out", place, "--dry-run", stdin=story(1500))


# Finished runs


@pytest.mark.usefixtures("shelf_cache")
def test_resuming_a_finished_run_names_the_option_that_continues_it(run: Path, here: Path) -> None:
    for number, (options, reason, more) in enumerate(
        (
            ((), "the budget of 200 steps is used up", "--steps 400"),
            (("--steps", 150), "the budget of 150 steps is used up", "--steps 400"),
            (("--patience", 1, "--steps", 300), "the last 3 evaluations brought no improvement", "--patience 6"),
        )
    ):
        path = copied(run, here / str(number))
        set_state(path, evals_since_best=3 if "--patience" in options else 0)
        result = run_ok("train", "--resume", path, *options)
        assert f"Warning: {path} is finished: {reason}; {more} continues it." in result.stderr
        assert result.stdout == f"{path}\n"
    assert "is finished" not in run_ok("train", "--resume", path, *more.split(), "--eval-every", 200).stderr
    path = copied(run, here / "my run")
    for seconds, spelled in ((3.0, "3s"), (0.5, "0.5s"), (60.0, "1m"), (7200.0, "2h")):
        edit_config(path, training={"budget": {"steps": None, "epochs": None, "time": seconds}})
        set_state(path, seconds=seconds * 0.9999, last_eval_step=200)
        before = snapshot(path)
        result = tinylm("train", "--resume", "my run")
        assert_error(result, 2, "my run is finished", f"its --time of {spelled} is the total of all its sessions; --t")
        more = re.fullmatch(r".*; --time (\S+) continues it\.\n", result.stderr, re.DOTALL)
        assert parse_duration(more[1]) >= 2 * seconds
        assert snapshot(path) == before
    (here / "text.txt").write_text(story(1500))
    run_ok("train", "text.txt", "--epochs", 0.5, "--out", "half", *TINY)
    stderr = run_ok("train", "--resume", "half").stderr
    assert "steps, is used up; --epochs 1 continues it." in stderr
    assert "finished" not in run_ok("train", "--resume", "half", "--epochs", 1).stderr
