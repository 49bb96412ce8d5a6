"""tinylm runs."""

import os
import re
from pathlib import Path

from tests.shell import ROOT, copied, edit_config, records, run_ok
from tinylm.commands.runs import KEYS
from tinylm.run_directory.loading import load_model

RECORD = ["name", "path", "kind", "parameters", "step", "best_step", "val_loss", "val_bits_per_byte"]
RECORD += ["saved", "seconds", "settings"]


def shelve(here: Path, **runs: Path) -> None:
    """Copy runs to checkpoints/, the first as the newest."""
    for age, (name, source) in enumerate(runs.items()):
        path = copied(source, here / "checkpoints" / name)
        for file in path.iterdir():
            os.utime(file, (2e9 - age, 2e9 - age))


def listed(*arguments: object) -> list[str]:
    return [record["name"] for record in records(run_ok("runs", *arguments, "--json"))]


def test_the_table_has_kind_size_steps_loss_and_age_and_json_its_keys(run: Path, adapter: Path, here: Path) -> None:
    shelve(here, **{"n" * 150: run, "tune": adapter, "old": run})  # a long name is not truncated
    result = run_ok("runs")
    header, *rows = (line.split() for line in result.stdout.splitlines())
    assert header == ["name", "kind", "parameters", "steps", "bits/byte", "val", "loss", "age"]
    assert [row[:2] for row in rows] == [["n" * 150, "model"], ["tune", "adapter"], ["old", "model"]]
    assert [row[3] for row in rows] == ["200", "20", "200"]
    assert result.stderr == ""
    (record, *_) = records(run_ok("runs", "--json"))
    assert list(record) == RECORD
    weights = load_model(run)[3]
    assert (record["name"], record["path"], record["kind"]) == ("n" * 150, f"checkpoints/{'n' * 150}", "model")
    assert (record["step"], record["best_step"], record["val_loss"]) == (200, weights.step, weights.val_loss)
    assert record["parameters"] == sum(tensor.numel() for tensor in weights.tensors.values())


def test_runs_are_sorted_by_the_time_of_their_weights_with_damaged_runs_last(run: Path, here: Path) -> None:
    """The run `long` was started first and saved last. A damaged run hides no other."""
    shelve(here, short=run, torn=run, empty=run, bare=run, long=run)
    os.utime(here / "checkpoints/long/model.safetensors", (3e9, 3e9))
    assert "Using checkpoints/long, the newest model." in run_ok("sample", "-n", 1).stderr
    with (here / "checkpoints/torn/model.safetensors").open("r+b") as file:
        file.truncate(100)
    (here / "checkpoints/empty/config.json").write_text("")
    (here / "checkpoints/bare/model.safetensors").unlink()
    found = {record["name"]: record for record in records(run_ok("runs", "--json"))}
    assert list(found)[:2] == ["long", "short"] and len(found) == 5
    assert {found[name]["kind"] for name in ("torn", "empty", "bare")} == {"damaged"}
    assert "torn/model.safetensors" in found["torn"]["error"] and "empty/config.json" in found["empty"]["error"]
    assert run_ok("runs").stdout.count(" damaged: ") == 3


def test_the_error_of_a_damaged_run_is_shortened_in_the_table_alone(run: Path, here: Path) -> None:
    name = "long\nname" * 15
    shelve(here, good=run, **{name: run})
    (here / "checkpoints" / name / "config.json").unlink()
    (here / "checkpoints" / name / "config.json").mkdir()
    (record,) = (record for record in records(run_ok("runs", "--json")) if record["name"] == name)
    assert name in record["error"] and "not a regular file" in record["error"]
    _, _, line = run_ok("runs").stdout.splitlines()
    assert len(line.partition(" damaged: ")[2].partition("...")[0]) == 80 - len("...")


def test_runs_in_subfolders_are_named_by_relative_paths_and_other_folders_are_skipped(run: Path, here: Path) -> None:
    shelve(here, **{"top": run, "group/inner": run, "group/deep/er": run, ".hidden/not": run, "unfinished": run})
    (here / "checkpoints/unfinished").rename(here / "checkpoints/.unfinished.new")
    (here / "checkpoints/loop").symlink_to(here / "checkpoints")
    (here / "checkpoints/notes").mkdir()
    (here / "checkpoints/README.md").write_text("# runs")
    assert listed() == ["top", "group/inner", "group/deep/er"]
    copied(run, here / "elsewhere/three")
    for folder, count in (((), 3), ((".",), 4), (("elsewhere",), 1), (("checkpoints",), 3)):
        printed = [line.split()[0] for line in run_ok("runs", *folder).stdout.splitlines()[1:]]
        assert len(printed) == count
        for name in printed:
            run_ok("info", name)


def test_an_empty_list_is_not_an_error() -> None:
    result = run_ok("runs")
    assert result.stdout == ""
    assert "tinylm train corpus.txt" in result.stderr
    assert run_ok("runs", "--json").stdout == ""


# Sorting


SORTED = {
    "age": ["chars", "bpe", "tune", "masked"],
    "-age": ["masked", "tune", "bpe", "chars"],
    "name": ["bpe", "chars", "masked", "tune"],
    "steps": ["bpe", "tune", "masked", "chars"],
    "-steps": ["chars", "masked", "tune", "bpe"],
}


def test_runs_are_sorted_by_keys_and_json_has_their_settings(
    run: Path, bpe_run: Path, adapter: Path, encoder: Path, here: Path
) -> None:
    """The four runs have 200, 3, 20 and 30 steps. A key that has no column is added to the table."""
    shelve(here, chars=run, bpe=bpe_run, tune=adapter, masked=encoder)
    edit_config(here / "checkpoints/bpe", training={"lr": 0.5, "optimizer": "adamw"})
    assert {key: listed("--sort", key) for key in SORTED} == SORTED
    for key, entry in (("loss", "val_loss"), ("time", "seconds"), ("parameters", "parameters")):
        values = [record[entry] for record in records(run_ok("runs", "--sort", key, "--json"))]
        assert len(values) == 4 and values == sorted(values)
    header, first, *_ = run_ok("runs", "--sort", "-lr").stdout.splitlines()
    assert header.split()[-2:] == ["age", "lr"]
    assert first.split()[0] == "bpe" and first.split()[-1] == "0.5"
    assert run_ok("runs", "--sort", "loss").stdout.splitlines()[0].split()[-1] == "age"
    settings = {record["name"]: record["settings"] for record in records(run_ok("runs", "--json"))}
    assert settings["bpe"] | {"tokenizer": "bpe", "optimizer": "adamw", "lr": 0.5, "rank": None} == settings["bpe"]
    assert settings["masked"] | {"preset": "modern", "architecture": "encoder"} == settings["masked"]
    assert (settings["tune"]["rank"], settings["tune"]["batch_size"]) == (8, 4)


def test_a_damaged_run_is_last_in_every_order(run: Path, here: Path) -> None:
    shelve(here, a=run, b=run)
    (here / "checkpoints/a/config.json").write_text("{")
    assert listed("--sort", "loss") == listed("--sort", "-loss") == ["b", "a"]
    assert "damaged" in run_ok("runs", "--sort", "lr").stdout


def test_the_documents_name_every_key() -> None:
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    rows = page[page.index("The keys:") :].split("\n\n")[1]
    assert set(re.findall(r"`(\w+)`", rows)) == set(KEYS)
