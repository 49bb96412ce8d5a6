"""tinylm info."""

import json
import shlex
from pathlib import Path

import pytest

from tests.shell import assert_error, copied, records, run_ok, tinylm
from tinylm.run_config import FORMAT
from tinylm.run_directory.loading import load_model

KEYS = {"run", "kind", "parameters", "step", "best_step", "val_loss", "saved", "config", "parameters_by_part"}
KEYS |= {"seconds", "tokenizer", "curve", "commands"}


def test_json_is_one_object_with_the_documented_keys(run: Path) -> None:
    (record,) = records(run_ok("info", run, "--json"))
    assert set(record) == KEYS
    saved = json.loads((run / "config.json").read_text())
    assert {**record["config"], "digest": saved["digest"]} == saved
    model, _, tokenizer, weights = load_model(run)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert record["parameters_by_part"]["total"] == record["parameters"] == total
    assert sum(n for part, n in record["parameters_by_part"].items() if part != "total") == total
    assert record["tokenizer"] == {"kind": "char", "vocab_size": tokenizer.vocab_size}
    assert [point["step"] for point in record["curve"]] == [0, 50, 100, 150, 200]
    assert min(point["val_loss"] for point in record["curve"]) == weights.val_loss == record["val_loss"]


def test_text_shows_configuration_parameters_tokenizer_corpus_curve_and_commands(run: Path, shelf: Path) -> None:
    stdout = run_ok("info", run).stdout
    for title in ("run", "model", "parameters", "tokenizer", "data", "training", "runtime", "curve", "commands"):
        assert f"\n{title}\n" in "\n" + stdout
    for line in (
        "  width                16",
        "  kind                 char",
        f"  corpus               {shelf / 'one.txt'}",
    ):
        assert line in stdout.splitlines()


@pytest.mark.usefixtures("shelf_cache")
def test_the_printed_commands_work(run: Path, adapter: Path, here: Path, shelf: Path) -> None:
    (here / "text.txt").write_text("the sea")
    (here / "other.txt").write_text((shelf / "two.txt").read_text())
    model, tune = copied(run, here / "a model"), copied(adapter, here / "tune")
    for path in (model, tune):
        (record,) = records(run_ok("info", path, "--json"))
        for name, command in record["commands"].items():
            assert command in run_ok("info", path).stdout
            program, *words = shlex.split(command.replace('"..."', "sea"))
            short = {"sample": ("-n", 2), "fine-tune": ("--steps", 1, "--batch-size", 4)}
            assert program == "tinylm"
            run_ok(*words, *short.get(name, ()))


def test_the_commands_for_an_adapter_use_the_adapter_option(adapter: Path) -> None:
    (record,) = records(run_ok("info", adapter, "--json"))
    assert record["kind"] == "adapter"
    assert set(record["commands"]) == {"resume", "sample", "evaluate", "merge"}
    assert "--adapter" in record["commands"]["sample"]
    assert "\nadapter\n" in run_ok("info", adapter).stdout


def test_a_merged_model_has_no_resume_command(adapter: Path) -> None:
    run_ok("merge-lora", adapter, "--out", "merged")
    (record,) = records(run_ok("info", "merged", "--json"))
    assert "resume" not in record["commands"]
    assert record["curve"] == []


def test_the_default_is_the_newest_model(run: Path, here: Path) -> None:
    copied(run, here / "checkpoints/mine")
    result = run_ok("info", "--json")
    assert "Using checkpoints/mine" in result.stderr
    assert records(result)[0]["run"] == "checkpoints/mine"


@pytest.mark.parametrize("kind", ["run", "adapter"])
def test_a_dot_names_the_run_in_the_working_directory(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request.getfixturevalue(kind)
    monkeypatch.chdir(path)
    (record,) = records(run_ok("info", ".", "--json"))
    assert record["run"] == str(path)


def test_a_truncated_line_of_metrics_is_skipped(run: Path, here: Path) -> None:
    path = copied(run, here / "cut")
    metrics = path / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 201, "val_l')
    assert records(run_ok("info", path, "--json"))[0]["curve"][-1]["step"] == 200


def test_a_damaged_run_is_an_error_that_names_the_file(run: Path, here: Path) -> None:
    path = copied(run, here / "bad")
    (path / "model.safetensors").write_bytes(b"\0" * 50)
    assert_error(tinylm("info", path), 1, str(path / "model.safetensors"), "damaged")
    (path / "config.json").write_text('{"format": 99}')
    assert_error(
        tinylm("info", path), 1, f"written by a newer tinylm (format 99, this one reads {FORMAT})", "upgrade tinylm"
    )


def test_a_path_that_is_not_a_run_is_an_error(here: Path) -> None:
    assert_error(tinylm("info", "nowhere"), 2, "There is no run at nowhere", "tinylm runs")
    (here / "empty").mkdir()
    assert_error(tinylm("info", "empty"), 2, "empty is not a run directory: it has no config.json")
