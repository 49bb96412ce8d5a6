"""tinylm merge-lora."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.shell import assert_error, copied, records, run_ok, snapshot, tinylm
from tinylm.adapters.load import AdapterSpec, load_adapted_model
from tinylm.adapters.lora import LoRALinear
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config, read_weights


def test_stdout_is_the_path_and_stderr_has_the_checked_difference(adapter: Path) -> None:
    result = run_ok("merge-lora", adapter, "--out", "merged")
    assert result.stdout == "merged\n"
    assert "Checked: merged and unmerged logits differ by " in result.stderr
    quiet = run_ok("merge-lora", adapter, "--out", "again", "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("again\n", "")


def test_json_gives_the_run_and_both_differences(adapter: Path) -> None:
    (record,) = records(run_ok("merge-lora", adapter, "--out", "merged", "--json"))
    assert list(record) == ["run", "difference", "change"]
    assert record["run"] == "merged"
    assert record["difference"] < 1e-4 < record["change"]


def test_the_merged_model_has_the_logits_of_base_and_adapter(adapter: Path, run: Path, here: Path) -> None:
    run_ok("merge-lora", adapter, "--out", "merged")
    merged, merged_config, *_ = load_model(here / "merged")
    base, base_config, *_ = load_model(run)
    adapted, *_ = load_adapted_model([AdapterSpec(adapter)], None, "cpu")
    ids = torch.arange(16).reshape(1, 16)
    with torch.inference_mode():
        logits = [model.logits(model(ids).hidden) for model in (merged, adapted, base)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)
    assert (logits[0] - logits[2]).abs().max() > 0.01
    assert merged_config.model == base_config.model
    assert merged.state_dict().keys() == base.state_dict().keys()


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


def test_resuming_a_merged_model_is_an_error(adapter: Path) -> None:
    run_ok("merge-lora", adapter, "--out", "merged")
    assert_error(
        tinylm("train", "--resume", "merged"),
        2,
        "not trained but merged or",
        "tinylm train --init-from merged",
    )


def test_merging_an_adapter_without_effect_is_an_error(run: Path, shelf: Path, here: Path) -> None:
    options = ("--steps", 1, "--lr", "1e-30", "--batch-size", 4)
    run_ok("finetune-lora", shelf / "two.txt", "-m", run, "-o", "idle", *options)
    before = snapshot(here)
    assert_error(tinylm("merge-lora", "idle", "-m", run, "--out", "merged"), 1, "has no effect", "train it for longer")
    assert snapshot(here) == before


def test_a_wrong_merge_is_detected_and_nothing_is_written(
    adapter: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge leaves out the scale alpha / rank."""
    monkeypatch.setattr(LoRALinear, "delta_weight", lambda self: self.lora_B @ self.lora_A)
    assert_error(tinylm("merge-lora", adapter, "--out", "merged"), 1, "differ by", "nothing was written")
    assert list(here.iterdir()) == []


def test_undoing_a_merge_recovers_the_base(adapter: Path, run: Path, here: Path) -> None:
    run_ok("merge-lora", adapter, "--out", "merged")
    result = run_ok("merge-lora", adapter, "--undo", "--model", "merged", "--out", "undone")
    assert result.stdout == "undone\n"
    undone, base, merged = (load_model(path)[0].state_dict() for path in (here / "undone", run, here / "merged"))
    for name, weight in base.items():
        torch.testing.assert_close(undone[name], weight, rtol=0, atol=1e-5)
    assert any((merged[name] - weight).abs().max() > 0.01 for name, weight in base.items())
    run_ok("sample", "-m", "undone", "-n", 1)


def step_of(path: Path) -> int:
    return read_weights(path, read_config(path)).step


def test_undoing_a_merge_restores_the_step_of_the_remaining_weights(
    adapter: Path, run: Path, shelf: Path, here: Path
) -> None:
    """That is the step of the base, or of the adapter that is still merged; the three steps differ."""
    run_ok("merge-lora", adapter, "--out", "one")
    run_ok("finetune-lora", shelf / "one.txt", "-m", "one", "--out", "later", "--steps", 7, "--lr", "0.05", "--seed", 1)
    run_ok("merge-lora", "later", "--out", "both")
    base, first, last = step_of(run), step_of(adapter), step_of(here / "later")
    assert len({base, first, last}) == 3
    assert (step_of(here / "one"), step_of(here / "both")) == (first, last)
    for removed, rest, left in ((adapter, "later", last), ("later", adapter, first)):
        run_ok("merge-lora", removed, "--undo", "--model", "both", "--out", "part", "--force")
        assert step_of(here / "part") == left
        run_ok("merge-lora", rest, "--undo", "--model", "part", "--out", "none", "--force")
        assert step_of(here / "none") == base
    run_ok("merge-lora", adapter, "--model", "none", "--out", "again")
    run_ok("merge-lora", adapter, "--undo", "--model", "again", "--out", "undone")
    assert step_of(here / "undone") == base


@pytest.mark.parametrize("steps", [(), (3,), (3, 4, 5)])
def test_without_recorded_steps_an_undone_merge_has_step_0(steps: tuple[int, ...], adapter: Path, here: Path) -> None:
    """As in runs that were written before steps were recorded, and in damaged ones."""
    run_ok("merge-lora", adapter, "--out", "merged")
    config = read_config(here / "merged")
    RunDirectory(here / "merged").write_config(replace(config, merged_steps=steps))
    result = run_ok("merge-lora", adapter, "--undo", "--model", "merged", "--out", "undone")
    assert "does not record the step of its base" in result.stderr
    assert step_of(here / "undone") == 0


