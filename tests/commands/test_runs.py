"""tinylm runs."""

import os
import re
from pathlib import Path

import pytest

from tests.shell import ROOT, assert_error, copied, edit_config, records, run_ok, tinylm
from tinylm.commands.run_filter import KEYS
from tinylm.errors import TinyLMError
from tinylm.run_directory.loading import load_model, summarise

RECORD = ["name", "path", "kind", "parameters", "step", "best_step", "val_loss", "val_bits_per_byte"]
RECORD += ["saved", "seconds"]


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
    assert header == ["name", "kind", "parameters", "steps", "bits/byte", "val", "loss", "age"]
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
    assert list(record) == RECORD
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


def listed(*arguments: object) -> list[str]:
    return [record["name"] for record in records(run_ok("runs", *arguments, "--json"))]


@pytest.fixture
def four(run: Path, bpe_run: Path, adapter: Path, encoder: Path, here: Path) -> None:
    """Four runs, of 200, 3, 20 and 30 steps, with these values of other keys."""
    shelve(here, chars=run, bpe=bpe_run, tune=adapter, masked=encoder)
    edit_config(here / "checkpoints/bpe", training={"lr": 0.5, "optimizer": "adamw"})


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("age", ["chars", "bpe", "tune", "masked"]),
        ("-age", ["masked", "tune", "bpe", "chars"]),
        ("name", ["bpe", "chars", "masked", "tune"]),
        ("steps", ["bpe", "tune", "masked", "chars"]),
        ("-steps", ["chars", "masked", "tune", "bpe"]),
    ],
)
def test_runs_are_sorted_by_a_key_ascending_or_after_a_minus_descending(key: str, names: list[str]) -> None:
    assert listed("--sort", key) == names


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(("key", "entry"), [("loss", "val_loss"), ("time", "seconds"), ("parameters", "parameters")])
def test_sorting_by_loss_time_or_size_puts_the_least_first(key: str, entry: str) -> None:
    values = [record[entry] for record in records(run_ok("runs", "--sort", key, "--json"))]
    assert len(values) == 4 and values == sorted(values)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (["kind=adapter"], {"tune"}),
        (["kind!=adapter"], {"chars", "bpe", "masked"}),
        (["steps<30"], {"bpe", "tune"}),
        (["steps<=30"], {"bpe", "tune", "masked"}),
        (["steps > 20", "steps>=30", "name=*s*"], {"chars", "masked"}),
        (["tokenizer==bpe"], {"bpe"}),
        (["preset=modern", "architecture=encoder"], {"masked"}),
        (["batch-size=4"], {"chars", "bpe", "tune", "masked"}),
        (["lr=5e-1"], {"bpe"}),
        (["rank=8"], {"tune"}),
        (["rank!=7"], {"chars", "bpe", "tune", "masked"}),
        (["parameters<1M", "parameters>0.001k"], {"chars", "bpe", "tune", "masked"}),
        (["time<1h30m"], {"chars", "bpe", "tune", "masked"}),
        (["loss>1e9"], set()),
    ],
)
def test_filters_are_combined_and_compare_numbers_texts_and_durations(filters: list[str], names: set[str]) -> None:
    assert set(listed(*(word for one in filters for word in ("--filter", one)))) == names


@pytest.mark.usefixtures("four")
def test_a_key_that_has_no_column_is_added_to_the_table() -> None:
    header, first, *_ = run_ok("runs", "--sort", "-lr", "--filter", "optimizer=*").stdout.splitlines()
    assert header.split()[-3:] == ["age", "lr", "optimizer"]
    assert first.split()[0] == "bpe" and first.split()[-2:] == ["0.5", "adamw"]
    assert run_ok("runs", "--sort", "loss").stdout.splitlines()[0].split()[-1] == "age"


@pytest.mark.usefixtures("four")
def test_when_no_run_passes_a_note_says_so() -> None:
    result = run_ok("runs", "--filter", "steps>1G")
    assert result.stdout == "" and "None of the 4 runs under checkpoints/ passes" in result.stderr


def test_a_damaged_run_is_last_in_every_order_and_passes_only_filters_that_it_can_answer(run: Path, here: Path) -> None:
    shelve(here, a=run, b=run)
    (here / "checkpoints/a/config.json").write_text("{")
    assert listed("--sort", "loss") == listed("--sort", "-loss") == ["b", "a"]
    assert listed("--filter", "loss<99") == ["b"]
    assert listed("--filter", "kind=damaged") == ["a"]
    assert "damaged" in run_ok("runs", "--sort", "lr").stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--sort", "speed"), ("--sort has no key 'speed'", "loss", "preset", "batch_size")),
        (("--filter", "speed<1"), ("--filter has no key 'speed'", "loss", "preset", "batch_size")),
        (("--filter", "loss"), ("--filter is 'loss'", "loss<1.5")),
        (("--filter", ""), ("--filter is ''",)),
        (("--filter", "loss<low"), ("compares loss with 'low'",)),
        (("--filter", "loss<nan"), ("compares loss with 'nan'",)),
        (("--filter", "loss<"), ("compares loss with ''",)),
        (("--filter", "name<b"), ("compares name by <", "text")),
        (("--filter", "age>soon"), ("age, a duration", "'soon' is not a length of time")),
    ],
)
def test_a_wrong_key_or_expression_is_an_error_that_names_the_keys_or_the_form(
    words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_error(tinylm("runs", *words), 2, *parts)


def test_the_documents_name_every_key() -> None:
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    rows = page[page.index("The keys:") :].split("\n\n")[1]
    assert set(re.findall(r"`(\w+)`", rows)) == set(KEYS)


def test_a_missing_folder_is_an_error() -> None:
    assert_error(tinylm("runs", "nowhere"), 2, "There is no folder nowhere")
