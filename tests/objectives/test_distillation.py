"""Reference: the formula of distillation in float64, on the logits of reference_parts.py."""

import functools
import math

import numpy as np
import pytest
import torch

from tests import reference_parts
from tests.objectives.conftest import LimitLogits
from tests.objectives.test_loss import batch_of
from tests.variants import randomised, small
from tinylm.config.model import ModelConfig
from tinylm.jobs.distillation.job import distil
from tinylm.objectives.loss import next_token
from tinylm.text.batches import Batch
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

STUDENT = small()
TEACHERS = (small(width=24, heads=4), small(vocab_size=17))  # the second has ids that the tokenizer does not use


@functools.cache
def network(config: ModelConfig) -> Decoder:
    return randomised(build_model(config), seed=config.width + config.vocab_size).double()


def probabilities(config: ModelConfig, ids: list[int]) -> np.ndarray:
    """(T, V) over the ids of the student."""
    weights = {name: value.detach().numpy() for name, value in network(config).state_dict().items()}
    logits = reference_parts.decoder_logits_with_parts(weights, config, ids, table=np.float32)[:, : STUDENT.vocab_size]
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


def expected(batch: Batch, weight: float) -> float:
    total = 0.0
    for row in range(len(batch)):
        ids = batch.ids[row].tolist()
        p = probabilities(STUDENT, ids)
        taught = np.mean([probabilities(config, ids) for config in TEACHERS], axis=0)
        for t, target in enumerate(batch.targets[row].tolist()):
            total -= (1 - weight) * math.log(p[t, target]) + weight * float((taught[t] * np.log(p[t])).sum())
    return total


@pytest.mark.parametrize("chunk", [1 << 25, 40])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_is_its_formula_and_without_weight_that_of_the_text(
    weight: float, chunk: int, limit_logits: LimitLogits
) -> None:
    limit_logits(chunk)
    batch = batch_of(STUDENT, 3, 7)
    loss = distil(network(STUDENT), batch, [network(config) for config in TEACHERS], weight)
    assert (loss.total.item(), loss.n_targets) == (pytest.approx(expected(batch, weight), rel=1e-10), 21)
    if weight == 0:
        assert loss.total.item() == pytest.approx(next_token(network(STUDENT), batch).total.item(), rel=1e-10)


def test_a_student_that_equals_its_only_teacher_has_no_gradient_and_the_teacher_never_has_one(
    limit_logits: LimitLogits,
) -> None:
    """The cross-entropy with one's own distribution is at its minimum; in chunks, gradients are the same."""
    student, teacher = network(STUDENT), network(TEACHERS[0])
    parameters, batch = list(student.parameters()), batch_of(STUDENT, 2, 7)
    for gradient in torch.autograd.grad(distil(student, batch, [student], 1.0).total, parameters):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-10)
    whole = torch.autograd.grad(distil(student, batch, [teacher], 0.7).total, parameters)
    limit_logits(40)
    parts = torch.autograd.grad(distil(student, batch, [teacher], 0.7).total, parameters)
    assert max(float(gradient.abs().max()) for gradient in whole) > 0.01
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert all(parameter.grad is None for parameter in teacher.parameters())
