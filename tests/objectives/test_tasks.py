"""Every objective of a configuration has a task, whose batches fit the objective."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.variants import randomised, small
from tinylm.config.jobs import JOBS
from tinylm.config.model import ModelConfig
from tinylm.config.training import Budget, TrainingConfig
from tinylm.jobs.job import Task, load_job
from tinylm.jobs.text import job as text_job
from tinylm.text.batches import Batch, undo_merges
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import MASK, Tokenizer, train_bpe, train_char
from tinylm.transformer.build import build_model

SETTINGS: dict[str, Any] = {"batch_size": 2, "micro_batch": 2, "lr": 0.1, "min_lr": 0.0, "warmup": 0.0}
SETTINGS["budget"] = Budget(steps=1)


def text_task(tokenizer: Tokenizer, ids: list[int], context: int, **training: Any) -> tuple[Task, ModelConfig]:
    """The task of a decoder on a text, and the model's configuration."""
    config, tokens = small(vocab_size=tokenizer.vocab_size, context=context), np.array(ids, dtype=np.uint16)
    folder = TokenFolder(Path("unused"), tokens, tokens)
    return load_job("next-token").task(folder, tokenizer, config, TrainingConfig(**SETTINGS, **training)), config


def test_the_weight_of_the_token_after_the_next_falls_linearly_to_0_at_60_percent() -> None:
    task, config = text_task(train_char("abc"), [0, 1, 2, 1] * 20, 8, mtp_weight=0.4)
    model = randomised(build_model(config)).double().eval()
    batch = task.batch(3)
    with torch.no_grad():
        hidden = model(batch.ids).hidden
        second = F.cross_entropy(
            model.logits(hidden[:, :-1]).flatten(0, 1), batch.targets[:, 1:].flatten(), reduction="sum"
        )
        plain = task.validation_objective(model, batch)
        assert plain.aux.item() == 0
        for progress, weight in ((0.0, 0.4), (0.15, 0.3), (0.3, 0.2), (0.6, 0.0), (1.0, 0.0)):
            loss = task.objective(progress)(model, batch)
            assert loss.aux.item() == pytest.approx(weight * second.item() / 8)
            assert loss.total.item() == pytest.approx(plain.total.item())


def test_merges_are_undone_with_a_probability_that_falls_to_0_at_60_percent_and_the_text_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "the old man and the sea, the cold sea " * 40
    tokenizer = train_bpe([text], 300)
    task, config = text_task(tokenizer, tokenizer.encode(text), 16, bpe_dropout=0.4)
    model, original = randomised(build_model(config)), task.batch(0)
    rates: list[float] = []

    def watched(batch: Batch, merges: torch.Tensor, rate: float) -> Batch:
        rates.append(rate)
        undone = undo_merges(batch, merges, rate)
        for row, expected in zip(undone.ids.tolist(), original.ids.tolist(), strict=True):
            assert tokenizer.decode(expected).startswith(tokenizer.decode(row))
        assert torch.equal(undone.ids[:, 1:], undone.targets[:, :-1]) and undone.ids.shape == original.ids.shape
        assert not torch.equal(undone.ids, original.ids)
        return undone

    monkeypatch.setattr(text_job, "undo_merges", watched)
    for progress in (0.0, 0.15, 0.3, 0.45, 0.6, 1.0):
        torch.manual_seed(1)
        loss = task.objective(progress)(model, original).total
        assert torch.equal(loss, task.validation_objective(model, original).total) == (progress >= 0.6)
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_a_token_is_undone_down_to_eight_parts_and_no_further() -> None:
    merges = torch.tensor([[-1, -1], [0, 0], [1, 1], [2, 2], [3, 3]])  # token n is 2^n times token 0
    torch.manual_seed(0)
    for token, smallest in ((3, 0), (4, 1)):
        ids = torch.full((2000, 8), token)
        assert undo_merges(Batch(ids, ids), merges, 0.5).ids.min() == smallest


def test_the_merges_of_a_tokenizer_are_those_of_its_file_and_join_to_the_text_of_each_token() -> None:
    tokenizer = train_bpe(["the old man and the sea, the cold sea " * 9], 290)
    merges = tokenizer.merges()
    merged = np.flatnonzero(merges[:, 0] >= 0)
    assert len(merged) == len(json.loads(tokenizer.to_str())["model"]["merges"]) > 10
    for token in merged:
        assert tokenizer.decode(merges[token].tolist()) == tokenizer.decode([int(token)])
    assert (train_char("abc").merges() == -1).all()


def test_merges_are_undone_with_the_given_probability_on_average() -> None:
    """Of tokens that consist of two bytes, so that parts are not split again."""
    merges = torch.tensor([[-1, -1], [-1, -1], [0, 1]])
    ids = torch.full((4000, 60), 2)
    torch.manual_seed(0)
    undone = undo_merges(Batch(ids, ids), merges, 0.2).ids
    singles = (undone[:, :40] < 2).sum(1) / 2  # of a row, merges that were undone
    pairs = singles + (undone[:, :40] == 2).sum(1)
    share = singles / pairs
    assert share.mean().item() == pytest.approx(0.2, abs=0.01)
    assert share.std().item() == pytest.approx(0.4 / 12**0.5, abs=0.05)  # each row has its own, uniform from 0 to 0.4


@pytest.mark.parametrize("objective", JOBS)
def test_the_objective_of_a_task_computes_the_loss_of_its_batches(objective: str) -> None:
    architecture = JOBS[objective].architectures[0]
    tokenizer = train_char("abc").with_special_tokens([MASK])
    sides: dict[str, Any] = {"encoder_layers": 1} if architecture == "encoder-decoder" else {}
    if JOBS[objective].has_labels:
        sides = {"labels": ("a", "b"), "tie": False}
    config = small(architecture=architecture, vocab_size=tokenizer.vocab_size, context=8, **sides)
    training = TrainingConfig(objective=objective, **SETTINGS)
    end = tokenizer.end_of_text_id
    pairs = np.array([0, 1, end, 2, 1, end] * 20, dtype=np.uint16)
    if JOBS[objective].data in ("chat", "preferences"):  # of two and four tokens, of which one and two are scored
        pairs = np.array([5, 6, 9, 4, 14, 10] * 20, dtype=np.uint16)
    if JOBS[objective].has_labels:  # texts of two and one tokens with the labels 1 and 0
        pairs = np.array([5, 8, 6, 9, 2] * 20, dtype=np.uint16)
    model, other = (randomised(build_model(config), seed).eval() for seed in range(2))
    frozen = {"dpo": {"reference": lambda: contextlib.nullcontext(other)}, "distillation": {"teachers": [other]}}
    folder = TokenFolder(Path("unused"), pairs, pairs)
    task = load_job(objective).task(folder, tokenizer, config, training, **frozen.get(objective, {}))
    first, again = task.batch(3), task.batch(3)
    assert torch.equal(first.ids, again.ids) and torch.equal(first.targets, again.targets)
    with torch.no_grad():
        loss = task.objective(0.0)(model, first)
        scored = [task.validation_objective(model, batch) for batch in task.validation_batches(4, 1000)]
    assert loss.n_targets == first.n_targets > 0
    assert torch.isfinite(loss.total) and all(torch.isfinite(one.total) for one in scored)
    assert task.steps_per_epoch > 1
