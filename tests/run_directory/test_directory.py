"""Saved runs are read back unchanged."""

import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.run_directory.saved_runs import (
    CONFIG,
    TOKENIZER,
    best_save,
    last_save,
    optimizer_of,
    save,
    saved_run,
    state_of,
    weights_of,
)
from tinylm.errors import TinyLMError
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_weights, summarise
from tinylm.run_directory.metrics_log import read_metrics


def names(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def test_loading_returns_what_was_saved_and_best_and_last_weights_are_saved_separately(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0, 1, 2)
    assert (best_save(tmp_path / "run"), last_save(tmp_path / "run")) == (2, 2)
    model, config, tokenizer, _ = load_model(tmp_path / "run")
    assert not model.training
    assert config == CONFIG
    assert tokenizer.sha256 == TOKENIZER.sha256
    run.save_last(weights_of(5), optimizer_of(5), state_of(5), CONFIG)
    assert (best_save(tmp_path / "run"), last_save(tmp_path / "run")) == (2, 5)


def test_a_run_directory_has_the_documented_files_and_no_pickle(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0, 1)
    run.append_metrics({"step": 1})
    assert names(tmp_path / "run") == {
        "config.json",
        "tokenizer.json",
        "metrics.jsonl",
        "model.safetensors",
        "last/model.safetensors",
        "last/optimizer.safetensors",
        "last/state.json",
        "last/manifest.json",
    }
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and file.suffix not in (".json", ".jsonl"):
            safetensors.torch.load_file(file)


def test_a_new_run_is_hidden_until_its_first_save(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, TOKENIZER)
    run.append_metrics({"step": 0})
    run.save_for_inference(weights_of(0), CONFIG, 0, 1.0)
    assert not (tmp_path / "run").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == [".run.tinylm-new"]
    run.save_last(weights_of(0), {}, state_of(0), CONFIG)  # before the first step, without optimizer state
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert RunDirectory(tmp_path / "run").load_last(CONFIG).read_optimizer() == {}
    assert read_metrics(run.path) == [{"step": 0}]


def test_weights_that_share_memory_or_are_not_contiguous_are_saved(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0)
    shared = torch.arange(12.0).reshape(3, 4)
    run.save_for_inference(
        {"a": shared, "b": shared.t(), "c": torch.tensor(1.0, dtype=torch.bfloat16)}, CONFIG, 1, None
    )
    tensors = read_weights(tmp_path / "run", CONFIG)
    assert torch.equal(tensors.tensors["b"], shared.t())
    assert (tensors.step, tensors.val_loss) == (1, None)


def test_a_summary_describes_both_saves_and_a_run_without_the_last_one_still_loads(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 3)
    run.save_last(weights_of(5), optimizer_of(5), state_of(5), CONFIG)
    summary = summarise(tmp_path / "run")
    assert summary.pop("saved") > 0
    assert summary == {
        "kind": "model",
        "parameters": sum(tensor.numel() for tensor in weights_of(0).values()),
        "step": 5,
        "best_step": 3,
        "val_loss": 0.25,
        "val_bits_per_byte": None,  # of a run without the number of bytes of its validation text
        "seconds": None,  # this state has none
    }
    shutil.rmtree(tmp_path / "run" / "last")
    assert summarise(tmp_path / "run")["step"] == 3
    with pytest.raises(TinyLMError, match=r"has no last/ folder, so it cannot be resumed"):
        last_save(tmp_path / "run")
    assert best_save(tmp_path / "run") == 3


def test_the_error_for_a_run_deleted_during_training_does_not_promise_an_intact_save(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 1)
    shutil.rmtree(tmp_path / "run")
    for write in (lambda: save(run, 2), lambda: run.append_metrics({"step": 2})):
        with pytest.raises(
            TinyLMError, match=r"run was deleted or moved during training, with everything that was saved"
        ) as e:
            write()
        assert "intact" not in str(e.value)


def test_records_after_a_step_and_the_evaluation_of_a_stop_are_dropped_and_a_truncated_line_is_skipped(
    tmp_path: Path,
) -> None:
    run = saved_run(tmp_path / "run", 0)
    assert read_metrics(run.path) == []
    run.truncate_metrics(3, 3)
    for step in range(5):
        run.append_metrics({"step": step, "loss": step / 3})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [record["step"] for record in read_metrics(run.path)] == [0, 1, 2, 3, 4]
    run.append_metrics({"step": 2, "val_loss": 1.0})
    run.truncate_metrics(2, 1)
    run.append_metrics({"step": 3})
    assert read_metrics(run.path) == [*({"step": s, "loss": s / 3} for s in range(3)), {"step": 3}]
