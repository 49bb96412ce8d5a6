"""tinylm info, and the curves that it draws as text."""

import itertools
import json
import math
import re
import shlex
import statistics
from pathlib import Path

import pytest

from tests.shell import assert_error, copied, edit_config, records, run_ok, tinylm
from tinylm.commands.info import draw
from tinylm.run_directory.loading import load_model, read_config

KEYS = {"run", "kind", "parameters", "step", "best_step", "val_loss", "saved", "config", "parameters_by_part"}
KEYS |= {"val_bits_per_byte", "seconds", "tokens", "tokens_per_second", "tokenizer", "curve", "commands"}


def test_json_is_one_object_with_the_documented_keys(run: Path) -> None:
    (record,) = records(run_ok("info", run, "--json", "--all"))
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
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [line["tokens_per_second"] for line in logged if "loss" in line]
    assert record["tokens"] == 200 * 4 * 16  # steps, sequences per step, context
    assert record["tokens_per_second"] == pytest.approx(statistics.median(speeds), rel=1e-3, abs=0.5)


SETTINGS = ["model", "parameters", "tokenizer", "data", "training", "runtime"]


def titles(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if re.match("[a-z]", line)]


def test_text_shows_size_losses_a_sample_and_commands_and_settings_with_all(run: Path, shelf: Path, here: Path) -> None:
    path = copied(run, here / "mine")
    (record,) = records(run_ok("info", path, "--json"))
    lines = run_ok("info", path).stdout.splitlines()
    bits = record["val_loss"] / math.log(2)  # a byte is a token
    for line in (
        f"  parameters           {record['parameters']:,}",
        "  model                decoder, 1 layer x width 16, context 16",
        f"  validation loss      {bits:.4f} bits per byte ({record['val_loss']:.4f} nats per token), the best, at step "
        f"{record['best_step']}",
        f"  settings:  tinylm info {path} --all",
    ):
        assert line in lines
    assert any(line.startswith(f"  text                 {shelf / 'one.txt'}: ") for line in lines)
    (path / "samples.jsonl").write_text(
        json.dumps({"step": 50, "text": "old"}) + "\n" + json.dumps({"step": 90, "text": "so it\ncommands\rend"})
    )
    stdout = run_ok("info", path).stdout
    assert titles(stdout) == ["run", "curve", "sample", "commands"]
    assert "\nsample\n  so it\n  commands\n" in stdout
    everything = run_ok("info", path, "--all").stdout
    assert titles(everything) == ["run", "curve", "sample", "commands", *SETTINGS]
    assert "  rope theta           10000.0" in everything.splitlines()
    assert not re.search("expert|relative clip|train on  |train pairs", everything)


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


def test_the_commands_are_those_of_an_adapter_and_of_a_merged_model(adapter: Path) -> None:
    (record,) = records(run_ok("info", adapter, "--json"))
    assert record["kind"] == "adapter"
    assert set(record["commands"]) == {"resume", "sample", "evaluate", "merge"}
    assert "--adapter" in record["commands"]["sample"]
    assert re.search(r"^  adapter +LoRA of rank 8 on ", run_ok("info", adapter).stdout, re.MULTILINE)
    assert "\nadapter\n" in run_ok("info", adapter, "--all").stdout
    run_ok("merge-lora", adapter, "--out", "merged")
    (record,) = records(run_ok("info", "merged", "--json"))
    assert "resume" not in record["commands"] and record["curve"] == []


