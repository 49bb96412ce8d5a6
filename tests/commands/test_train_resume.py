"""tinylm train with --resume and with --init-from, and which weights of a run are kept."""

import dataclasses
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shell import TINY, assert_error, copied, records, run_ok, same_tensors, snapshot, tinylm
from tinylm.machine.measure import Machine
from tinylm.planning.memory import plan_memory
from tinylm.planning.plan import plan_resumed
from tinylm.planning.plan_request import PlanRequest, Sizes
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config
from tinylm.run_directory.lock_and_commit import lock_run
from tinylm.run_directory.weights import read_header
from tinylm.transformer.build import count_parameters


@pytest.mark.usefixtures("shelf_cache")
def test_resuming_may_change_budget_and_intervals_and_records_them(run: Path, here: Path) -> None:
    path = copied(run, here / "again")
    before = snapshot(path)
    result = tinylm("train", "--resume", path, "--time", "0.000001s")
    assert_error(result, 2, "its --time of 0.000001s is the total", "--time")
    assert snapshot(path) == before
    changed = ("--steps", 204, "--eval-every", 2, "--save-every", 3, "--log-every", 1, "--patience", 9)
    run_ok("train", "--resume", path, *changed, env={"TINYLM_TRAIN_DEVICE": "cpu", "TINYLM_TRAIN_LAYERS": "7"})
    training = read_config(path).training
    assert (training.budget.steps, training.eval_every, training.save_every, training.patience) == (204, 2, 3, 9)
    assert (training.batch_size, training.log_every) == (4, 1)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_resumed_run_needs_the_memory_that_a_new_one_was_planned_with(weight: float, here: Path) -> None:
    (here / "t.txt").write_text("ab cd\n" * 2000)
    run_ok("train", "t.txt", *TINY, "--steps", 2, "--mtp-weight", weight, "--out", "t")
    config = read_config(here / "t")
    recorded = config.training_parts(here / "t")
    assert recorded.training.mtp_weight == weight
    resumed = plan_resumed(config, recorded, Sizes(), config.model.vocab_size, None, "auto", 1).memory
    new = PlanRequest(
        objective="next-token",
        data=recorded.data,
        vocab_size=config.model.vocab_size,
        training=dataclasses.asdict(recorded.training),
    )
    parameters = count_parameters(config.model)["total"]
    planned = plan_memory(Machine.recorded(recorded.runtime, None), new, config.model, parameters, 4).memory
    for name in ("logits", "max_logits", "per_sequence", "evaluation", "state", "gradients"):
        assert getattr(resumed, name) == getattr(planned, name), name


def test_a_run_that_another_process_is_writing_is_locked(run: Path, corpus: Path, here: Path) -> None:
    path = copied(run, here / "run")
    before = snapshot(path)
    with lock_run(path):
        for options in ((corpus, "--out", path, "--force", *TINY), ("--resume", path)):
            assert_error(tinylm("train", *options, "--steps", 300), 2, f"Another process is writing {path}", "--out")
    assert snapshot(path) == before
    assert [entry.name for entry in here.iterdir() if entry.name.startswith(".")] == []


def test_resuming_needs_the_corpus_only_if_the_cache_was_deleted(here: Path, corpus: Path) -> None:
    run_ok("train", corpus, "--steps", 1, *TINY)
    resume = ("train", "--resume", "checkpoints/corpus", "--steps")
    text = corpus.read_text()
    corpus.write_text("xyz" * 500)
    said = run_ok(*resume, 2).stderr
    assert "Resuming checkpoints/corpus at step 1, on the text as it was when the run began." in said
    assert_error(tinylm(*resume, 3, corpus), 2, "corpus.txt is not the text that checkpoints/corpus was trained on")
    corpus.unlink()
    run_ok(*resume, 3)
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    assert_error(tinylm(*resume, 4), 1, "is no longer in the cache; name its training text", "corpus.txt")
    (here / "moved.txt").write_text(text)
    run_ok(*resume, 4, "moved.txt")


def test_init_from_takes_weights_shape_tokenizer_and_schedule_of_a_run(run: Path, corpus: Path, here: Path) -> None:
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
    run_ok("train", corpus, "--steps", 1, "--preset", "gpt2", *TINY, "--out", "first")
    run_ok("train", corpus, "--steps", 1, "--init-from", "first", "--out", "second")
    training = read_config(here / "second").training
    assert training.schedule == "cosine"


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


def test_the_last_evaluation_is_part_of_the_last_save(corpus: Path, here: Path) -> None:
    """Regression: the save once preceded the evaluation at the last step, and a resumed run lost its best weights."""
    options = ("--steps", 6, "--save-every", 3, "--eval-every", 4, *TINY, "--lr", 0.01, "--json")
    last = records(run_ok("train", corpus, *options))[-1]
    run = here / "checkpoints/corpus"
    state = RunDirectory(run).load_last(read_config(run)).state
    best = (last["best_step"], last["best_val_loss"])
    assert (state["last_eval_step"], state["best_step"], state["best_loss"]) == (6, *best)


# The learning rate grows up to the end, so that the validation loss falls and then rises.
OVERFIT = ("--steps", 30, "--eval-every", 5, "--lr", 3, "--schedule", "constant", "--warmup-steps", 30, *TINY)