def test_adapters_of_the_base_fit_again_after_a_merge_is_undone(
    adapter: Path, run: Path, shelf: Path, here: Path
) -> None:
    """Switching tasks: the merge of one adapter is undone, and another adapter is merged (note 002)."""
    options = ("--steps", 5, "--lr", "0.05", "--seed", 1)
    run_ok("finetune-lora", shelf / "two.txt", "-m", run, "--out", "other", *options)
    run_ok("merge-lora", adapter, "--out", "merged")
    assert_error(tinylm("sample", "-m", "merged", "--adapter", "other"), 1, "was trained on other weights")
    run_ok("merge-lora", adapter, "--undo", "--model", "merged", "--out", "undone")
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


def test_without_a_recorded_base_digest_later_adapters_do_not_fit_the_recovered_base(
    adapter: Path, shelf: Path, here: Path
) -> None:
    """As in runs written before that digest was recorded. The base of the later adapter was the merged model."""
    run_ok("merge-lora", adapter, "--out", "one")
    config = read_config(here / "one")
    RunDirectory(here / "one").write_config(replace(config, unmerged_digest=None))
    run_ok("finetune-lora", shelf / "one.txt", "-m", "one", "--out", "later", "--steps", 5, "--lr", "0.05", "--seed", 1)
    run_ok("merge-lora", "later", "--out", "both")
    run_ok("merge-lora", adapter, "--undo", "--model", "both", "--out", "rest")
    run_ok("merge-lora", "later", "--undo", "--model", "rest", "--out", "base")
    assert_error(tinylm("sample", "-m", "base", "--adapter", "later"), 1, "was trained on other weights")


def test_either_of_two_merged_adapters_can_be_removed(adapter: Path, shelf: Path, here: Path) -> None:
    """The later adapter was trained on the base with the first one merged into it."""
    run_ok("merge-lora", adapter, "--out", "one")
    run_ok("finetune-lora", shelf / "one.txt", "-m", "one", "--out", "later", "--steps", 5, "--lr", "0.05", "--seed", 1)
    run_ok("merge-lora", "later", "--out", "both")
    for name, removed in (("first", adapter), ("last", here / "later")):
        run_ok("merge-lora", removed, "--undo", "--model", "both", "--out", name)
    run_ok("merge-lora", adapter, "--undo", "--model", "last", "--out", "base")
    weights = {name: load_model(here / name)[0].state_dict() for name in ("one", "both", "first", "last", "base")}
    later, base = (
        {name: weights[a][name] - weights[b][name] for name in weights["one"]}
        for a, b in (("both", "one"), ("last", "base"))
    )
    for name, weight in weights["one"].items():
        torch.testing.assert_close(weights["last"][name], weight, rtol=0, atol=1e-5)
        torch.testing.assert_close(weights["first"][name] - weights["base"][name], later[name], rtol=0, atol=1e-5)
    assert any(change.abs().max() > 0.001 for change in later.values())
    assert any(change.abs().max() > 0.001 for change in base.values())
    assert_error(tinylm("merge-lora", adapter, "--undo", "--model", "base", "--out", "x"), 2, "was not made by merging")


def test_undo_needs_a_model_that_the_adapter_was_merged_into(adapter: Path, run: Path, here: Path) -> None:
    undo = ("merge-lora", adapter, "--undo", "--out", "undone")
    assert_error(tinylm(*undo), 2, "--undo takes the adapter out of a merged model; name that with --model.")
    assert_error(tinylm(*undo, "--model", run), 2, "was not made by merging", "name the adapter that it was made with")
    assert list(here.iterdir()) == []


def test_an_existing_run_is_replaced_only_with_force(adapter: Path, run: Path, here: Path) -> None:
    path = copied(run, here / "merged")
    before = snapshot(path)
    assert_error(
        tinylm("merge-lora", adapter, "--out", "merged"), 2, "merged already holds a run", "--force", sentences=4
    )
    assert snapshot(path) == before
    run_ok("merge-lora", adapter, "--out", "merged", "--force")
    assert set(snapshot(path)) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_a_model_in_place_of_an_adapter_is_an_error(run: Path) -> None:
    assert_error(tinylm("merge-lora", run, "--out", "merged"), 2, "is a model, not an adapter")


def test_a_missing_adapter_is_an_error() -> None:
    assert_error(tinylm("merge-lora", "no-such", "--out", "merged"), 2, "There is no run at no-such")


@pytest.mark.parametrize("named", [True, False])
def test_base_and_adapter_are_never_overwritten(named: bool, adapter: Path, run: Path, here: Path) -> None:
    base = copied(run, here / "checkpoints" / "base")
    lora = copied(adapter, here / "checkpoints" / "lora")
    before = snapshot(here)
    for out in (base, lora):
        model = ("--model", base) if named else ()
        assert_error(
            tinylm("merge-lora", lora, *model, "--out", out, "--force"), 2, "never overwritten; choose another --out"
        )
    assert snapshot(here) == before