def test_info_is_of_the_newest_model_or_of_a_dot(
    run: Path, adapter: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(run, here / "checkpoints/mine")
    result = run_ok("info", "--json")
    assert "Using checkpoints/mine" in result.stderr
    assert records(result)[0]["run"] == "checkpoints/mine"
    for path in (run, adapter):
        monkeypatch.chdir(path)
        assert records(run_ok("info", ".", "--json"))[0]["run"] == str(path)


def drawing(stdout: str) -> list[str]:
    """The rows of the drawn curve, without labels."""
    return [line[line.index(sign) + 1 :] for line in stdout.splitlines() for sign in "┤│" if sign in line]


def test_the_curve_is_drawn_without_colours_within_the_columns(run: Path) -> None:
    weights = load_model(run)[3]
    for columns in (40, 80, 200):
        stdout = run_ok("info", run, env={"COLUMNS": str(columns)}).stdout
        curve = stdout.partition("\ncurve\n")[2].partition("\n\n")[0]
        assert "\x1b" not in stdout
        assert max(map(len, curve.splitlines())) <= columns
        rows = drawing(curve)
        assert len(rows) == 13 and rows[0][0] == "o"  # the highest loss is that of the untrained model
        assert sum(row.count("o") for row in rows) == 4 and sum(row.count("*") for row in rows) == 1  # evaluations
        assert f"* best: {weights.val_loss:.4f} at step {weights.step}" in curve


def test_several_runs_are_compared_in_columns_with_differing_settings(run: Path, bpe_run: Path, here: Path) -> None:
    result = run_ok("info", run, bpe_run)
    lines = result.stdout.splitlines()
    assert lines[1].split() == ["A", str(run)] and lines[2].split() == ["B", str(bpe_run)]
    rows = [re.split(r"  +", line.strip()) for line in lines]
    weights = [load_model(path)[3] for path in (run, bpe_run)]
    assert ["A", "B"] in rows
    assert ["steps", "200", "3"] in rows
    assert ["tokens", f"{200 * 64:,}", f"{3 * 64}"] in rows
    assert ["best val loss", *(f"{one.val_loss:.4f}" for one in weights)] in rows
    assert ["at step", *(str(one.step) for one in weights)] in rows
    assert ["tokenizer.kind", "char", "bpe"] in rows
    assert next(row for row in rows if row[0] == "training.lr")[:2] == ["training.lr", "0.02"]
    assert not any(row[0] in ("model.width", "id", "created", "planned.steps") for row in rows)
    data = [read_config(path).data for path in (run, bpe_run)]
    bits = [one.val_loss / math.log(2) * (d.val_tokens - 1) / d.val_bytes for one, d in zip(weights, data, strict=True)]
    assert ["best bits per byte", *(f"{number:.4f}" for number in bits)] in rows
    assert "validation loss, bits per byte" in lines and not result.stderr
    edit_config(copied(run, here / "older"), data={"val_bytes": None})
    older = run_ok("info", here / "older", bpe_run)
    assert "validation loss, nats per token" in older.stdout.splitlines() and "tinylm compare" in older.stderr
    marks = "".join(drawing("\n".join(lines)))
    assert marks.count("A") >= 4 and "B" in marks


def test_json_of_several_runs_has_a_line_for_each(run: Path, bpe_run: Path, adapter: Path, here: Path) -> None:
    found = records(run_ok("info", run, bpe_run, adapter, run, "--json"))
    assert [record["run"] for record in found] == [str(run), str(bpe_run), str(adapter)]
    assert all(set(record) == KEYS for record in found)
    bad = copied(run, here / "bad")
    (bad / "model.safetensors").write_bytes(b"\0" * 50)
    assert_error(tinylm("info", bad), 1, "bad/model.safetensors", "damaged")
    (bad / "config.json").write_text("{")
    result = run_ok("info", bad, run, bpe_run)
    assert "bad is left out" in result.stderr and "\n  B " in result.stdout and "\n  C " not in result.stdout
    assert_error(tinylm("info", bad, bad / "."), 1, "config.json")


@pytest.mark.parametrize("columns", [40, 200])
def test_known_points_are_at_their_places_and_labels_are_the_values_of_their_rows(columns: int) -> None:
    """From 1 to e^4 on a logarithmic axis of 5 rows: e^k is k quarters of the way up."""
    points = [(100.0 * k, math.exp(k)) for k in range(5)]
    lines = draw([("·", points[:2]), ("o", points)], columns, 5)
    marks = sorted(
        (x, y) for y, row in enumerate(drawing("\n".join(lines))) for x, mark in enumerate(row) if mark == "o"
    )
    width = len(lines[-2].partition("└")[2])
    assert len(marks) == 5 and max(map(len, lines)) == columns
    for k, (x, y) in enumerate(marks):
        assert y == 4 - k
        assert abs(x - k / 4 * (width - 1)) <= 1
    assert lines[-1].split() == ["0", "400", "steps"]
    assert {row: line.split()[0] for row, line in enumerate(lines) if "┤" in line} == {0: "54.6", 3: "2.718"}
    lines = draw([("o", [(0.0, 0.0), (1.0, -16.0)])], 30, 5)  # a linear axis, since not all are positive
    assert {row: line.split()[0] for row, line in enumerate(lines) if "┤" in line} == {0: "0", 3: "-12"}


def test_a_single_point_a_constant_nothing_and_extreme_values_can_be_drawn() -> None:
    assert draw([], 40, 5) == draw([("o", [])], 40, 5) == []
    for points in ([(3.0, 1.5)], [(3.0, 1.5), (9.0, 1.5)]):
        lines = draw([("o", points)], 40, 5)
        assert lines[2].startswith("1.5 ┤")
        assert [row for row, line in enumerate(lines) if "o" in line] == [2]
    for points, columns in itertools.product(
        (
            [(0.0, 1e30), (2.0**53, 1e-30)],
            [(0.0, -1e30), (1.0, 1e30)],
            [(5.0, 1.0), (2.0, 3.0), (9.0, 0.0)],  # not in the order of the steps
            [(0.0, 5e-324), (1.0, 0.1)],
        ),
        (1, 20, 40),
    ):
        lines = draw([("o", points)], columns, 6)
        assert len(lines) == 8
        assert all(line.isprintable() for line in lines)
        assert max(map(len, lines)) <= max(columns, 40)
