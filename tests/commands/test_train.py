"""tinylm train."""

import dataclasses
import inspect
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.machines import MATMUL_RATE
from tests.shell import (
    TINY,
    assert_error,
    assert_usage_error,
    copied,
    records,
    run_ok,
    same_tensors,
    snapshot,
    story,
    tinylm,
)
from tinylm.commands.train import train
from tinylm.console import Console
from tinylm.errors import ClosedOutputError
from tinylm.machine import round_rate
from tinylm.model_config import ModelConfig
from tinylm.ranks import Ranks
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config
from tinylm.run_directory.lock import lock_run
from tinylm.run_directory.metrics_log import read_metrics
from tinylm.training.graceful_stop import StopRequest
from tinylm.training_config import TrainingConfig

FILES = {"config.json", "tokenizer.json", "metrics.jsonl", "model.safetensors", "last"}
LAST_RECORD = {"run", "step", "val_loss", "best_step", "best_val_loss", "parameters", "seconds", "stopped_by"}
LOGGED = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
EVALUATED = {"step", "val_loss", "seconds"}


def test_stdout_is_the_path_and_nothing_else(corpus: Path, here: Path) -> None:
    result = run_ok("train", corpus, "--steps", 2, *TINY)
    assert result.stdout == "checkpoints/corpus\n"
    assert {path.name for path in (here / "checkpoints/corpus").iterdir()} == FILES
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["corpus"]


def test_the_plan_is_printed_first(corpus: Path) -> None:
    lines = run_ok("train", corpus, "--steps", 2, *TINY).stderr.splitlines()
    titles = ("On", "tokenizer:", "text:", "model:", "batch:", "length:", "time:", "memory:")
    assert [line.split()[0] for line in lines[: len(titles)]] == list(titles)
    assert "cpu" in lines[0] and "requested" not in lines[0]
    assert "1 layers, 2 heads, width 16, context 16" in lines[3]
    assert lines[-1].startswith("Best validation loss: ")
    assert "all steps are done" in lines[-2]


def test_quiet_leaves_stderr_empty(corpus: Path) -> None:
    result = run_ok("train", corpus, "--steps", 2, *TINY, "--quiet")
    assert (result.stdout, result.stderr) == ("checkpoints/corpus\n", "")


