"""Every objective of a configuration has a task, whose batches fit the objective."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.variants import randomised, small
from tinylm.config.training import OBJECTIVES, Budget, TrainingConfig
from tinylm.evaluation.task_kinds import TASKS, make_task
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import train_char
from tinylm.transformer.build import build_model

SETTINGS: dict[str, Any] = {"batch_size": 2, "micro_batch": 2, "lr": 0.1, "min_lr": 0.0, "warmup": 0.0}
SETTINGS["budget"] = Budget(steps=1)


def test_every_objective_has_a_task() -> None:
    assert TASKS.keys() == OBJECTIVES.keys()


def test_the_weight_of_the_token_after_the_next_falls_linearly_to_0_at_60_percent() -> None:
    tokenizer = train_char("abc")
    config = small(vocab_size=tokenizer.vocab_size, context=8)
    training = TrainingConfig(mtp_weight=0.4, **SETTINGS)
    tokens = np.array([0, 1, 2, 1] * 20, dtype=np.uint16)
    task = make_task(TokenFolder(Path("unused"), tokens, tokens), tokenizer, config, training)
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


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_objective_of_a_task_computes_the_loss_of_its_batches(objective: str) -> None:
    architecture = OBJECTIVES[objective].architectures[0]
    tokenizer = train_char("abc").with_mask_token()
    sides = {"encoder_layers": 1} if architecture == "encoder-decoder" else {}
    config = small(architecture=architecture, vocab_size=tokenizer.vocab_size, context=8, **sides)
    training = TrainingConfig(objective=objective, **SETTINGS)
    end = tokenizer.end_of_text_id
    pairs = np.array([0, 1, end, 2, 1, end] * 20, dtype=np.uint16)
    if objective == "chat":  # the codes of two conversations of two and four tokens, of which one and two are scored
        pairs = np.array([5, 6, 9, 4, 14, 10] * 20, dtype=np.uint16)
    task = make_task(TokenFolder(Path("unused"), pairs, pairs), tokenizer, config, training)
    model = randomised(build_model(config)).eval()
    first, again = task.batch(3), task.batch(3)
    assert torch.equal(first.ids, again.ids) and torch.equal(first.targets, again.targets)
    with torch.no_grad():
        loss = task.objective(0.0)(model, first)
        scored = [task.validation_objective(model, batch) for batch in task.validation_batches(4, 1000)]
    assert loss.n_tokens == first.n_targets > 0
    assert torch.isfinite(loss.total) and all(torch.isfinite(one.total) for one in scored)
    assert task.steps_per_epoch > 1
