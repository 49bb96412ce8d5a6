"""Preferences on the command line: train, finetune-lora, eval and what they write."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import tinylm as api
from tests.commands.test_chat_data import SHORT, write_lines
from tests.shell import assert_error, records, run_ok, same_tensors, tinylm
from tinylm.jobs.preferences.corpus import parse_preference
from tinylm.run_directory.loading import read_config
from tinylm.run_directory.metrics_log import read_metrics
from tinylm.run_directory.weights import write_weights
from tinylm.text.chat_format import chat_format

FIXED = ("--steps", 8, "--eval-every", 4, "--save-every", 4, "--log-every", 1, "--batch-size", 4, "--lr", 0.003)
FIXED += ("--schedule", "constant", "--warmup-steps", 0)
RECORDS = [
    {"prompt": f"Say {i}", "chosen": f"{i}!", "rejected": f"I will not say {i}, never {i}."[: 12 + i % 9]}
    for i in range(60)
]


@pytest.fixture
def preferences(here: Path) -> Path:
    return write_lines(here / "preferences.jsonl", RECORDS)


@pytest.fixture
def model(here: Path) -> Path:
    chats = [{"prompt": r["prompt"], "completion": r[key]} for r in RECORDS for key in ("chosen", "rejected")]
    run_ok("train", write_lines(here / "chats.jsonl", chats), "--out", "model", *SHORT)
    return here / "model"


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_learns_to_prefer_and_keeps_its_reference(kind: str, model: Path, preferences: Path, here: Path) -> None:
    """For a LoRA, the base is the reference; otherwise, the run keeps the first weights."""
    start = (
        ("finetune-lora", preferences, "-m", model) if kind == "lora" else ("train", preferences, "--init-from", model)
    )
    run_ok(*start, "--out", "whole", *FIXED)
    config = read_config(here / "whole")
    assert (config.data.kind, config.training.objective, config.loss_unit) == (
        "preferences",
        "dpo",
        "nats per preference",
    )
    found = read_metrics(here / "whole")
    losses = [record["val_loss"] for record in found if "val_loss" in record]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6) and losses[-1] < losses[0]
    assert next(record["val_margin"] for record in found if "val_loss" in record) == pytest.approx(0, abs=1e-6)
    assert all(0 <= record["accuracy"] <= 1 for record in found if "loss" in record)
    info = run_ok("info", "whole").stdout
    assert "nats per preference" in info and "nats per token" not in info
    run_ok(*start, "--out", "whole", *FIXED, "--steps", 1, "--force")  # replaces it
    if kind == "full":
        assert same_tensors(here / "whole/first.safetensors", model / "model.safetensors")
        file, recorded = here / "whole/first.safetensors", read_config(here / "whole")
        forged = {name: tensor for name, tensor in load_file(file).items() if "norm" not in name}
        write_weights(file, forged, recorded, 0, None)
        assert_error(tinylm("train", "--resume", "whole", "--steps", 2), 1, "first.safetensors does not fit its config")
        file.unlink()
        assert_error(tinylm("train", "--resume", "whole", "--steps", 2), 1, "first.safetensors")


def test_preferences_from_standard_input_lose_unknown_characters_if_asked_to(model: Path, preferences: Path) -> None:
    """A pair whose answer becomes empty is left out as a whole, so that the others stay pairs."""
    lines = preferences.read_text() + json.dumps({"prompt": "Say 1", "chosen": "ß", "rejected": "1!"}) + "\n"
    lines += json.dumps({"prompt": "Say ß1", "chosen": "1!", "rejected": "I will"}) + "\n"
    assert_error(tinylm("eval", "-", "-m", model, stdin=lines), 2, "has no id for 1 of the text's characters")
    skipped = run_ok("eval", "-", "-m", model, "--unknown", "skip", "--json", stdin=lines)
    (found,) = records(skipped)
    assert found["pairs"] == len(RECORDS) + 1
    assert "1 of 62 preferences are left out, since a text of theirs has no other characters" in skipped.stderr
    assert f"(standard input, line {len(RECORDS) + 1})" in skipped.stderr


def test_eval_shows_how_often_and_by_how_much_the_chosen_answer_is_likelier(model: Path, preferences: Path) -> None:
    """Reference: the log-probabilities of one text at a time."""
    loaded = api.load(model)
    format = chat_format(loaded.chat_template or "", loaded.tokenizer)
    margins, nats, tokens = [], 0.0, 0
    for record in RECORDS:
        sums = []
        for conversation in parse_preference(record, "here"):
            rendered = format.render(conversation)
            ids, starts = loaded.tokenizer.encode_with_special(rendered.text)
            inputs = torch.as_tensor(np.array(ids, dtype=np.int64))[None]
            with torch.inference_mode():
                logits = loaded.network.logits(loaded.network(inputs[:, :-1]).hidden).float()
            losses = F.cross_entropy(logits[0], inputs[0, 1:], reduction="none").numpy()
            (span,) = rendered.spans
            scored = (np.array(starts[1:]) >= span.start) & (np.array(starts[1:]) < span.stop)
            sums.append(float(losses[scored].sum()))
            if len(sums) == 1:
                nats, tokens = nats + sums[0], tokens + int(scored.sum())
        margins.append(sums[1] - sums[0])
    (found,) = records(run_ok("eval", preferences, "-m", model, "--json", "--dtype", "fp32"))
    assert found["margin"] == pytest.approx(np.mean(margins), rel=1e-5)
    assert found["accuracy"] == pytest.approx(np.mean(np.array(margins) > 0))
    assert (found["pairs"], found["tokens"]) == (60, tokens)
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    for name in ("loss", "accuracy", "margin"):
        assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]
    table = run_ok("eval", preferences, "-m", model, "--dtype", "fp32").stdout
    assert "margin in nats" in table and table.count("95 % interval") == 3


def test_what_does_not_fit_preferences_is_an_error_before_training(model: Path, preferences: Path, here: Path) -> None:
    text = write_lines(here / "text.jsonl", [{"text": "Say 1!" * 20}] * 20)
    for arguments, message in (
        (("finetune-lora", text, "-m", model, "--dpo-beta", 0.2), "--dpo-beta is for preferences"),
        (("train", preferences, "--init-from", model, "--parallel", "fsdp"), "--parallel ddp, or train a LoRA"),
        (("finetune-lora", preferences, "--format", "preferences", "--text-key", "a", "-m", model), "--text-key is"),
        (("train", preferences), "Preferences train an existing model; name it with --init-from"),
        (
            ("finetune-lora", preferences, "-m", model, "--objective", "chat"),
            "--objective chat is for conversations, and the data are preferences",
        ),
        (
            ("finetune-lora", preferences, "-m", model, "--label-smoothing", 0.1),
            "--label-smoothing is for decoders of plain text",
        ),
        (("finetune-lora", preferences, "-m", model, "--dpo-beta", 0), "--dpo-beta"),
        (
            ("eval", preferences, "-m", model, "--stride", 4),
            "--stride is for decoders of plain text and decoders with teachers, not for preferences",
        ),
    ):
        assert_error(tinylm(*arguments), 2, message)
    same = write_lines(here / "same.jsonl", [{"prompt": "Say 1", "chosen": "1!", "rejected": "1!"}] * 20)
    assert_error(tinylm("finetune-lora", same, "-m", model), 2, "No training preference has two different answers")
    lacking = write_lines(here / "lacking.jsonl", [RECORDS[0], {"prompt": "Say 1", "chosen": "1!"}])
    assert_error(tinylm("finetune-lora", lacking, "-m", model), 2, "there is no 'rejected'")
    assert not (here / "checkpoints").exists()


def test_the_report_has_curves_of_accuracy_and_margin(model: Path, preferences: Path, here: Path) -> None:
    held_out = ("--val-fraction", 0.1)
    run_ok("finetune-lora", preferences, "-m", model, "--out", "preferring", *held_out, *FIXED)
    run_ok("report", "preferring", "--out", "page.html")
    page = (here / "page.html").read_text()
    data = json.loads(page.partition('type="application/json"')[2].partition(">")[2].partition("</script>")[0])
    curves = data["runs"][0]["curves"]
    assert len(curves["train"]["margin"]) == len(curves["train"]["accuracy"]) == 8
    assert len(curves["val"]["val_margin"]) == 3
    assert data["runs"][0]["loss_unit"] == "nats per preference"
    assert data["runs"][0]["problems"] == []
    assert data["runs"][0]["evaluation"]["metrics"]["pairs"] == 6
