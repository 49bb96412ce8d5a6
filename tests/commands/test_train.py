"""tinylm train: its output, the run directory and the texts."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.machines import MATMUL_RATE
from tests.shell import (
    FILES,
    TINY,
    assert_error,
    copied,
    edit_config,
    records,
    run_ok,
    same_tensors,
    snapshot,
    story,
    tinylm,
)
from tinylm.console import Console
from tinylm.errors import ClosedOutputError
from tinylm.machine import round_measured
from tinylm.ranks import Ranks
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config, summarise
from tinylm.training.graceful_stop import StopRequest

LAST_RECORD = {"run", "step", "val_loss", "val_bits_per_byte", "best_step", "best_val_loss", "best_val_bits_per_byte"}
LAST_RECORD |= {"parameters", "seconds", "stopped_by"}
LOGGED = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
EVALUATED = {"step", "val_loss", "val_bits_per_byte", "seconds"}


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


def test_validation_losses_have_bits_per_byte_that_models_with_different_tokenizers_share(here: Path) -> None:
    """By definition: nats of the scored tokens / ln 2 / their bytes in UTF-8."""
    text = "the söng of the séa, wëary; " * 60
    (here / "t.txt").write_text(text)
    (here / "old").mkdir()
    for tokenizer in ("char", "bpe"):
        options = ("--tokenizer", tokenizer, "--steps", 2, "--eval-every", 1, *TINY, "--out", tokenizer, "--json")
        *lines, last = records(run_ok("train", "t.txt", *options))
        encoder = load_model(here / tokenizer).tokenizer
        val = text[-int(len(text) * 0.1) :]
        ids = encoder.encode(val)
        scored_text = val.removeprefix(encoder.decode(ids[:1]))
        scale = (len(ids) - 1) / math.log(2) / len(scored_text.encode())
        evaluated = [line for line in lines if "val_loss" in line]
        for line in evaluated:
            assert line["val_bits_per_byte"] == pytest.approx(line["val_loss"] * scale, rel=1e-12)
        assert last["best_val_bits_per_byte"] == min(line["val_bits_per_byte"] for line in evaluated)
        assert summarise(here / tokenizer)["val_bits_per_byte"] == last["best_val_bits_per_byte"]
        (scored,) = records(run_ok("eval", "-m", tokenizer, "--json"))
        assert scored["bits_per_byte"] == pytest.approx(last["best_val_bits_per_byte"], rel=1e-5)
        edit_config(here / tokenizer, data={"val_bytes": None})  # a run of an older version
        assert summarise(here / tokenizer)["val_bits_per_byte"] is None


def test_the_last_line_has_bits_per_byte_in_front_and_only_on_plain_text(corpus: Path, here: Path) -> None:
    nats = r"\d\.\d{4} nats per token"
    for architecture, loss in (("decoder", rf"\d\.\d{{4}} bits per byte \({nats}\)"), ("encoder", nats)):
        options = ("--architecture", architecture, "--steps", 1, *TINY, "--force")
        last_line = run_ok("train", corpus, *options).stderr.splitlines()[-1]
        assert re.fullmatch(rf"Best validation loss: {loss}, at step [01]\.", last_line)


def test_parameters_in_json_are_those_of_the_model(corpus: Path, here: Path) -> None:
    last = records(run_ok("train", corpus, "--steps", 1, *TINY, "--json"))[-1]
    model, *_ = load_model(here / "checkpoints/corpus")
    assert last["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_dry_run_prints_the_plan_and_writes_nothing(corpus: Path, here: Path) -> None:
    before = snapshot(here)
    result = run_ok("train", corpus, "--steps", 2, *TINY, "--dry-run")
    assert "model:" in result.stdout and "memory:" in result.stdout
    assert re.search(r"^model: .*, untied$", result.stdout, re.MULTILINE), "of two steps"
    longer = run_ok("train", corpus, "--steps", 2, *TINY, "--tie", "--context", 256, "--dry-run").stdout
    assert "untied" not in longer
    assert re.search(r"^batch: .* x 256 tokens per step, in sequences of 64, 128, then 256$", longer, re.MULTILINE)
    assert snapshot(here) == before
    assert run_ok("train", corpus, "--steps", 2, *TINY, "--dry-run", "--quiet").stdout == result.stdout
    (plan,) = records(run_ok("train", corpus, "--steps", 2, *TINY, "--dry-run", "--json"))
    assert (plan["steps"], plan["model"]["width"], plan["training"]["budget"]["steps"]) == (2, 16, 2)
    assert snapshot(here) == before


def test_the_plan_says_whether_averaged_weights_are_saved(corpus: Path, here: Path) -> None:
    def planned(*options: object) -> str:
        return run_ok("train", corpus, *options, *TINY, "--dry-run").stdout

    averaged = r"^length: .* passes over the text; averaged weights are saved$"
    assert re.search(averaged, planned("--epochs", 7), re.MULTILINE)
    assert re.search(averaged, planned("--steps", 2, "--average", 0.1), re.MULTILINE)
    assert "averaged" not in planned("--epochs", 7, "--average", 0)
    assert "averaged" not in planned("--steps", 2)


def test_dry_run_in_several_processes_plans_for_all_of_them(corpus: Path, here: Path) -> None:
    threads = torch.get_num_threads()
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    try:
        first = run_ok("train", corpus, "--dry-run", *TINY, env=variables | {"RANK": "0", "LOCAL_RANK": "0"})
        second = run_ok("train", corpus, "--dry-run", *TINY, env=variables | {"RANK": "1", "LOCAL_RANK": "1"})
        shards = run_ok(
            "train", corpus, "--dry-run", *TINY, "--parallel", "fsdp", env=variables | {"RANK": "0", "LOCAL_RANK": "0"}
        )
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
    assert runtime is not None and runtime.matmul_rate == round_measured(MATMUL_RATE)
    assert "  matmul " in run_ok("info", "checkpoints/corpus", "--all").stdout


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


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_the_tokenizer_may_come_from_a_file(kind: str, corpus: Path, here: Path) -> None:
    run_ok("train-tokenizer", corpus, "--kind", kind, "--out", "t.json")
    run_ok("train", corpus, "--tokenizer", "t.json", "--steps", 1, *TINY)
    assert (here / "checkpoints/corpus/tokenizer.json").read_bytes() == (here / "t.json").read_bytes()
    assert read_config(here / "checkpoints/corpus").tokenizer.kind == kind


def test_a_short_text_shortens_the_default_context_with_a_warning(here: Path) -> None:
    (here / "short.txt").write_text("to be or not to be, that is it")
    result = run_ok("train", "short.txt", "--steps", 1, "--layers", 1, "--heads", 2, "--width", 16)
    assert "Warning: The training text has only 27 tokens: the context is shortened to 26." in result.stderr
    assert read_config(here / "checkpoints/short").model.context == 26


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


def test_training_continues_when_stdout_is_closed(corpus: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(console: Console, values: object) -> None:
        raise ClosedOutputError

    monkeypatch.setattr(Console, "record", leave)
    assert tinylm("train", corpus, "--steps", 4, *TINY, "--json").exit_code == 0
    run = here / "checkpoints/corpus"
    assert RunDirectory(run).load_last(read_config(run)).state["step"] == 4


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
