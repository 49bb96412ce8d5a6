"""tinylm train: its output, the run directory and the texts."""

import bz2
import gzip
import json
import math
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.machines import pretend_bf16
from tests.shell import FILES, TINY, assert_error, copied, edit_config, records, run_ok, snapshot, story, tinylm
from tinylm.run_directory.loading import load_model, read_config, summarise
from tinylm.run_directory.metrics_log import read_metrics
from tinylm.training.session import StopRequest

CORPUS = Path(__file__).parents[2] / "data" / "corpus.txt"

LAST_RECORD = {"run", "step", "val_loss", "val_bits_per_byte", "best_step", "best_val_loss", "best_val_bits_per_byte"}
LAST_RECORD |= {"parameters", "seconds", "stopped_by"}
LOGGED = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
EVALUATED = {"step", "val_loss", "val_bits_per_byte", "seconds"}


def test_stdout_is_the_path_and_nothing_else(corpus: Path, here: Path) -> None:
    for name in (".corpus.old", ".corpus.new"):
        (here / "checkpoints" / name).mkdir(parents=True)
        (here / "checkpoints" / name / "mine").write_text("mine")
    result = run_ok("train", corpus, "--steps", 2, *TINY, "--quiet")
    assert (result.stdout, result.stderr) == ("checkpoints/corpus\n", "")
    assert {path.name for path in (here / "checkpoints").iterdir()} == {"corpus", ".corpus.old", ".corpus.new"}
    assert all((here / "checkpoints" / name / "mine").exists() for name in (".corpus.old", ".corpus.new"))
    run = here / "checkpoints/corpus"
    assert {path.name for path in run.iterdir()} == FILES
    for file in ("model.safetensors", "last/optimizer.safetensors", "config.json"):
        assert (run / file).stat().st_mode & 0o666 == run.stat().st_mode & 0o666


def test_the_default_directory_is_named_after_the_corpus(here: Path) -> None:
    (here / "folder").mkdir()
    for name in ("my text.v2.txt", "folder/a.txt"):
        (here / name).write_text(story(1500))
    (here / "packed.txt.gz").write_bytes(gzip.compress(story(1500).encode()))
    names = {"my text.v2.txt": "my text.v2", "folder": "folder", "packed.txt.gz": "packed", "-": "stdin"}
    for name, run in names.items():
        stdin = bz2.compress(story(1500).encode())
        assert run_ok("train", name, "--steps", 1, *TINY, stdin=stdin).stdout == f"checkpoints/{run}\n"
    runs = (read_config(here / "checkpoints" / run).data for run in names.values())
    assert len({data.fingerprint for data in runs if data is not None}) == 1
    assert run_ok("train", "folder", "--out", "a/b/c", "--steps", 1, *TINY).stdout == "a/b/c\n"


def test_the_plan_is_printed_first(corpus: Path) -> None:
    lines = run_ok("train", corpus, "--steps", 2, *TINY).stderr.splitlines()
    titles = ("On", "tokenizer:", "text:", "model:", "batch:", "length:", "time:", "memory:")
    assert [line.split()[0] for line in lines[: len(titles)]] == list(titles)
    assert "cpu" in lines[0] and "requested" not in lines[0]
    assert "1 layer, 2 heads, width 16, context 16" in lines[3]
    best = next(number for number, line in enumerate(lines) if line.startswith("Best validation loss: "))
    assert "all steps are done" in lines[best - 1]