def test_json_prints_the_lines_of_metrics_jsonl_and_then_the_result(corpus: Path, here: Path) -> None:
    options = ("--steps", 4, "--log-every", 2, "--eval-every", 2, *TINY, "--json")
    *lines, last = records(run_ok("train", corpus, *options))
    assert [set(line) for line in lines] == [EVALUATED, LOGGED, EVALUATED, LOGGED, EVALUATED]
    assert [line["step"] for line in lines] == [0, 2, 2, 4, 4]
    assert set(last) == LAST_RECORD
    assert (last["run"], last["step"], last["stopped_by"]) == ("checkpoints/corpus", 4, "steps")
    assert last["best_val_loss"] == min(line["val_loss"] for line in lines if "val_loss" in line)
    metrics = (here / "checkpoints/corpus/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in metrics] == lines


def test_parameters_in_json_are_those_of_the_model(corpus: Path, here: Path) -> None:
    last = records(run_ok("train", corpus, "--steps", 1, *TINY, "--json"))[-1]
    model, *_ = load_model(here / "checkpoints/corpus")
    assert last["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_dry_run_prints_the_plan_and_writes_nothing(corpus: Path, here: Path) -> None:
    before = snapshot(here)
    result = run_ok("train", corpus, "--steps", 2, *TINY, "--dry-run")
    assert "model:" in result.stdout and "memory:" in result.stdout
    assert re.search(r"^model: .*, untied$", result.stdout, re.MULTILINE), "of two steps"
    assert "untied" not in run_ok("train", corpus, "--steps", 2, *TINY, "--tie", "--dry-run").stdout
    assert snapshot(here) == before
    assert run_ok("train", corpus, "--steps", 2, *TINY, "--dry-run", "--quiet").stdout == result.stdout
    (plan,) = records(run_ok("train", corpus, "--steps", 2, *TINY, "--dry-run", "--json"))
    assert (plan["steps"], plan["model"]["width"], plan["training"]["budget"]["steps"]) == (2, 16, 2)
    assert snapshot(here) == before


def test_dry_run_in_several_processes_plans_for_all_of_them(corpus: Path, here: Path) -> None:
    threads = torch.get_num_threads()
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    try:
        first = run_ok("train", corpus, "--dry-run", *TINY, env=variables | {"RANK": "0"})
        second = run_ok("train", corpus, "--dry-run", *TINY, env=variables | {"RANK": "1"})
        shards = run_ok("train", corpus, "--dry-run", *TINY, "--parallel", "fsdp", env=variables | {"RANK": "0"})
    finally:
        torch.set_num_threads(threads)
    assert "in 2 processes" in first.stderr and "4 sequences per step" in first.stdout
    assert "MB in the first of 2 processes, with a replica of the model in each" in first.stdout
    assert "MB in the first of 2 processes, with a shard of the model in each" in shards.stdout
    assert second.output == ""


def test_the_plan_does_not_depend_on_how_busy_the_machine_is(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With contradictory timings: the first ones are kept in the machine profile, and recorded in the plan."""
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    monkeypatch.setattr("tinylm.device.must_compare_bf16", lambda device: True)
    monkeypatch.setattr("tinylm.device.computes_bf16", lambda device: True)
    monkeypatch.setattr("tinylm.machine.must_compare_bf16", lambda device: True)
    commands = [("--steps", 300), ("--epochs", 2), ("--time", "2m")]

    def plans(rates: dict[str, float]) -> list[str]:
        monkeypatch.setattr("tinylm.machine._measure_matmul_rate", lambda device, dtype: rates[dtype])
        return [run_ok("train", corpus, *command, "--dry-run", "--json").stdout for command in commands]

    quiet = plans({"fp32": 3e11, "bf16": 9e11})
    assert {json.loads(plan)["runtime"]["dtype"] for plan in quiet} == {"bf16"}
    assert all(8e11 < json.loads(plan)["runtime"]["matmul_rate"] < 1e12 for plan in quiet)
    assert plans({"fp32": 2e10, "bf16": 1e9}) == quiet
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    busy = plans({"fp32": 2e10, "bf16": 1e9})
    assert all(a != b for a, b in zip(quiet, busy, strict=True)), "the timings affect the plan"


def test_a_run_records_the_matmul_rate_of_its_plan(corpus: Path, here: Path) -> None:
    run_ok("train", corpus, "--steps", 1, *TINY)
    runtime = read_config(here / "checkpoints/corpus").runtime
    assert runtime is not None and runtime.matmul_rate == round_rate(MATMUL_RATE)
    assert "matmul rate" in run_ok("info", "checkpoints/corpus").stdout


def test_a_machine_profile_that_others_can_write_is_one_warning(corpus: Path) -> None:
    (Path(os.environ["TINYLM_CACHE"]) / "machine").chmod(0o777)
    result = run_ok("train", corpus, "--steps", 1, *TINY, "--dry-run")
    assert result.stderr.count("the same settings may give different results") == 1


@pytest.mark.parametrize("name, run", [("my text.v2.txt", "my text.v2"), ("folder", "folder"), ("-", "stdin")])
def test_the_default_directory_is_named_after_the_corpus(name: str, run: str, here: Path) -> None:
    text = story(1500)
    if name == "folder":
        (here / name).mkdir()
        (here / name / "a.txt").write_text(text)
    elif name != "-":
        (here / name).write_text(text)
    result = run_ok("train", name, "--steps", 1, *TINY, stdin=text)
    assert result.stdout == f"checkpoints/{run}\n"


def test_an_existing_run_at_out_is_an_error_with_the_alternatives(run: Path, here: Path, corpus: Path) -> None:
    path = copied(run, here / "checkpoints" / "corpus")
    before = snapshot(here)
    ways = ("tinylm train --resume checkpoints/corpus", "--force", "--out")
    assert_error(
        tinylm("train", corpus, "--steps", 1, *TINY), 2, "checkpoints/corpus already holds a run", *ways, sentences=4
    )
    assert snapshot(here) == before
    load_model(path)


def test_force_replaces_a_run(run: Path, here: Path, corpus: Path) -> None:
    path = copied(run, here / "old")
    run_ok("train", corpus, "--out", path, "--force", "--steps", 1, *TINY, "--seed", 5)
    config = read_config(path)
    assert config.training is not None and config.training.seed == 5
    assert [entry.name for entry in here.iterdir() if entry.name.startswith(".")] == []


def test_force_never_deletes_a_folder_with_other_files(here: Path, corpus: Path) -> None:
    (here / "photos").mkdir()
    (here / "photos/beach.jpg").write_bytes(b"sand")
    before = snapshot(here)
    result = tinylm("train", corpus, "--out", "photos", "--force", "--steps", 1, *TINY)
    assert_error(result, 2, "photos contains files that do not belong to a run (beach.jpg)", "--out")
    assert snapshot(here) == before


def test_force_keeps_the_old_run_if_the_new_one_cannot_start(run: Path, here: Path) -> None:
    path = copied(run, here / "old")
    before = snapshot(path)
    assert_error(tinylm("train", "missing.txt", "--out", path, "--force"), 2, "'missing.txt'")
    assert snapshot(path) == before


def test_out_may_be_an_empty_folder_but_not_a_link(run: Path, corpus: Path, here: Path) -> None:
    (here / "empty").mkdir()
    run_ok("train", corpus, "--out", "empty", "--steps", 1, *TINY)
    load_model(here / "empty")
    path = copied(run, here / "real")
    (here / "link").symlink_to(path)
    before = snapshot(here)
    assert_error(
        tinylm("train", corpus, "--out", "link", "--force", "--steps", 1, *TINY), 2, "link is a link", str(path)
    )
    assert snapshot(here) == before


def test_suggested_commands_are_quoted_for_the_shell(run: Path, corpus: Path, here: Path) -> None:
    copied(run, here / "my run")
    result = tinylm("train", corpus, "--out", "my run", "--steps", 1, *TINY)
    assert_error(result, 2, "tinylm train --resume 'my run'", sentences=4)


def test_after_a_signal_before_the_first_save_nothing_is_written(
    corpus: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = StopRequest.__init__

    def signalled(self: StopRequest, ranks: Ranks) -> None:
        started(self, ranks)
        self.signal_number = 2

    monkeypatch.setattr(StopRequest, "__init__", signalled)
    before = snapshot(here)
    result = tinylm("train", corpus, "--steps", 1, *TINY)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("\nStopped before the first save; nothing was written.\n")
    assert snapshot(here) == before


@pytest.mark.parametrize("out", [".", ".."])
def test_out_cannot_be_the_working_directory_or_its_parent(out: str, corpus: Path, here: Path) -> None:
    assert_error(tinylm("train", corpus, "--out", out, "--steps", 1, *TINY), 2, "--out")
    assert [path.name for path in here.iterdir()] == [corpus.name]


def test_missing_parent_folders_of_out_are_created(corpus: Path, here: Path) -> None:
    assert run_ok("train", corpus, "--out", "a/b/c", "--steps", 1, *TINY).stdout == "a/b/c\n"
    load_model(here / "a/b/c")


def test_val_data_is_the_validation_text(corpus: Path, here: Path) -> None:
    (here / "val.txt").write_text(story(500, seed=3))
    run_ok("train", corpus, "--val-data", "val.txt", "--steps", 1, *TINY)
    data = read_config(here / "checkpoints/corpus").data
    assert data is not None
    assert data.val_corpus == (str(here / "val.txt"),)
    assert data.train_characters == len(corpus.read_text())
    assert data.val_tokens == len((here / "val.txt").read_text())


def test_val_data_may_be_standard_input(corpus: Path, here: Path) -> None:
    text = story(500, seed=3)
    run_ok("train", corpus, "--val-data", "-", "--steps", 1, *TINY, stdin=text)
    data = read_config(here / "checkpoints/corpus").data
    assert data is not None and data.val_tokens == len(text)
    run_ok("train", "--resume", "checkpoints/corpus", "--steps", 2)


def test_standard_input_cannot_be_both_training_and_validation_text() -> None:
    result = tinylm("train", "-", "--val-data", "-", "--steps", 1, *TINY, stdin=story(500))
    assert_error(result, 2, "Standard input", "--val-data")


def test_val_fraction_is_a_fraction_of_the_characters_at_the_end(corpus: Path, here: Path) -> None:
    run_ok("train", corpus, "--val-fraction", "0.25", "--steps", 1, *TINY)
    data = read_config(here / "checkpoints/corpus").data
    assert data is not None
    assert data.val_tokens == int(len(corpus.read_text()) * 0.25)


def test_documents_of_folders_and_jsonl_are_joined_by_the_end_of_text_token(here: Path) -> None:
    text = story(900)
    (here / "books").mkdir()
    for name in ("a.txt", "b.txt"):
        (here / "books" / name).write_text(text)
    (here / "books" / ".hidden.txt").write_text("%%%")
    lines = [json.dumps({"body": text}) for _ in range(3)]
    (here / "more.jsonl").write_text("\n".join(lines) + "\n")
    run_ok("train", "books", "more.jsonl", "--text-key", "body", "--steps", 1, *TINY)
    data = read_config(here / "checkpoints/books").data
    assert data is not None
    assert (data.documents, data.characters) == (5, 5 * len(text))
    assert data.train_tokens + data.val_tokens == 5 * len(text) + 4


def test_texts_are_decoded_with_encoding_and_without_a_byte_order_mark(here: Path) -> None:
    text = story(1500).replace("said", "saïd")
    (here / "latin.txt").write_bytes(text.encode("latin-1"))
    (here / "mark.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    for name, encoding in (("latin", "latin-1"), ("mark", "utf-8")):
        run_ok("train", f"{name}.txt", "--encoding", encoding, "--steps", 1, *TINY)
    one, other = (read_config(here / "checkpoints" / name).data for name in ("latin", "mark"))
    assert one is not None and other is not None
    assert one.fingerprint == other.fingerprint
    assert one.characters == len(text)


def test_the_same_command_gives_the_same_weights(corpus: Path, here: Path) -> None:
    for name in ("a", "b"):
        run_ok("train", corpus, "--out", name, "--steps", 3, *TINY, "--dropout", "0.1", "--seed", 3)
    run_ok("train", corpus, "--out", "c", "--steps", 3, *TINY, "--dropout", "0.1", "--seed", 4)
    a, b, c = (here / name / "last/model.safetensors" for name in "abc")
    assert same_tensors(a, b)
    assert not same_tensors(a, c)


def test_patience_stops_a_run_that_does_not_improve(corpus: Path) -> None:
    options = ("--steps", 50, "--patience", 2, "--eval-every", 1, "--lr", "1e-12", "--warmup-steps", 0, *TINY)
    last = records(run_ok("train", corpus, *options, "--json"))[-1]
    assert last["stopped_by"] == "patience"
    assert last["step"] < 50


def test_epochs_are_passes_over_the_training_text(corpus: Path, here: Path) -> None:
    last = records(run_ok("train", corpus, "--epochs", "0.5", *TINY, "--json"))[-1]
    data = read_config(here / "checkpoints/corpus").data
    assert data is not None
    assert last["stopped_by"] == "epochs"
    assert last["step"] == -(-data.train_tokens // (2 * 4 * 16))


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_run(corpus: Path, here: Path) -> None:
    options = (*TINY, "--dropout", "0.1", "--schedule", "constant", "--eval-every", 2, "--save-every", 2)
    run_ok("train", corpus, "--out", "whole", "--steps", 6, *options)
    run_ok("train", corpus, "--out", "parts", "--steps", 4, *options)
    result = run_ok("train", "--resume", "parts", "--steps", 6)
    assert result.stdout == "parts\n"
    assert "at step 4" in result.stderr
    for name in ("model", "optimizer"):
        assert same_tensors(here / f"whole/last/{name}.safetensors", here / f"parts/last/{name}.safetensors")
    steps = [[m["step"] for m in read_metrics(here / name)] for name in ("whole", "parts")]
    assert steps[0] == steps[1]


@pytest.mark.usefixtures("shelf_cache")
def test_steps_logged_after_the_last_save_are_not_in_the_metrics_twice(run: Path, here: Path) -> None:
    """As after the process was killed between two saves."""
    path = copied(run, here / "again")
    logged = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(logged + '{"step": 201, "loss": 9.0}\n{"step": 202, "lo')
    run_ok("train", "--resume", path, "--steps", 202, "--log-every", 1, "--eval-every", 300)
    metrics = (path / "metrics.jsonl").read_text()
    assert metrics.startswith(logged)
    assert [json.loads(line)["step"] for line in metrics[len(logged) :].splitlines()] == [201, 202, 202]


@pytest.mark.usefixtures("shelf_cache")
def test_resuming_may_change_budget_and_intervals_and_records_them(run: Path, here: Path) -> None:
    path = copied(run, here / "again")
    run_ok(
        "train",
        "--resume",
        path,
        "--steps",
        204,
        "--eval-every",
        2,
        "--save-every",
        3,
        "--log-every",
        1,
        "--patience",
        9,
    )
    training = read_config(path).training
    assert training is not None
    assert (training.budget.steps, training.eval_every, training.save_every, training.patience) == (204, 2, 3, 9)
    assert (training.batch_size, training.log_every) == (4, 1)


@pytest.mark.parametrize(
    "option, value",
    [
        ("--lr", "0.1"),
        ("--layers", 2),
        ("--seed", 1),
        ("--batch-size", 2),
        ("--val-fraction", "0.2"),
        ("--device", "cpu"),
        ("--out", "x"),
        ("--tokenizer", "bpe"),
        ("--text-key", "body"),
        ("--compile", "off"),
        ("--init-from", "x"),
    ],
)
def test_resuming_with_any_other_option_is_an_error(option: str, value: object, run: Path) -> None:
    before = snapshot(run)
    assert_error(tinylm("train", "--resume", run, option, value, "--steps", 300), 2, f"--resume fixes {option}")
    assert snapshot(run) == before


@pytest.mark.usefixtures("shelf_cache")
def test_other_options_from_variables_are_ignored_when_resuming(run: Path, here: Path) -> None:
    path = copied(run, here / "run")
    run_ok("train", "--resume", path, "--steps", 201, env={"TINYLM_TRAIN_DEVICE": "cpu"})


def test_a_run_that_another_process_is_writing_is_locked(run: Path, corpus: Path, here: Path) -> None:
    """It can neither be replaced nor resumed."""
    path = copied(run, here / "run")
    before = snapshot(path)
    with lock_run(path):
        for options in ((corpus, "--out", path, "--force", *TINY), ("--resume", path)):
            assert_error(tinylm("train", *options, "--steps", 300), 2, f"Another process is writing {path}", "--out")
    assert snapshot(path) == before
    assert [entry.name for entry in here.iterdir() if entry.name.startswith(".")] == []


def test_resuming_with_another_text_is_an_error(run: Path, corpus: Path) -> None:
    corpus.write_text("another")
    assert_error(tinylm("train", corpus, "--resume", run), 2, "is not the text that")


@pytest.mark.usefixtures("shelf_cache")
def test_a_failed_resume_does_not_change_the_recorded_budget(run: Path, here: Path) -> None:
    path = copied(run, here / "again")
    before = snapshot(path)
    assert_error(
        tinylm("train", "--resume", path, "--time", "0.000001s"), 2, "its --time of 0.000001s is the total", "--time"
    )
    assert snapshot(path) == before


def test_resuming_needs_the_corpus_only_if_the_cache_was_deleted(here: Path, corpus: Path) -> None:
    run_ok("train", corpus, "--steps", 1, *TINY)
    text = corpus.read_text()
    corpus.unlink()
    run_ok("train", "--resume", "checkpoints/corpus", "--steps", 2)
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    resume = ("train", "--resume", "checkpoints/corpus", "--steps", 3)
    corpus.write_text(text)
    assert_error(tinylm(*resume), 1, "is no longer in the cache; name its training text", "corpus.txt")
    corpus.write_text(text + "more")
    assert_error(tinylm(*resume, corpus), 2, "corpus.txt is not the text that checkpoints/corpus was trained on")
    moved = corpus.rename(here / "moved.txt")
    moved.write_text(text)
    run_ok(*resume, moved)


def test_a_run_trained_on_standard_input_keeps_its_tokens_and_can_be_resumed(here: Path) -> None:
    text = story(1500)
    assert run_ok("train", "-", "--steps", 1, *TINY, stdin=text).stdout == "checkpoints/stdin\n"
    path = here / "checkpoints/stdin"
    assert {entry.name for entry in path.iterdir()} == FILES | {"tokens"}
    assert not (Path(os.environ["TINYLM_CACHE"]) / "tokens").exists()
    moved = path.rename(here / "moved")
    run_ok("train", "--resume", moved, "--steps", 2)
    shutil.rmtree(moved / "tokens")
    assert_error(tinylm("train", "--resume", moved, "--steps", 3), 1, "is no longer in the cache", "standard input")


def test_init_from_takes_weights_shape_and_tokenizer_of_another_run(run: Path, corpus: Path, here: Path) -> None:
    before = snapshot(run)
    options = ("--steps", 1, "--batch-size", 4, "--lr", "1e-20", "--dtype", "fp32")
    run_ok("train", corpus, "--init-from", run, *options)
    old, old_config, old_tokenizer, _ = load_model(run)
    new, new_config, new_tokenizer, _ = load_model(here / "checkpoints/corpus")
    assert new_config.model == old_config.model
    assert new_tokenizer.sha256 == old_tokenizer.sha256
    for name, tensor in old.state_dict().items():
        assert tensor.allclose(new.state_dict()[name], rtol=0, atol=1e-12), name
    assert snapshot(run) == before


def test_model_and_tokenizer_options_are_errors_with_init_from(run: Path, corpus: Path) -> None:
    assert_error(
        tinylm("train", corpus, "--init-from", run, "--layers", 2, "--tokenizer", "bpe"), 2, "--tokenizer, --layers"
    )


def test_extend_vocab_adds_new_characters_to_the_model(run: Path, here: Path) -> None:
    """Known characters keep their ids and weights; the weights of new ones start as the mean of the old ones."""
    (here / "new.txt").write_text("the old man said λόγος\n" * 60)
    options = ("--init-from", run, "--extend-vocab", "--out", "new", "--batch-size", 4)
    result = run_ok("train", "new.txt", *options, "--steps", 1, "--lr", 1e-30, "--weight-decay", 0)
    assert "Added to the vocabulary: 'γ' (U+03B3)" in result.stderr
    old, _, old_tokenizer, _ = load_model(run)
    new, config, tokenizer, _ = load_model(here / "new")
    assert config.model.vocab_size == tokenizer.vocab_size == old_tokenizer.vocab_size + 5
    text = "the old man"
    assert tokenizer.encode(text).tolist() == old_tokenizer.encode(text).tolist()
    assert tokenizer.decode(tokenizer.encode("λόγος")) == "λόγος"
    weight = old.embedding.weight
    torch.testing.assert_close(new.embedding.weight[: len(weight)], weight)
    torch.testing.assert_close(new.embedding.weight[len(weight) :], weight.mean(0).expand(5, -1))
    assert run_ok("sample", "-m", "new", "-p", "λό", "-n", 3).stdout.startswith("λό")
    run_ok("train", "--resume", "new", "--steps", 2)


def test_extend_vocab_needs_init_from(corpus: Path, run: Path, here: Path) -> None:
    assert_error(tinylm("train", corpus, "--extend-vocab", *TINY), 2, "name it with --init-from")
    run_ok("train", corpus, "--init-from", run, "--extend-vocab", "--steps", 1, "--batch-size", 4)  # nothing is new


def test_unknown_characters_are_an_error_with_init_from(run: Path, here: Path) -> None:
    (here / "greek.txt").write_text(story(500) + "λόγος")
    assert_error(tinylm("train", "greek.txt", "--init-from", run, "--steps", 1), 2, "'λ' (U+03BB)", "5 of the text's")


def test_init_from_an_adapter_is_an_error_that_suggests_merging(adapter: Path, corpus: Path) -> None:
    assert_error(tinylm("train", corpus, "--init-from", adapter), 2, "is an adapter", "tinylm merge-lora")


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_the_tokenizer_may_come_from_a_file(kind: str, corpus: Path, here: Path) -> None:
    run_ok("train-tokenizer", corpus, "--kind", kind, "--out", "t.json")
    run_ok("train", corpus, "--tokenizer", "t.json", "--steps", 1, *TINY)
    assert (here / "checkpoints/corpus/tokenizer.json").read_bytes() == (here / "t.json").read_bytes()
    assert read_config(here / "checkpoints/corpus").tokenizer.kind == kind


def test_a_given_tokenizer_without_ids_for_the_text_is_an_error(corpus: Path, here: Path) -> None:
    (here / "abc.txt").write_text("abcabc" * 50)
    run_ok("train-tokenizer", "abc.txt", "--kind", "char", "--out", "t.json")
    assert_error(
        tinylm("train", corpus, "--tokenizer", "t.json", "--steps", 1), 2, "t.json has no id for", "' ' (U+0020)"
    )


def test_a_short_text_shortens_the_default_context_with_a_warning(here: Path) -> None:
    (here / "short.txt").write_text("to be or not to be, that is it")
    result = run_ok("train", "short.txt", "--steps", 1, "--layers", 1, "--heads", 2, "--width", 16)
    assert "Warning: The training text has only 27 tokens: the context is shortened to 26." in result.stderr
    assert read_config(here / "checkpoints/short").model.context == 26


def test_a_chosen_context_longer_than_the_text_is_an_error_with_both_lengths(here: Path) -> None:
    (here / "short.txt").write_text("to be or not to be, that is it")
    before = snapshot(here)
    result = tinylm("train", "short.txt", "--steps", 1, *TINY, "--context", 64)
    assert_error(result, 2, "27 tokens", "needs 65", "at most 26")
    assert snapshot(here) == before


def test_divergence_exits_with_3_and_keeps_the_last_saved_weights(corpus: Path, here: Path) -> None:
    options = ("--steps", 50, "--lr", 1000, "--warmup-steps", 0, "--schedule", "constant", *TINY)
    result = tinylm("train", corpus, *options)
    assert_error(result, 3, "is not finite", "--lr (it is 1000)", sentences=3)
    load_model(here / "checkpoints/corpus")


def test_overfitting_is_a_warning(here: Path) -> None:
    (here / "twice.txt").write_text("abcdefgh" * 30 + "hgfedcba" * 4)
    options = ("--steps", 60, "--eval-every", 20, "--lr", "0.05", "--warmup-steps", 0, *TINY)
    result = run_ok("train", "twice.txt", *options, "--quiet")
    assert "Warning: The validation loss rose from " in result.stderr


@pytest.mark.parametrize("time, seconds", [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400)])
def test_time_is_given_in_hours_minutes_and_seconds(time: str, seconds: float, corpus: Path) -> None:
    plan = run_ok("train", corpus, "--time", time, *TINY, "--dry-run").stdout
    minutes, rest = divmod(seconds, 60)
    expected = f"{minutes // 60}h {minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m {rest:02d}s"
    assert f"time:      about {expected}\n" in plan


def test_model_options_set_the_model_configuration(corpus: Path, here: Path) -> None:
    flags = "--kv-heads 1 --ffn-width 20 --position learned --norm layernorm --norm-placement post --no-norm-gain"
    flags += " --norm-bias --no-qk-norm --bias --activation relu --no-tie --dropout 0.25 --attention-dropout 0.125"
    run_ok("train", corpus, "--steps", 1, *TINY, *flags.split())
    model = read_config(here / "checkpoints/corpus").model
    assert (model.kv_heads, model.ffn_width, model.position, model.norm, model.norm_placement) == (
        1,
        20,
        "learned",
        "layernorm",
        "post",
    )
    assert (model.norm_gain, model.norm_bias, model.qk_norm, model.bias, model.tie) == (False, True, False, True, False)
    assert (model.activation, model.dropout, model.attention_dropout) == ("relu", 0.25, 0.125)


MODEL_FLAGS = {
    "rope_theta": ("--rope-theta 500", 500.0),
    "relative_clip": ("--position relative --relative-clip 3", 3),
    "residual": ("--no-residual", False),
    "attention_scale": ("--no-attention-scale", False),
    "scale_embedding": ("--scale-embedding", True),
    "initialisation": ("--initialisation gpt2", "gpt2"),
    "local_window": ("--local-window 5", 5),
    "local_layers": ("--local-window 5 --local-layers 1", (1,)),
    "experts": ("--experts 3", 3),
    "experts_per_token": ("--experts 3 --experts-per-token 1", 1),
    "expert_mode": ("--experts 3 --expert-mode merge", "merge"),
    "expert_balance": ("--experts 3 --expert-balance 0.5", 0.5),
}
TRAINING_FLAGS = {"average": ("--average 0.2", 0.2), "label_smoothing": ("--label-smoothing 0.3", 0.3)}


@pytest.mark.parametrize("part", [*MODEL_FLAGS, *TRAINING_FLAGS])
def test_an_option_sets_its_field_of_the_plan(part: str, corpus: Path) -> None:
    flags, value = (MODEL_FLAGS | TRAINING_FLAGS)[part]
    (plan,) = records(
        run_ok("train", corpus, "--steps", 1, "--dry-run", "--json", *TINY, "--layers", 2, *flags.split())
    )
    found = plan["model" if part in MODEL_FLAGS else "training"][part]
    assert (tuple(found) if isinstance(found, list) else found) == value


def test_every_field_of_the_model_and_training_configuration_has_an_option() -> None:
    """Except fields that follow from the text, the preset, the architecture or another option, or from an import."""
    options = {name for name, parameter in inspect.signature(train).parameters.items()}
    imported = {"head_dim", "rotary_dim", "rope_scaling", "local_rope_theta", "norm_epsilon", "norm_unit_offset"}
    imported |= {"qkv_bias", "output_bias", "ffn_bias", "parallel_residual", "embedding_scale"}
    imported |= {"attention_multiplier", "normalise_top_k"}
    assert {field.name for field in dataclasses.fields(ModelConfig)} - options == imported
    without = {"budget", "warmup", "eval_tokens", "epsilon", "objective"}
    assert {field.name for field in dataclasses.fields(TrainingConfig)} - options == without


def test_optimizer_options_set_the_training_configuration(corpus: Path, here: Path) -> None:
    flags = "--batch-size 6 --micro-batch 2 --lr 0.01 --min-lr 0.001 --warmup-steps 1 --schedule linear"
    flags += " --weight-decay 0.2 --beta1 0.8 --beta2 0.9 --grad-clip 0.5 --optimizer adam --compile off"
    run_ok("train", corpus, "--steps", 2, *TINY, *flags.split())
    config = read_config(here / "checkpoints/corpus")
    assert config.training is not None and config.runtime is not None
    t = config.training
    assert (t.batch_size, t.micro_batch, t.lr, t.min_lr, t.warmup) == (6, 2, 0.01, 0.001, 0.5)
    assert (t.schedule, t.weight_decay, t.beta1, t.beta2, t.grad_clip) == ("linear", 0.2, 0.8, 0.9, 0.5)
    assert (t.optimizer, config.runtime.compile) == ("adam", False)


OUT_OF_RANGE = (
    ("--steps 0", "--steps is 0"),
    ("--batch-size 0", "--batch-size is 0"),
    ("--batch-size -3", "--batch-size is -3"),
    ("--micro-batch 0", "--micro-batch is 0"),
    ("--micro-batch 5", "--micro-batch is 5; it must be at most --batch-size (4)"),
    ("--vocab-size 0", "--vocab-size is 0"),
    ("--vocab-size 256 --tokenizer bpe", "--vocab-size is 256; a BPE tokenizer needs 257"),
    ("--seed -1", "--seed is -1"),
    ("--seed 9223372036854775808", "--seed is 9223372036854775808"),
    ("--eval-every 0", "--eval-every is 0"),
    ("--save-every 0", "--save-every is 0"),
    ("--log-every 0", "--log-every is 0"),
    ("--patience 0", "--patience is 0"),
    ("--lr 0", "--lr is 0.0"),
    ("--lr nan", "--lr is nan"),
    ("--min-lr 1", "--min-lr is 1.0; it must be at most --lr ("),
    ("--warmup-steps 3", "--warmup-steps is more than the whole run"),
    ("--warmup-steps -1", "--warmup-steps is -1"),
    ("--grad-clip -1", "--grad-clip is -1.0"),
    ("--weight-decay -1", "--weight-decay is -1.0"),
    ("--beta1 1", "--beta1 is 1.0"),
    ("--val-fraction 0", "--val-fraction is 0.0"),
    ("--val-fraction 1", "--val-fraction is 1.0"),
    ("--val-fraction nan", "--val-fraction is nan"),
    ("--dropout 1", "--dropout is 1.0"),
    ("--layers 0", "--layers is 0"),
    ("--heads 0", "--heads is 0"),
    ("--heads 3", "--heads is 3; it must divide --width (16)"),
    ("--kv-heads 3", "--kv-heads is 3; it must divide --heads (2)"),
    ("--width 0", "--width is 0"),
    ("--context 0", "--context is 0"),
    ("--rope-theta 0", "--rope-theta is 0.0"),
    ("--preset bert", "--preset is 'bert'; it must be one of: modern, gpt2, original"),
    ("--size huge", "--size is 'huge'"),
    ("--position fourier", "--position is 'fourier'; it must be one of: rope"),
    ("--norm batchnorm", "--norm is 'batchnorm'"),
    ("--norm-placement middle", "--norm-placement is 'middle'"),
    ("--activation tanh", "--activation is 'tanh'"),
    ("--schedule step", "--schedule is 'step'"),
    ("--optimizer sgd", "--optimizer is 'sgd'"),
    ("--compile maybe", "--compile is 'maybe'; it must be one of: auto, on, off"),
    ("--device tpu", "--device is 'tpu'; it must be one of: auto, cuda, mps, cpu"),
    ("--dtype int8", "--dtype is 'int8'; it must be one of: auto, fp32, bf16, fp16"),
    ("--dtype fp16 --device cpu", "--dtype fp16 needs a GPU"),
    ("--encoding utf-9", "--encoding is 'utf-9', which is unknown"),
    ("--tokenizer missing.json", "--tokenizer is 'missing.json'; it must be auto"),
)
CONTRADICTIONS = (
    ("--epochs 1", "--steps and --epochs contradict each other"),
    ("--time 5m", "--steps and --time contradict each other"),
    ("--val-data corpus.txt --val-fraction 0.5", "--val-data and --val-fraction contradict each other"),
    ("--tokenizer char --vocab-size 300", "--vocab-size is for BPE"),
)


@pytest.mark.parametrize("flags, message", OUT_OF_RANGE + CONTRADICTIONS)
def test_invalid_values_are_reported_with_their_flags_and_nothing_is_written(
    flags: str, message: str, corpus: Path, here: Path
) -> None:
    before = snapshot(here)
    assert_error(tinylm("train", corpus.name, "--steps", 2, *TINY, *flags.split()), 2, message)
    assert snapshot(here) == before


@pytest.mark.parametrize(
    "flags, message",
    [("--time 0", "--time is 0.0"), ("--epochs 0", "--epochs is 0.0"), ("--epochs nan", "--epochs is nan")],
)
def test_a_budget_that_is_not_positive_is_an_error(flags: str, message: str, corpus: Path) -> None:
    assert_error(tinylm("train", corpus.name, *TINY, *flags.split()), 2, message, "greater than 0")


@pytest.mark.parametrize("time", ["soon", "1h2h", ".", "5 minutes", "-5", "h"])
def test_an_invalid_duration_is_a_usage_error_with_an_example(time: str, corpus: Path) -> None:
    assert_usage_error(
        tinylm("train", corpus.name, *TINY, f"--time={time}"), f"{time!r} is not a length of time", "1h30m"
    )


@pytest.mark.parametrize("flags", ["--steps many", "--layers 1.5", "--time soon", "--no-layers 1", "--lr fast"])
def test_values_of_the_wrong_type_are_usage_errors(flags: str, corpus: Path, here: Path) -> None:
    before = snapshot(here)
    assert_usage_error(tinylm("train", corpus, *TINY, *flags.split()), flags.split()[0])
    assert snapshot(here) == before


def test_without_a_text_the_error_has_an_example_command() -> None:
    assert_error(tinylm("train"), 2, "tinylm train corpus.txt", "standard input")


def test_the_last_evaluation_is_part_of_the_last_save(corpus: Path, here: Path) -> None:
    """Regression: the save once preceded the evaluation at the last step, and a resumed run lost its best weights."""
    last = records(
        run_ok("train", corpus, "--steps", 6, "--save-every", 3, "--eval-every", 4, *TINY, "--lr", 0.01, "--json")
    )[-1]
    run = here / "checkpoints/corpus"
    state = RunDirectory(run).load_last(read_config(run)).state
    assert (state["last_eval_step"], state["best_step"], state["best_loss"]) == (
        6,
        last["best_step"],
        last["best_val_loss"],
    )


def test_training_continues_when_stdout_is_closed(corpus: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(console: Console, values: object) -> None:
        raise ClosedOutputError

    monkeypatch.setattr(Console, "record", leave)
    assert tinylm("train", corpus, "--steps", 4, *TINY, "--json").exit_code == 0
    run = here / "checkpoints/corpus"
    assert RunDirectory(run).load_last(read_config(run)).state["step"] == 4


def test_standard_input_named_twice_is_an_error(corpus: Path) -> None:
    assert_error(tinylm("train", "-", corpus, "-", *TINY, stdin=story(100)), 2, "named twice")


def test_files_of_a_run_are_as_readable_as_its_folder(corpus: Path, here: Path) -> None:
    run_ok("train", corpus, "--steps", 1, *TINY)
    run = here / "checkpoints/corpus"
    for file in (run / "model.safetensors", run / "last" / "optimizer.safetensors", run / "config.json"):
        assert file.stat().st_mode & 0o666 == run.stat().st_mode & 0o666


def test_hidden_folders_of_the_user_are_kept(corpus: Path, here: Path) -> None:
    for name in (".corpus.old", ".corpus.new"):
        (here / "checkpoints" / name).mkdir(parents=True)
        (here / "checkpoints" / name / "mine").write_text("mine")
    run_ok("train", corpus, "--steps", 1, *TINY)
    assert (here / "checkpoints/.corpus.old/mine").exists() and (here / "checkpoints/.corpus.new/mine").exists()


def test_init_from_uses_the_schedule_of_the_preset(corpus: Path, here: Path) -> None:
    run_ok("train", corpus, "--steps", 1, "--preset", "gpt2", *TINY)
    run_ok("train", corpus, "--steps", 1, "--init-from", "checkpoints/corpus", "--out", "second")
    training = read_config(here / "second").training
    assert training is not None and training.schedule == "cosine"
