"""tinylm runs."""

import os
from pathlib import Path

import pytest

from tests.shell import assert_error, copied, records, run_ok, tinylm
from tinylm.errors import TinyLMError
from tinylm.run_directory.loading import load_model, summarise

KEYS = ["name", "path", "kind", "parameters", "step", "best_step", "val_loss", "saved"]


def shelve(here: Path, **runs: Path) -> None:
    """Copy runs to checkpoints/, the first as the newest."""
    for age, (name, source) in enumerate(runs.items()):
        path = copied(source, here / "checkpoints" / name)
        for file in path.iterdir():
            os.utime(file, (2e9 - age, 2e9 - age))


def test_the_table_has_name_kind_size_steps_loss_and_age_newest_first(run: Path, adapter: Path, here: Path) -> None:
    shelve(here, young=run, tune=adapter, old=run)
    result = run_ok("runs")
    header, *rows = (line.split() for line in result.stdout.splitlines())
    assert header == ["name", "kind", "parameters", "steps", "val", "loss", "age"]
    assert [row[:2] for row in rows] == [["young", "model"], ["tune", "adapter"], ["old", "model"]]
    assert [row[3] for row in rows] == ["200", "20", "200"]
    assert result.stderr == ""


def test_runs_are_sorted_by_the_time_of_their_weights_with_damaged_runs_last(run: Path, here: Path) -> None:
    """The run `long` was started first and saved last."""
    shelve(here, short=run, long=run, torn=run)
    os.utime(here / "checkpoints/long/model.safetensors", (3e9, 3e9))
    assert "Using checkpoints/long, the newest model." in run_ok("sample", "-n", 1).stderr
    (here / "checkpoints/torn/model.safetensors").write_bytes(b"")
    assert [record["name"] for record in records(run_ok("runs", "--json"))] == ["long", "short", "torn"]


def test_json_has_the_documented_keys(run: Path, here: Path) -> None:
    shelve(here, mine=run)
    (record,) = records(run_ok("runs", "--json"))
    assert list(record) == KEYS
    weights = load_model(run)[3]
    assert (record["name"], record["path"], record["kind"]) == ("mine", "checkpoints/mine", "model")
    assert (record["step"], record["best_step"], record["val_loss"]) == (200, weights.step, weights.val_loss)
    assert record["parameters"] == sum(tensor.numel() for tensor in weights.tensors.values())


def test_damaged_runs_are_listed_and_hide_no_other(run: Path, here: Path) -> None:
    shelve(here, good=run, torn=run, empty=run, bare=run)
    with (here / "checkpoints/torn/model.safetensors").open("r+b") as file:
        file.truncate(100)
    (here / "checkpoints/empty/config.json").write_text("")
    (here / "checkpoints/bare/model.safetensors").unlink()
    kinds = {record["name"]: record["kind"] for record in records(run_ok("runs", "--json"))}
    assert kinds == {"good": "model", "torn": "damaged", "empty": "damaged", "bare": "damaged"}
    assert run_ok("runs").stdout.count(" damaged: ") == 3
    errors = {record["name"]: record.get("error", "") for record in records(run_ok("runs", "--json"))}
    assert "torn/model.safetensors" in errors["torn"] and "empty/config.json" in errors["empty"]


def test_other_folders_and_unfinished_runs_are_skipped(run: Path, here: Path) -> None:
    shelve(here, mine=run, unfinished=run)
    (here / "checkpoints/unfinished").rename(here / "checkpoints/.unfinished.new")
    (here / "checkpoints/notes").mkdir()
    (here / "checkpoints/README.md").write_text("# runs")
    assert [record["name"] for record in records(run_ok("runs", "--json"))] == ["mine"]


def test_a_long_name_is_not_truncated(run: Path, here: Path) -> None:
    shelve(here, **{"n" * 150: run})
    assert "n" * 150 in run_ok("runs").stdout


def test_another_folder_can_be_listed(run: Path, shelf: Path, adapter: Path) -> None:
    names = {record["name"] for record in records(run_ok("runs", shelf, "--json"))}
    assert {"run", "adapter"} <= names


def test_an_empty_list_is_not_an_error() -> None:
    result = run_ok("runs")
    assert result.stdout == ""
    assert "tinylm train corpus.txt" in result.stderr
    assert run_ok("runs", "--json").stdout == ""


def test_a_run_that_cannot_be_read_is_listed_with_a_shortened_error(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> dict[str, object]:
        if path.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        if path.name == "torn":
            raise TinyLMError("torn is damaged:\n" + "x" * 500)
        return summarise(path)

    shelve(here, good=run, locked=run, torn=run)
    monkeypatch.setattr("tinylm.run_directory.loading.summarise", fail)
    errors = {record["name"]: record.get("error", "") for record in records(run_ok("runs", "--json"))}
    assert errors["good"] == "" and "Permission denied" in errors["locked"] and errors["torn"].endswith("x" * 500)
    lines = run_ok("runs").stdout.splitlines()
    assert len(lines) == 4 and all(len(line) < 200 for line in lines)
    assert "damaged: [Errno 13] Permission denied" in lines[2] and "damaged: torn is damaged: xxx" in lines[3]


def test_a_run_in_a_subfolder_is_named_by_its_relative_path(run: Path, here: Path) -> None:
    shelve(here, **{"top": run, "group/inner": run, "group/deep/er": run, ".hidden/not": run})
    (here / "checkpoints/loop").symlink_to(here / "checkpoints")
    names = [record["name"] for record in records(run_ok("runs", "--json"))]
    assert names == ["top", "group/inner", "group/deep/er"]


@pytest.mark.parametrize("folder", [(), (".",), ("elsewhere",), ("checkpoints",)])
def test_every_printed_name_is_accepted_by_info(run: Path, here: Path, folder: tuple[str, ...]) -> None:
    shelve(here, one=run, **{"group/two": run})
    copied(run, here / "elsewhere/three")
    printed = [line.split()[0] for line in run_ok("runs", *folder).stdout.splitlines()[1:]]
    assert len(printed) == {(): 2, (".",): 3, ("elsewhere",): 1, ("checkpoints",): 2}[folder]
    for name in printed:
        run_ok("info", name)


def test_a_missing_folder_is_an_error() -> None:
    assert_error(tinylm("runs", "nowhere"), 2, "There is no folder nowhere")
