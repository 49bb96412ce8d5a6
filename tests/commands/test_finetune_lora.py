"""tinylm finetune-lora."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.shell import TINY, assert_error, copied, edit_config, records, run_ok, same_tensors, snapshot, tinylm
from tinylm.run_directory.loading import load_model, read_config

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
    assert settings is not None
    assert (settings.rank, settings.alpha, settings.dropout) == (5, 10.0, 0.0)
    assert settings.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (settings.base, settings.base_digest) == (str(run.resolve()), load_model(run)[3].digest)
    for name, options in (("a", ("--target", "key,value")), ("b", ("--target", "key", "--target", "value"))):
        settings = read_config(finetuned(second, run, name, *options, "--alpha", 3, "--dropout", 0.2)).adapter
        assert settings is not None and settings.targets == ("k_proj", "v_proj")
        assert (settings.alpha, settings.dropout) == (3.0, 0.2)


def test_a_renamed_base_is_found_and_a_moved_base_is_given_with_model(second: Path, run: Path, here: Path) -> None:
    copied(run, here / "base")
    finetuned(second, here / "base", "ad")
    expected = run_ok("sample", "--adapter", "ad", "-n", 20, "--seed", 1).stdout
    (here / "base").rename(here / "renamed")
    assert run_ok("sample", "--adapter", "ad", "-n", 20, "--seed", 1).stdout == expected
    (here / "elsewhere").mkdir()
    moved = (here / "renamed").rename(here / "elsewhere" / "base")
    commands = (("sample", "--adapter", "ad"), ("eval", "--adapter", "ad", second), ("finetune-lora", "--resume", "ad"))
    assert not (here / "base").exists()  # where it was when the adapter was trained
    for command in commands:
        message = "is neither beside it nor directly in checkpoints/"
        assert_error(tinylm(*command), 2, message, f"{here}/base", "--model")
    assert run_ok("sample", "--adapter", "ad", "-m", moved, "-n", 20, "--seed", 1).stdout == expected
    run_ok("finetune-lora", "--resume", "ad", "--model", moved, "--steps", 3)
    run_ok("finetune-lora", "--resume", "ad", "--steps", 4)  # the new place of the base is known


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


@pytest.mark.usefixtures("shelf_cache")
def test_a_resumed_adapter_has_the_weights_of_an_uninterrupted_run(second: Path, run: Path, here: Path) -> None:
    options = ("--schedule", "constant", "--eval-every", 2, "--save-every", 2, "--dropout", 0.2, "--target", "mlp")
    for name, steps in (("whole", 6), ("parts", 4)):
        run_ok("finetune-lora", second, "-m", run, "-o", name, "--steps", steps, "--batch-size", 4, *options)
    result = run_ok("finetune-lora", "--resume", "parts", "-m", run, "--steps", 6)
    assert result.stdout == "parts\n" and "at step 4" in result.stderr
    for name in ("adapter", "optimizer"):
        assert same_tensors(here / f"whole/last/{name}.safetensors", here / f"parts/last/{name}.safetensors")


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