def losses(run: Path) -> dict[int, float]:
    """The validation losses of trained weights in metrics.jsonl by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line and line["step"] > 0}


def facts(here: Path, number: int) -> None:
    """Write a file of this number of lines that cannot be predicted from others."""
    words = random.Random(1)
    (here / "facts.txt").write_text("".join("".join(words.choices("abcd ", k=20)) + "\n" for _ in range(number)))


def trained(here: Path, number: int, *options: Any) -> str:
    """Train on this number of facts, and return what was said."""
    facts(here, number)
    held_out = ("--val-fraction", 0.1)  # by default, few facts are learned by heart
    return run_ok("train", "facts.txt", "--format", "lines", "--out", "run", *held_out, *OVERFIT, *options).stderr


def kept_step(run: Path) -> int:
    return read_header(run / "model.safetensors").step


def test_few_validation_records_keep_the_last_weights_and_more_or_a_patience_the_best(here: Path) -> None:
    """Regression: of 40 questions, 4 were for validation, and an adapter that had learned nothing was kept."""
    said = trained(here, 49)
    assert "weights:   the last ones are kept: 4 records to validate with cannot show which are better" in said
    found = losses(here / "run")
    best = min(found, key=lambda step: found[step])
    assert best < 30
    assert kept_step(here / "run") == 30
    assert same_tensors(here / "run/model.safetensors", here / "run/last/model.safetensors")
    assert "The last weights are kept, since the validation data are too few to choose by." in said
    assert re.search(rf"Best validation loss: .*, at step {best}\.", said)
    run_ok("train", "--resume", "run", "--steps", 36)
    assert kept_step(here / "run") == 36
    for number, options in ((49, ("--patience", 9, "--force")), (200, ("--force",))):
        said = trained(here, number, *options)
        found = losses(here / "run")
        assert "the last ones are kept" not in said
        assert kept_step(here / "run") == min(found, key=lambda step: found[step]) < 30
        assert "those of the last step are in run/last." in said


def test_the_plan_decides_by_the_length_of_the_validation_text(here: Path) -> None:
    for characters, keep in ((6400, "last"), (6410, "best")):
        (here / "t.txt").write_text(("ab cd\n" * 2000)[:characters])
        (plan,) = records(run_ok("train", "t.txt", *TINY, "--val-fraction", 0.1, "--dry-run", "--json"))
        assert (plan["data"]["val_tokens"], plan["training"]["keep"]) == (characters // 10, keep)
        assert (plan["training"]["patience"] is None) == (keep == "last")


def test_generations_are_chosen_by_their_losses_however_short_the_validation_text_is(here: Path) -> None:
    (here / "t.txt").write_text("ab cd\n" * 600)
    for generations, keep in ((1, "last"), (2, "best")):
        options = ("--val-fraction", 0.1, "--generations", generations, "--epochs", 6, "--dry-run", "--json")
        (plan,) = records(run_ok("train", "t.txt", *TINY, *options))
        assert plan["training"]["keep"] == keep


def test_few_records_are_seen_forty_times(here: Path) -> None:
    facts(here, 199)
    (plan,) = records(
        run_ok("train", "facts.txt", *TINY, "--val-fraction", 0.1, "--format", "lines", "--dry-run", "--json")
    )
    data, training = plan["data"], plan["training"]
    seen = training["budget"]["steps"] * training["batch_size"] * plan["model"]["context"] / data["train_tokens"]
    assert seen == pytest.approx(40, rel=0.01)
    assert (training["keep"], training["patience"]) == ("last", None)


def test_the_last_weights_of_a_model_are_named_by_their_folder(here: Path) -> None:
    trained(here, 200)
    (scored,) = records(run_ok("eval", "-m", "run/last", "--json"))
    assert scored["loss"] == pytest.approx(losses(here / "run")[30], rel=1e-5)
    (best,) = records(run_ok("eval", "-m", "run", "--json"))
    assert best["loss"] == pytest.approx(min(losses(here / "run").values()), rel=1e-5)
    assert run_ok("sample", "-m", "run/last", "-n", 5, "--seed", 1).stdout
    run_ok("export", "run/last", "--to", "hf", "--out", "hf")
    text = ("eval", "facts.txt", "--format", "lines", "--json", "-m")
    exported, own = (records(run_ok(*text, model))[0]["loss"] for model in ("hf", "run/last"))
    assert exported == pytest.approx(own, rel=1e-4)
    run_ok("train", "--resume", "run/last", "--steps", 31)
    assert 31 in losses(here / "run")
    assert_error(tinylm("sample", "-m", "run/lost"), 2, "There is no file or folder at run/lost")


def test_the_last_weights_of_an_adapter_are_named_by_their_folder_and_can_be_a_base(run: Path, here: Path) -> None:
    (here / "facts.txt").write_text("the old man\n" * 400)
    options = ("--format", "lines", "--steps", 8, "--eval-every", 2, "--lr", 0.1, "--val-fraction", 0.1)
    run_ok("finetune-lora", "facts.txt", "-m", run, "--out", "ad", *options)
    (scored,) = records(run_ok("eval", "--adapter", "ad/last", "-m", run, "--json"))
    assert scored["loss"] == pytest.approx(losses(here / "ad")[8], rel=1e-4)
    run_ok("merge-lora", "ad/last", "-m", run, "--out", "merged")
    text = ("eval", "facts.txt", "--format", "lines", "--json", "--dtype", "fp32", "-m")
    merged, adapted = (records(run_ok(*text, *m))[0]["loss"] for m in (("merged",), (run, "--adapter", "ad/last")))
    assert merged == pytest.approx(adapted, rel=1e-4)
    run_ok("train", "facts.txt", "--format", "lines", "--out", "checkpoints/base", "--steps", 4, *TINY)
    last = here / "checkpoints/base/last"
    assert run_ok("finetune-lora", "facts.txt", "-m", last, *options).stdout.strip().endswith("checkpoints/base-lora")
    assert run_ok("sample", "--adapter", "base-lora", "-n", 3).stdout
