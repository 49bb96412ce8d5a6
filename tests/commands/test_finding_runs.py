"""How commands find a run by path or name; plans without a run; runs that are finished."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from tests.shell import TINY, assert_error, copied, edit_config, run_ok, snapshot, story, tinylm
from tinylm.duration import parse_duration


@pytest.fixture
def shelved(run: Path, adapter: Path, here: Path) -> Path:
    """A model and an adapter under checkpoints/."""
    copied(run, here / "checkpoints/base")
    copied(adapter, here / "checkpoints/group/tune")
    (here / "text.txt").write_text(story(1500))
    return here


COMMANDS: dict[str, tuple[object, ...]] = {
    "sample": ("sample", "-n", 1, "--model", "base"),
    "sample with an adapter": ("sample", "-n", 1, "--adapter", "group/tune"),
    "sample with half an adapter": ("sample", "-n", 1, "--adapter", "group/tune=0.5", "--model", "base"),
    "eval": ("eval", "text.txt", "--model", "base"),
    "info": ("info", "base"),
    "info of an adapter": ("info", "group/tune"),
    "train with init-from": ("train", "text.txt", "--init-from", "base", "--steps", 1, "--out", "new"),
    "resume": ("train", "--resume", "base", "--steps", 201),
    "finetune": ("finetune-lora", "text.txt", "--model", "base", "--steps", 1, "--batch-size", 4),
    "finetune and resume": ("finetune-lora", "--resume", "group/tune", "--model", "base", "--steps", 21),
    "merge": ("merge-lora", "group/tune", "--model", "base", "--out", "merged"),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("shelf_cache")
def test_a_run_is_found_by_the_name_that_runs_prints(name: str, shelved: Path) -> None:
    run_ok(*COMMANDS[name])


def test_a_line_of_prompts_may_name_an_adapter(shelved: Path) -> None:
    (shelved / "prompts.jsonl").write_text(json.dumps({"prompt": "the", "adapter": "group/tune"}))
    run_ok("sample", "-n", 1, "--prompt-file", "prompts.jsonl", "--model", "base")


def test_a_path_takes_precedence_over_a_run_name_with_a_note(run: Path, shelved: Path) -> None:
    copied(run, shelved / "base")
    edit_config(shelved / "base", model={"dropout": 0.25})
    result = run_ok("info", "base", "--all")
    assert "Using the path base; the run of that name under checkpoints/ is checkpoints/base." in result.stderr
    assert "0.25" in result.stdout
    assert "Using the path" not in run_ok("info", "checkpoints/base").stderr
    assert "Using the path" not in run_ok("info", shelved / "base").stderr


def test_a_folder_of_texts_does_not_hide_the_run_of_the_same_name(shelved: Path) -> None:
    (shelved / "base").mkdir()
    (shelved / "base" / "chapter.txt").write_text("the text that the run was trained on")
    assert run_ok("info", "base").stdout == run_ok("info", "checkpoints/base").stdout


@pytest.mark.parametrize("command", [("sample", "--model"), ("train", "--resume"), ("info",), ("sample", "--adapter")])
def test_a_misspelled_name_is_answered_with_similar_names(command: tuple[str, ...], shelved: Path) -> None:
    assert_error(tinylm(*command, "bas"), 2, "There is no run at bas; perhaps you mean base.")
    assert_error(tinylm(*command, "checkpoints/bas"), 2, "perhaps you mean base.")
    assert_error(tinylm(*command, "group/tun"), 2, "perhaps you mean group/tune.")
    assert_error(tinylm(*command, "xyz"), 2, "There is no run at xyz. List the runs with: tinylm runs.")


def test_a_run_name_cannot_leave_checkpoints(run: Path, here: Path) -> None:
    copied(run, here / "run")
    (here / "checkpoints").mkdir()
    assert_error(tinylm("info", "../run"), 2, "There is no file or folder at ../run; check the path.")


def test_the_newest_model_may_be_in_a_subfolder(run: Path, here: Path) -> None:
    copied(run, here / "checkpoints/group/only")
    assert "Using checkpoints/group/only, the newest model." in run_ok("sample", "-n", 1).stderr


@pytest.mark.parametrize("scale", ["x", "nan", "inf", "1e308", "9" * 400])
def test_an_adapter_scale_out_of_range_is_an_error(scale: str, shelved: Path) -> None:
    result = tinylm("sample", "--adapter", f"group/tune={scale}")
    assert_error(result, 2, "is not a number from -1000 to 1000", "=0.5")
    assert len(result.stderr) < 600


# Dry runs


@pytest.mark.parametrize(
    "command",
    [
        ("train", "text.txt", "--steps", 1, "--out", "there", *TINY),
        ("train", "-", "--steps", 1, "--out", "there", *TINY),
        ("finetune-lora", "text.txt", "--model", "base", "--steps", 1, "--batch-size", 4, "--out", "there"),
        ("finetune-adapter", "text.txt", "--model", "base", "--steps", 1, "--batch-size", 4, "--out", "there"),
    ],
    ids=lambda command: " ".join(map(str, command[:2])),
)
@pytest.mark.parametrize("what", ["a run", "other things", "a file", "nothing", "a folder that cannot be written"])
def test_a_dry_run_works_whatever_exists_at_out_and_writes_nothing(
    command: tuple[object, ...], what: str, run: Path, shelved: Path
) -> None:
    there = shelved / "there"
    if what == "a run":
        copied(run, there)
    elif what == "other things":
        there.mkdir()
        (there / "notes.txt").write_text("mine")
    elif what == "a file":
        there.write_text("mine")
    elif what == "a folder that cannot be written":
        command = (*command[:-1], "there/run") if command[-2] == "--out" else (*command, "--out", "/proc/there")
    before = snapshot(shelved)
    times = {path: path.stat().st_mtime_ns for path in [shelved, *shelved.rglob("*")]}
    result = run_ok(*command, "--dry-run", stdin=story(1500))
    assert "model:" in result.stdout
    is_noted = "there already exists; set --force to replace it, or choose another --out." in result.stderr
    assert is_noted == (what in ("a run", "other things", "a file"))
    assert snapshot(shelved) == before
    assert {path: path.stat().st_mtime_ns for path in [shelved, *shelved.rglob("*")]} == times
    assert "already there" not in run_ok(*command, "--dry-run", "--force", stdin=story(1500)).stderr


# Finished runs


@pytest.mark.parametrize(("seconds", "spelled"), [(3.0, "3s"), (0.5, "0.5s"), (60.0, "1m"), (7200.0, "2h")])
@pytest.mark.usefixtures("shelf_cache")
def test_resuming_a_finished_timed_run_names_the_option_that_continues_it(
    seconds: float, spelled: str, run: Path, here: Path
) -> None:
    path = copied(run, here / "my run")
    edit_config(path, training={"budget": {"steps": None, "epochs": None, "time": seconds}})
    set_state(path, seconds=seconds * 0.9999, last_eval_step=200)
    before = snapshot(path)
    result = tinylm("train", "--resume", "my run")
    assert_error(result, 2, "my run is finished", f"its --time of {spelled} is the total of all its sessions; --time ")
    more = re.fullmatch(r".*; --time (\S+) continues it\.\n", result.stderr, re.DOTALL)
    assert more is not None and parse_duration(more[1]) >= 2 * seconds
    assert snapshot(path) == before


def set_state(path: Path, **values: object) -> None:
    """Change the training state in last/, with valid digests."""
    state = path / "last/state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), **values}))
    manifest = json.loads((path / "last/manifest.json").read_text())
    manifest["state.json"] = hashlib.sha256(state.read_bytes()).hexdigest()
    (path / "last/manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("options", "reason", "more"),
    [
        ((), "all 200 steps are done", "--steps 400"),
        (("--steps", 150), "all 150 steps are done", "--steps 400"),
        (("--patience", 1, "--steps", 300), "the last 3 evaluations brought no improvement", "--patience 6"),
    ],
)
@pytest.mark.usefixtures("shelf_cache")
def test_resuming_a_finished_run_names_the_option_that_continues_it(
    options: tuple[object, ...], reason: str, more: str, run: Path, here: Path
) -> None:
    path = copied(run, here / "again")
    set_state(path, evals_since_best=3 if "--patience" in options else 0)
    result = run_ok("train", "--resume", "again", *options)
    assert f"Warning: again is finished: {reason}; {more} continues it." in result.stderr
    assert result.stdout == "again\n"
    assert "finished" not in run_ok("train", "--resume", "again", *more.split(), "--eval-every", 200).stderr


def test_resuming_a_finished_run_of_epochs_names_the_option_that_continues_it(here: Path) -> None:
    (here / "text.txt").write_text(story(1500))
    run_ok("train", "text.txt", "--epochs", 0.5, "--out", "half", *TINY)
    stderr = run_ok("train", "--resume", "half").stderr
    assert "steps of --epochs 0.5 are done; --epochs 1 continues it." in stderr
    assert "finished" not in run_ok("train", "--resume", "half", "--epochs", 1).stderr
