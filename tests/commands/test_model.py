"""Which run a command works with."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.shell import TINY, copied, done, edit_config, refused, snapshot, story, tinylm
from tinylm.commands.options import parse_duration


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
    "train from it": ("train", "text.txt", "--init-from", "base", "--steps", 1, "--out", "new"),
    "train on": ("train", "--resume", "base", "--steps", 201),
    "finetune": ("finetune-lora", "text.txt", "--model", "base", "--steps", 1, "--batch-size", 4),
    "finetune on": ("finetune-lora", "--resume", "group/tune", "--model", "base", "--steps", 21),
    "merge": ("merge-lora", "group/tune", "--model", "base", "--out", "merged"),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("shelf_cache")
def test_a_run_is_found_by_the_name_that_runs_prints(name: str, shelved: Path) -> None:
    done(*COMMANDS[name])


def test_a_line_of_prompts_may_name_an_adapter(shelved: Path) -> None:
    (shelved / "prompts.jsonl").write_text(json.dumps({"prompt": "the", "adapter": "group/tune"}))
    done("sample", "-n", 1, "--prompt-file", "prompts.jsonl", "--model", "base")


def test_a_path_wins_over_a_name_and_says_so(run: Path, shelved: Path) -> None:
    copied(run, shelved / "base")
    edit_config(shelved / "base", model={"dropout": 0.25})
    result = done("info", "base")
    assert "Using the path base; the run of that name under checkpoints/ is checkpoints/base." in result.stderr
    assert "0.25" in result.stdout
    assert "Using the path" not in done("info", "checkpoints/base").stderr
    assert "Using the path" not in done("info", shelved / "base").stderr


def test_a_folder_of_texts_does_not_hide_the_run_that_has_its_name(shelved: Path) -> None:
    (shelved / "base").mkdir()
    (shelved / "base" / "chapter.txt").write_text("the text that the run was trained on")
    assert done("info", "base").stdout == done("info", "checkpoints/base").stdout


@pytest.mark.parametrize("command", [("sample", "--model"), ("train", "--resume"), ("info",), ("sample", "--adapter")])
def test_a_mistyped_name_is_answered_with_the_nearest(command: tuple[str, ...], shelved: Path) -> None:
    refused(tinylm(*command, "bas"), 2, "There is no run at bas; perhaps you mean base.")
    refused(tinylm(*command, "checkpoints/bas"), 2, "perhaps you mean base.")
    refused(tinylm(*command, "group/tun"), 2, "perhaps you mean group/tune.")
    refused(tinylm(*command, "xyz"), 2, "There is no run at xyz; tinylm runs lists what there is.")


def test_a_name_does_not_lead_out_of_checkpoints(run: Path, here: Path) -> None:
    copied(run, here / "run")
    (here / "checkpoints").mkdir()
    refused(tinylm("info", "../run"), 2, "There is no run at ../run;")


def test_the_newest_model_may_be_in_a_folder_of_runs(run: Path, here: Path) -> None:
    copied(run, here / "checkpoints/group/only")
    assert "Using checkpoints/group/only, the newest model." in done("sample", "-n", 1).stderr


@pytest.mark.parametrize("strength", ["x", "nan", "inf", "1e308", "9" * 400])
def test_a_strength_that_is_no_bounded_number_is_refused(strength: str, shelved: Path) -> None:
    result = tinylm("sample", "--adapter", f"group/tune={strength}")
    refused(result, 2, "is no number from -1000 to 1000", "=0.5")
    assert len(result.stderr) < 600


# A plan without a run


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
def test_a_dry_run_works_whatever_is_there_and_writes_nothing(
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
    result = done(*command, "--dry-run", stdin=story(1500))
    assert "model:" in result.stdout
    said = "there is already there: to train, replace it with --force or choose another --out." in result.stderr
    assert said == (what in ("a run", "other things", "a file"))
    assert snapshot(shelved) == before
    assert {path: path.stat().st_mtime_ns for path in [shelved, *shelved.rglob("*")]} == times
    assert "already there" not in done(*command, "--dry-run", "--force", stdin=story(1500)).stderr


# A run that has nothing left to do


@pytest.mark.parametrize(("seconds", "spelled"), [(3.0, "3s"), (0.5, "0.5s"), (60.0, "1m"), (7200.0, "2h")])
@pytest.mark.usefixtures("shelf_cache")
def test_a_finished_timed_run_says_what_to_type(seconds: float, spelled: str, run: Path, here: Path) -> None:
    path = copied(run, here / "my run")
    edit_config(path, training={"budget": {"steps": None, "epochs": None, "time": seconds}})
    set_state(path, seconds=seconds * 0.9999, evaluated=200)
    before = snapshot(path)
    result = tinylm("train", "--resume", "my run")
    words = ("my run is finished", f"its --time of {spelled} is the total of all its parts")
    refused(result, 2, *words, "Go on with it by tinylm train --resume 'my run' --time ")
    assert parse_duration(result.stderr.split()[-1].removesuffix(".")) >= 2 * seconds
    assert snapshot(path) == before


def set_state(path: Path, **values: object) -> None:
    """Change the saved state of a run, as if it had been saved so."""
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
def test_a_finished_run_says_what_to_type(
    options: tuple[object, ...], reason: str, more: str, run: Path, here: Path
) -> None:
    path = copied(run, here / "again")
    set_state(path, stale=3 if "--patience" in options else 0)
    result = done("train", "--resume", "again", *options)
    command = f"tinylm train --resume again {more}"
    assert f"Warning: again is finished: {reason}. Go on with it by {command}." in result.stderr
    assert result.stdout == "again\n"
    assert "finished" not in done(*command.split()[1:-1], int(more.split()[1]), "--eval-every", 200).stderr


def test_a_finished_run_of_epochs_says_what_to_type(here: Path) -> None:
    (here / "text.txt").write_text(story(1500))
    done("train", "text.txt", "--epochs", 0.5, "--out", "half", *TINY)
    said = done("train", "--resume", "half").stderr
    assert "steps of --epochs 0.5 are done. Go on with it by tinylm train --resume half --epochs 1." in said
    assert "finished" not in done("train", "--resume", "half", "--epochs", 1).stderr