def test_json_prints_the_lines_of_metrics_jsonl_and_then_the_result(corpus: Path, here: Path) -> None:
    options = ("--steps", 4, "--log-every", 2, "--eval-every", 2, *TINY, "--json")
    *lines, last = records(run_ok("train", corpus, *options))
    assert [set(line) for line in lines] == [EVALUATED | {"val_tokens"}, LOGGED, EVALUATED, LOGGED, EVALUATED]
    assert [line["step"] for line in lines] == [0, 2, 2, 4, 4]
    assert set(last) == LAST_RECORD
    assert (last["run"], last["step"], last["stopped_by"]) == ("checkpoints/corpus", 4, "steps")
    assert last["best_val_loss"] == min(line["val_loss"] for line in lines if "val_loss" in line)
    assert last["parameters"] == sum(p.numel() for p in load_model(here / "checkpoints/corpus").network.parameters())
    metrics = (here / "checkpoints/corpus/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in metrics] == lines


def test_validation_losses_have_bits_per_byte_that_models_with_different_tokenizers_share(here: Path) -> None:
    """By definition: nats of the scored tokens / ln 2 / their bytes in UTF-8."""
    text = "the söng of the séa, wëary; " * 60
    (here / "t.txt").write_text(text)
    (here / "old").mkdir()
    for tokenizer in ("char", "bpe"):
        options = ("--tokenizer", tokenizer, "--steps", 2, "--eval-every", 1, *TINY, "--out", tokenizer)
        *lines, last = records(run_ok("train", "t.txt", "--val-fraction", 0.1, *options, "--json"))
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
    several = run_ok("train", corpus, "--epochs", 7, *TINY, "--dry-run").stdout
    assert "passes over the text; averaged weights are saved\n" in several and "averaged" not in result.stdout
    (plan,) = records(run_ok("train", corpus, "--steps", 2, *TINY, "--dry-run", "--json"))
    assert (plan["steps"], plan["model"]["width"], plan["training"]["budget"]["steps"]) == (2, 16, 2)
    assert snapshot(here) == before


def test_dry_run_in_several_processes_plans_for_all_of_them(corpus: Path) -> None:
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
    pretend_bf16(monkeypatch, True)
    commands = [("--steps", 300), ("--epochs", 2), ("--time", "2m")]

    def plans(rates: dict[str, float]) -> list[str]:
        monkeypatch.setattr("tinylm.machine.measure._measure_matmul_rate", lambda device, dtype, clock: rates[dtype])
        return [run_ok("train", corpus, *command, "--dry-run", "--json").stdout for command in commands]

    quiet = plans({"fp32": 3e11, "bf16": 9e11})
    assert {json.loads(plan)["runtime"]["dtype"] for plan in quiet} == {"bf16"}
    assert all(8e11 < json.loads(plan)["runtime"]["matmul_rate"] < 1e12 for plan in quiet)
    assert plans({"fp32": 2e10, "bf16": 1e9}) == quiet
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    busy = plans({"fp32": 2e10, "bf16": 1e9})
    assert all(a != b for a, b in zip(quiet, busy, strict=True)), "the timings affect the plan"


def test_a_run_is_replaced_only_with_force_and_when_the_new_one_can_start(run: Path, here: Path, corpus: Path) -> None:
    path = copied(run, here / "my run")
    before = snapshot(here)
    new = ("train", corpus, "--out", "my run", "--steps", 1, *TINY, "--seed", 5)
    ways = ("tinylm train --resume 'my run'", "--force", "--out")
    assert_error(tinylm(*new), 2, "my run already holds a run", *ways, sentences=4)
    assert_error(tinylm("train", "missing.txt", "--out", path, "--force"), 2, "'missing.txt'")
    (here / "link").symlink_to(path)
    result = tinylm("train", corpus, "--out", "link", "--force", "--steps", 1, *TINY)
    assert_error(result, 2, "link is a link", str(path))
    (here / "link").unlink()
    assert snapshot(here) == before
    run_ok(*new, "--force")
    config = read_config(path)
    assert config.training.seed == 5
    assert [entry.name for entry in here.iterdir() if entry.name.startswith(".")] == []


def test_a_signal_before_the_first_step_leaves_nothing_and_says_so(
    corpus: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = StopRequest.__init__

    def signalled(self: StopRequest, *arguments: Any) -> None:
        started(self, *arguments)
        self.signal_number = 2

    monkeypatch.setattr(StopRequest, "__init__", signalled)
    before = snapshot(here)
    result = tinylm("train", corpus, "--steps", 1, *TINY)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("\nStopped before the first step; nothing was written.\n")
    assert snapshot(here) == before


def test_the_validation_text_is_given_or_the_end_of_the_corpus(corpus: Path, here: Path) -> None:
    text = corpus.read_text()
    (here / "val.txt").write_bytes(story(500, seed=3).replace("said", "saïd").encode("latin-1"))
    size = len((here / "val.txt").read_bytes())
    for name, options, characters in (
        ("file", ("--val-data", "val.txt", "--encoding", "latin-1"), size),
        ("stdin", ("--val-data", "-"), 500),
        ("fraction", ("--val-fraction", 0.25), int(len(text) * 0.25)),
    ):
        run_ok("train", corpus, *options, "--out", name, "--steps", 1, *TINY, stdin=story(1000)[:500])
        data = read_config(here / name).data
        assert (data.val_tokens, data.train_characters) == (characters, len(text) - characters * (name == "fraction"))
        assert data.val_corpus == {"file": (str(here / "val.txt"),), "stdin": ("-",)}.get(name, ())
    run_ok("train", "--resume", "stdin", "--steps", 2)


def test_a_run_ends_by_patience_or_after_its_epochs(corpus: Path, here: Path) -> None:
    options = ("--steps", 50, "--patience", 2, "--eval-every", 1, "--lr", "1e-12", "--warmup-steps", 0, *TINY)
    last = records(run_ok("train", corpus, *options, "--json"))[-1]
    assert last["stopped_by"] == "patience"
    assert last["step"] < 50
    last = records(run_ok("train", corpus, "--epochs", "0.5", "--out", "half", *TINY, "--json"))[-1]
    data = read_config(here / "half").data
    assert (last["stopped_by"], last["step"]) == ("epochs", -(-data.train_tokens // (2 * 4 * 16)))


def test_divergence_exits_with_3_and_keeps_the_last_weights_and_overfitting_warns(corpus: Path, here: Path) -> None:
    options = ("--steps", 50, "--lr", 1000, "--warmup-steps", 0, "--schedule", "constant", *TINY)
    result = tinylm("train", corpus, *options)
    assert_error(result, 3, "is not finite", "--lr (it is 1000)", sentences=3)
    load_model(here / "checkpoints/corpus")
    (here / "random.txt").write_text("".join(random.Random(0).choices("abcdefgh", k=150)))
    options = ("--steps", 160, "--eval-every", 40, "--lr", "0.05", "--schedule", "constant", "--warmup-steps", 0, *TINY)
    result = run_ok("train", "random.txt", "--val-fraction", 0.2, *options, "--quiet")
    assert "Warning: The validation loss rose from " in result.stderr


def test_the_joined_model_of_a_run_is_used_like_any_other(here: Path) -> None:
    (here / "a.txt").write_text(CORPUS.read_text(encoding="utf-8")[:12_000])
    options = ("--layers", 1, "--heads", 2, "--width", 32, "--context", 16, "--tokenizer", "char")
    generations = ("--generations", 2, "--teacher-weight", 0.1, "--join", 2)
    result = run_ok("train", "a.txt", "--steps", 160, *options, *generations, "--json")
    assert "; the best 2 are joined: width 64, " in result.stderr
    assert "Generation 2 of 2 begins after step 80" in result.stderr
    assert "Joining the best 2 generations into one model of width 64" in result.stderr
    assert re.search(r"The joined model has a validation loss of \S+ bits/byte \S+: it is kept", result.stderr)
    last = records(run_ok("info", "a/last", "--json"))[0]
    best = records(run_ok("info", "a", "--json"))[0]
    assert (last["config"]["model"]["width"], best["config"]["model"]["width"]) == (32, 64)
    assert best["config"]["model"]["heads"] == 4
    assert records(result)[-1]["parameters"] == best["parameters"] > 2 * last["parameters"]
    for model in ("a", "a/last"):
        run_ok("sample", "--model", model, "-n", 5)
        run_ok("eval", "--model", model, "a.txt")
    run_ok("export", "a", "--to", "gguf", "--out", "a.gguf")
    greedy = ("--prompt", "the ", "-n", 8, "--temperature", 0)
    answers = [run_ok("sample", "--model", model, *greedy).stdout for model in ("a", "a.gguf")]
    assert answers[0] == answers[1]
    run_ok("train", "--resume", "a", "--steps", 180)
    assert [record["joined"] for record in read_metrics(here / "checkpoints/a") if "joined" in record] == [2, 2]
    run_ok("train", "a.txt", "--force", "--steps", 2, *TINY)
    assert {path.name for path in (here / "checkpoints/a").iterdir()} == FILES


def test_a_run_whose_joined_model_is_worse_has_its_best_generation_alone(here: Path) -> None:
    (here / "a.txt").write_text(story(4000))
    options = ("--layers", 1, "--heads", 2, "--width", 16, "--context", 16, "--generations", 3, "--join", 2)
    result = run_ok("train", "a.txt", "--steps", 30, *options, "--json")
    assert ": the best generation has less, and is kept alone." in result.stderr
    run, last = (records(run_ok("info", model, "--json"))[0] for model in ("a", "a/last"))
    assert run["parameters"] == last["parameters"] == records(result)[-1]["parameters"]
    assert run["config"]["model"] == last["config"]["model"]
    (listed,) = records(run_ok("runs", "--json"))
    assert (listed["parameters"], listed["settings"]["width"]) == (run["parameters"], 16)
    run_ok("eval", "--model", "a", "a.txt")
    run_ok("train", "--resume", "a", "--steps", 40)
    assert [record["joined"] for record in read_metrics(here / "checkpoints/a") if "joined" in record] == [2, 2]
