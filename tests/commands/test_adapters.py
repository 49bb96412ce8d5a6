"""tinylm finetune-lora, finetune-adapter and merge-lora."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.shell import TINY, assert_error, copied, edit_config, records, run_ok, snapshot, tinylm
from tinylm.adapters.lora import LoRALinear
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config, read_weights

FILES = {"config.json", "tokenizer.json", "metrics.jsonl", "adapter.safetensors", "last"}
PEFT_FILES = {"adapter_config.json", "adapter_model.safetensors"}
SHORT = ("--steps", 2, "--batch-size", 4)


def finetuned(second: Path, base: Path, out: str, *options: object) -> Path:
    run_ok("finetune-lora", second, "-m", base, "-o", out, *SHORT, *options)
    return second.parent / out


def saved_tensors(adapter: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(adapter / "adapter.safetensors")


def test_adapters_are_beside_their_base(second: Path, run: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = copied(run, here / "checkpoints/base")
    result = run_ok("finetune-lora", second, *SHORT)
    assert result.stdout == "checkpoints/base-lora\n"
    assert "Using checkpoints/base, the newest model." in result.stderr
    monkeypatch.chdir(base)
    assert run_ok("finetune-adapter", second, "-m", ".", *SHORT).stdout == f"{base}-adapter\n"


@pytest.mark.usefixtures("shelf_cache")
def test_stdout_is_the_path_and_json_counts_only_trained_parameters(second: Path, run: Path, here: Path) -> None:
    last = records(run_ok("finetune-lora", second, "-m", run, "-o", "three", *SHORT, "--rank", 3, "--json"))[-1]
    assert last["parameters"] == sum(tensor.numel() for tensor in saved_tensors(here / "three").values())
    again = records(run_ok("finetune-lora", "--resume", "three", "-m", run, "--steps", 3, "--json"))[-1]
    assert again["parameters"] == last["parameters"]
    result = run_ok("finetune-lora", second, "-m", run, "-o", "ad", *SHORT)
    assert result.stdout == "ad\n"
    assert {path.name for path in (here / "ad").iterdir()} == FILES | PEFT_FILES
    assert "adapter:   " in result.stderr and "q_proj, k_proj, v_proj, o_proj" in result.stderr
    assert run_ok("finetune-lora", second, "-m", run, "-o", "quiet", *SHORT, "--quiet").stderr == ""


def test_the_settings_of_an_adapter_are_recorded(second: Path, run: Path) -> None:
    settings = read_config(finetuned(second, run, "ad", "-r", 5)).adapter
    assert (settings.rank, settings.alpha, settings.dropout) == (5, 10.0, 0.0)
    assert settings.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (settings.base, settings.base_digest) == (str(run.resolve()), load_model(run)[3].digest)
    for name, options in (("a", ("--target", "key,value")), ("b", ("--target", "key", "--target", "value"))):
        settings = read_config(finetuned(second, run, name, *options, "--alpha", 3, "--dropout", 0.2)).adapter
        assert settings.targets == ("k_proj", "v_proj")
        assert (settings.alpha, settings.dropout) == (3.0, 0.2)


@pytest.mark.usefixtures("shelf_cache")
def test_an_adapter_with_another_base_is_an_error(adapter: Path, run: Path, second: Path, here: Path) -> None:
    other = copied(run, here / "other")
    run_ok("train", "--resume", other, "--steps", 205, "--eval-every", 1, "--log-every", 1)
    run_ok("train", second, "--init-from", other, "--out", "cousin", *SHORT, "--lr", "0.1", "--val-data", second)
    text = "name the base model that it was trained on"
    before = snapshot(here)
    for command in (("sample",), ("eval", second)):
        assert_error(tinylm(*command, "--adapter", adapter, "--model", "cousin"), 1, text, str(adapter), "cousin")
    assert_error(tinylm("merge-lora", adapter, "--model", "cousin", "--out", "merged"), 1, text)
    assert_error(tinylm("finetune-lora", "--resume", adapter, "--model", "cousin", "--steps", 99), 1, text)
    assert snapshot(here) == before


def test_dry_run_writes_nothing(second: Path, run: Path, shelf: Path, here: Path) -> None:
    run_ok("train", shelf / "one.txt", "-o", "mix", "--steps", 1, "--experts", 3, *TINY)
    before = snapshot(here)
    for base, target, found in (
        (run, "attention", "rank 8 on q_proj, k_proj, v_proj, o_proj: "),
        ("mix", "router", "rank 3 on router: "),
    ):
        result = run_ok("finetune-lora", second, "-m", base, "-o", "ad", *SHORT, "--target", target, "--dry-run")
        assert f"adapter:   {found}" in result.stdout
    assert snapshot(here) == before


@pytest.mark.usefixtures("shelf_cache")
def test_training_a_base_further_warns_that_its_adapters_no_longer_fit(adapter: Path, run: Path, here: Path) -> None:
    base = copied(run, here / "checkpoints" / "base")
    lora = copied(adapter, here / "checkpoints" / "lora")
    edit_config(lora, adapter={"base": str(base)})
    result = run_ok("train", "--resume", base, "--steps", 260, "--eval-every", 10)
    assert "Warning: lora was trained on the weights of" in result.stderr
    run_ok("cache", "bases", "--clear")  # which name the run that `base` is a copy of
    result = tinylm("sample", "--adapter", lora)
    assert_error(result, 2, "base does not have the weights that", "it was trained further")


def test_the_base_of_an_adapter_is_found_when_a_copy_that_was_used_later_is_gone(
    run: Path, second: Path, here: Path
) -> None:
    bases = [copied(run, here / folder / "base") for folder in ("far", "away", "last")]
    for number, base in enumerate(bases):
        run_ok("finetune-lora", second, "-m", base, "-o", f"lora{number}", "--steps", 1)
    for base in bases[1:]:
        shutil.rmtree(base)
    run_ok("sample", "--adapter", "lora2", "-n", 3)
    shutil.rmtree(bases[0])
    assert_error(tinylm("sample", "--adapter", "lora2"), 2, "base")


BRIEF = ("--steps", 40, "--batch-size", 4, "--lr", 0.01)


def test_a_bottleneck_adapter_lowers_the_loss_without_changing_the_base(second: Path, run: Path, here: Path) -> None:
    before = snapshot(run)
    result = run_ok("finetune-adapter", second, "-m", run, "-o", "ad", *BRIEF, "--bottleneck", 4)
    assert result.stdout == "ad\n"
    assert "adapter:   hidden size 4 after attention, feedforward: 296 parameters" in result.stderr
    assert snapshot(run) == before
    files = {path.name for path in (here / "ad").iterdir()} - {"samples.jsonl"}  # samples: if it takes seconds
    assert files == {"config.json", "tokenizer.json", "metrics.jsonl", "adapter.safetensors", "last"}
    base, adapted = (
        records(run_ok("eval", second, *how, "--json"))[0] for how in (("-m", run), ("--adapter", "ad", "-m", run))
    )
    assert adapted["loss"] < base["loss"]


@pytest.mark.usefixtures("shelf_cache")
def test_a_bottleneck_adapter_is_resumed_by_its_command_and_not_merged(second: Path, run: Path, here: Path) -> None:
    run_ok("finetune-adapter", second, "-m", run, "--steps", 2, "-o", "ad", "--batch-size", 4)
    config = read_config(here / "ad").adapter
    assert (config.kind, config.rank) == ("bottleneck", 16)
    (record,) = records(run_ok("info", "ad", "--json"))
    assert record["commands"]["resume"] == "tinylm finetune-adapter --resume ad"
    assert "merge" not in record["commands"]
    assert_error(tinylm("finetune-lora", "--resume", "ad"), 2, "To continue it: tinylm finetune-adapter --resume ad.")
    run_ok("finetune-adapter", "--resume", "ad", "--model", run, "--steps", 4)
    again = tinylm("finetune-adapter", second, "-m", run, "-o", "ad", *BRIEF)
    assert_error(again, 2, "finetune-adapter --resume ad", sentences=4)
    ways = "Use it with --adapter, in tinylm sample and tinylm eval."
    assert_error(tinylm("merge-lora", "ad", "--out", "merged"), 2, "cannot be merged", ways)


def test_adapters_of_different_bases_are_an_error(second: Path, run: Path, adapter: Path, here: Path) -> None:
    run_ok("train", second, "--out", "other", "--steps", 1, "--init-from", run, "--batch-size", 4)
    run_ok("finetune-lora", second, "-m", "other", "-o", "ad", "--steps", 1, "--batch-size", 4)
    result = tinylm("sample", "--adapter", adapter, "--adapter", "ad")
    assert_error(result, 1, "was trained on another base model", sentences=3)


def test_equal_prompts_get_different_samples(run: Path, here: Path) -> None:
    (here / "prompts.jsonl").write_text(json.dumps({"prompt": "no"}) + "\n" + json.dumps({"prompt": "no"}) + "\n")
    options = ("-m", run, "-n", 30, "--seed", 3, "--json")
    for engine in ("torch", "llama.cpp"):
        found = records(run_ok("sample", "-f", "prompts.jsonl", *options, "--engine", engine))
        assert len({record["text"] for record in found}) == 2


def test_each_line_of_prompts_may_name_an_adapter(second: Path, run: Path, adapter: Path, here: Path) -> None:
    """The base is loaded once, and each text is the one that --adapter gives.

    An empty prompt starts as the texts of its adapter do: documents after an end of text, or lines as for the base.
    """
    (here / "documents.jsonl").write_text((json.dumps({"text": "no joy, no joy; no bed"}) + "\n") * 60)
    run_ok("finetune-adapter", "documents.jsonl", "-m", run, "-o", "ad", *BRIEF)
    options = ("-n", 30, "-t", 0, "--logprobs", 1, "--json")
    lora = str(adapter)
    prompts = [
        ("the", None),
        ("no", lora),
        ("the", "ad"),
        ("no", None),
        ("no", "ad=0.5"),
        ("the", lora),
        ("", "ad"),
        ("", None),
    ]
    lines = [json.dumps({"prompt": text, **({"adapter": name} if name else {})}) for text, name in prompts]
    (here / "prompts.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    found = records(run_ok("sample", "-m", run, "--prompt-file", "prompts.jsonl", *options))
    assert [record["prompt"] for record in found] == [text for text, _ in prompts]
    for record, (text, name) in zip(found, prompts, strict=True):
        alone = ("--adapter", name) if name else ()
        (expected,) = records(run_ok("sample", "-m", run, *alone, "-p", text, *options))
        assert record["text"] == expected["text"]
        own, others = ([token["logprob"] for token in one["logprobs"]] for one in (record, expected))
        assert own == pytest.approx(others, abs=1e-3)
        assert record.get("adapter") == name
    assert len({record["text"] for record in found}) > 3
    printed = run_ok("sample", "-m", run, "--prompt-file", "prompts.jsonl", "-n", 3).stdout
    assert printed.count("\n---\n") == len(prompts) - 1
    result = tinylm("sample", "--adapter", adapter, "-f", "prompts.jsonl")
    assert_error(result, 2, "some lines name their own")


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
    for model in ((), ("--model", base), ("--model", base / "last")):
        for out, name in ((base, lora), (lora, lora), (lora, lora / "last")):
            result = tinylm("merge-lora", name, *model, "--out", out, "--force")
            assert_error(result, 2, "never overwritten; choose another --out")
    assert snapshot(here) == before
