"""tinylm merge-lora."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.shell import assert_error, copied, records, run_ok, snapshot, tinylm
from tinylm.adapters.lora import LoRALinear
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config, read_weights


def test_stdout_is_the_path_or_a_record_and_stderr_has_the_checked_difference(adapter: Path, here: Path) -> None:
    result = run_ok("merge-lora", adapter, "--out", "merged")
    assert result.stdout == "merged\n"
    assert "Checked: merged and unmerged logits differ by " in result.stderr
    assert set(snapshot(here / "merged")) == {"config.json", "tokenizer.json", "model.safetensors"}
    again = ("merge-lora", adapter, "--out", "merged", "--quiet")
    assert_error(tinylm(*again), 2, "merged already holds a run", "--force", sentences=4)
    quiet = run_ok(*again, "--force")
    assert (quiet.stdout, quiet.stderr) == ("merged\n", "")
    (record,) = records(run_ok(*again, "--force", "--json"))
    assert list(record) == ["run", "difference", "change"]
    assert record["run"] == "merged" and record["difference"] < 1e-4 < record["change"]


def test_the_merged_model_is_a_plain_run(adapter: Path, run: Path, shelf: Path, here: Path) -> None:
    before = snapshot(adapter), snapshot(run)
    run_ok("merge-lora", adapter, "--out", "checkpoints/merged")
    assert (snapshot(adapter), snapshot(run)) == before
    shutil.copytree(here / "checkpoints/merged", here / "copy")
    options = ("--seed", 1, "-n", 60, "-t", 0)
    assert run_ok("sample", "-m", "copy", *options).stdout == run_ok("sample", "--adapter", adapter, *options).stdout
    losses = [
        records(run_ok("eval", shelf / "two.txt", *how, "--json"))[0]["loss"]
        for how in (("-m", "copy"), ("--adapter", adapter))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "checkpoints/merged, the newest model" in run_ok("sample", "-n", 1).stderr
    run_ok("train", shelf / "one.txt", "--init-from", "copy", "--steps", 1, "--batch-size", 4)
    message = "not trained but merged or"
    assert_error(tinylm("train", "--resume", "copy"), 2, message, "tinylm train --init-from copy")


def test_a_wrong_merge_is_detected_and_not_written(adapter: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoRALinear, "delta_weight", lambda self: self.lora_B @ self.lora_A)
    assert_error(tinylm("merge-lora", adapter, "--out", "merged"), 1, "differ by", "nothing was written")
    assert list(here.iterdir()) == []


def step_of(path: Path) -> int:
    return read_weights(path, read_config(path)).step


def test_without_recorded_steps_an_undone_merge_has_step_0(adapter: Path, here: Path) -> None:
    """As in runs that were written before steps were recorded, and in damaged ones."""
    run_ok("merge-lora", adapter, "--out", "merged")
    config = read_config(here / "merged")
    for steps in ((), (3,), (3, 4, 5)):
        RunDirectory(here / "merged").write_config(replace(config, merged_steps=steps))
        result = run_ok("merge-lora", adapter, "--undo", "--model", "merged", "--out", "undone", "--force")
        assert "does not record the step of its base" in result.stderr
        assert step_of(here / "undone") == 0


def test_adapters_of_the_base_fit_after_a_merge_is_undone(adapter: Path, run: Path, shelf: Path, here: Path) -> None:
    options = ("--steps", 5, "--lr", "0.05", "--seed", 1)
    run_ok("finetune-lora", shelf / "two.txt", "-m", run, "--out", "other", *options)
    run_ok("merge-lora", adapter, "--out", "merged")
    assert_error(tinylm("sample", "-m", "merged", "--adapter", "other"), 1, "was trained on other weights")
    assert run_ok("merge-lora", adapter, "--undo", "--model", "merged", "--out", "undone").stdout == "undone\n"
    undone, weights = load_model(here / "undone")[0].state_dict(), load_model(run)[0].state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(undone[name], weight, rtol=0, atol=1e-5)
    run_ok("merge-lora", "other", "--model", "undone", "--out", "switched")
    run_ok("merge-lora", "other", "--out", "straight")
    switched, straight, base = (
        load_model(path)[0].state_dict() for path in (here / "switched", here / "straight", run)
    )
    for name, weight in straight.items():
        torch.testing.assert_close(switched[name], weight, rtol=0, atol=1e-5)
    assert any((straight[name] - weight).abs().max() > 0.001 for name, weight in base.items())
    run_ok("merge-lora", "other", "--undo", "--model", "switched", "--out", "again")
    run_ok("sample", "-m", "again", "--adapter", adapter, "-n", 1)
    run_ok("finetune-lora", shelf / "two.txt", "-m", "undone", "--out", "third", *options)
    run_ok("sample", "-m", "again", "--adapter", "third", "--adapter", adapter, "-n", 1)


def test_either_of_two_merged_adapters_can_be_removed(adapter: Path, run: Path, shelf: Path, here: Path) -> None:
    """The later adapter was trained on the base with the first one merged into it. The step of the weights is that of
    the base, or of the adapter that is still merged; the three steps differ."""
    run_ok("merge-lora", adapter, "--out", "one")
    run_ok("finetune-lora", shelf / "one.txt", "-m", "one", "--out", "later", "--steps", 7, "--lr", "0.05", "--seed", 1)
    run_ok("merge-lora", "later", "--out", "both")
    base, first, last = step_of(run), step_of(adapter), step_of(here / "later")
    assert len({base, first, last}) == 3
    assert (step_of(here / "one"), step_of(here / "both")) == (first, last)
    for removed, rest, left, name in ((adapter, "later", last, "later only"), ("later", adapter, first, "first only")):
        run_ok("merge-lora", removed, "--undo", "--model", "both", "--out", name)
        assert step_of(here / name) == left
        run_ok("merge-lora", rest, "--undo", "--model", name, "--out", f"none of {name}")
        assert step_of(here / f"none of {name}") == base
    result = tinylm("merge-lora", adapter, "--undo", "--model", "none of later only", "--out", "x")
    assert_error(result, 2, "was not made by merging")
    names = ("one", "both", "later only", "first only", "none of later only", "none of first only")
    one, both, later, first_only, *none = (load_model(here / name)[0].state_dict() for name in names)
    for name, weight in load_model(run)[0].state_dict().items():
        change = both[name] - one[name]
        torch.testing.assert_close(first_only[name], one[name], rtol=0, atol=1e-5)
        torch.testing.assert_close(later[name] - weight, change, rtol=0, atol=1e-5)
        for undone in none:
            torch.testing.assert_close(undone[name], weight, rtol=0, atol=1e-5)
    for different in ((both, one), (one, none[0])):
        assert any((different[0][name] - different[1][name]).abs().max() > 0.001 for name in one)


def test_base_and_adapter_are_never_overwritten(adapter: Path, run: Path, here: Path) -> None:
    base = copied(run, here / "checkpoints" / "base")
    lora = copied(adapter, here / "checkpoints" / "lora")
    before = snapshot(here)
    for model in ((), ("--model", base)):
        for out in (base, lora):
            result = tinylm("merge-lora", lora, *model, "--out", out, "--force")
            assert_error(result, 2, "never overwritten; choose another --out")
    assert snapshot(here) == before
