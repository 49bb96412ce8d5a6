"""Reference: the formula of DPO in float64, with the log-probabilities of one text at a time."""

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference_parts
from tests.objectives.conftest import LimitLogits
from tests.text.test_chat_batches import random_tokens
from tests.variants import randomised, small
from tinylm.adapters.adapter import without_adapters
from tinylm.config.run import AdapterConfig
from tinylm.jobs.preferences.corpus import PreferenceTokens
from tinylm.jobs.preferences.job import dpo
from tinylm.models.load_adapter import add_adapter
from tinylm.objectives.loss import LanguageModel
from tinylm.text.scored_tokens import ScoredRows
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

CONTEXT, BETA = 20, 0.3
CONFIG = small(vocab_size=11, context=CONTEXT)
TOKENS = PreferenceTokens(random_tokens(60, 30)._codes)
EXAMPLES = TOKENS.examples(CONTEXT)[:12]


def model(seed: int) -> Decoder:
    return randomised(build_model(CONFIG), seed).double()


def log_p(network: Decoder, index: int) -> float:
    """log p of the scored tokens of a text within the context, by the float64 model of reference_parts.py."""
    weights = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    ids, scored = (part[: CONTEXT + 1] for part in TOKENS.tokens(index))
    logits = reference_parts.decoder_logits_with_parts(weights, CONFIG, ids[:-1].tolist(), table=np.float32)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(sum(log_probabilities[t, ids[t + 1]] for t in range(len(ids) - 1) if scored[t + 1]))


def margin_of(policy: Decoder, base: Decoder, pair: np.ndarray) -> float:
    (chosen, rejected), (chosen_0, rejected_0) = ([log_p(network, i) for i in pair] for network in (policy, base))
    return BETA * ((chosen - chosen_0) - (rejected - rejected_0))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1 << 25, 40])
def test_loss_margin_and_accuracy_are_their_formulas(packed: bool, chunk: int, limit_logits: LimitLogits) -> None:
    limit_logits(chunk)
    policy, base = model(1), model(2)
    margins = [margin_of(policy, base, pair) for pair in EXAMPLES]
    rows = ScoredRows(TOKENS, CONTEXT, packed, EXAMPLES)
    found = dpo(policy, rows.batch(range(len(rows))), lambda: contextlib.nullcontext(base), BETA)
    assert found.n_targets == len(EXAMPLES)
    assert found.total.item() == pytest.approx(sum(math.log(1 + math.exp(-m)) for m in margins), rel=1e-10)
    assert found.metrics["margin"].item() == pytest.approx(np.mean(margins), rel=1e-10)
    assert found.metrics["accuracy"].item() == pytest.approx(np.mean([m > 0 for m in margins]))
    assert 0 < found.metrics["accuracy"] < 1


def test_the_gradient_is_that_of_the_formula_and_does_not_reach_the_reference(limit_logits: LimitLogits) -> None:
    """By central differences of the formula along a random direction; in chunks, the gradient is the same."""
    policy, base = model(1), model(2)
    batch = ScoredRows(TOKENS, CONTEXT, packed=True, examples=EXAMPLES).batch([0])
    pairs = [np.array(pair) for pair in ScoredRows(TOKENS, CONTEXT, True, EXAMPLES).rows[0].reshape(-1, 2)]
    parameters = list(policy.parameters())
    direction = [torch.randn_like(parameter) for parameter in parameters]

    def gradients() -> list[Tensor]:
        loss = dpo(policy, batch, lambda: contextlib.nullcontext(base), BETA)
        return list(torch.autograd.grad(loss.total, parameters))

    found = gradients()
    slope = sum(float((g * d).sum()) for g, d in zip(found, direction, strict=True))

    def formula(step: float) -> float:
        with torch.no_grad():
            for parameter, d in zip(parameters, direction, strict=True):
                parameter += step * d
        total = sum(math.log(1 + math.exp(-margin_of(policy, base, pair))) for pair in pairs)
        with torch.no_grad():
            for parameter, d in zip(parameters, direction, strict=True):
                parameter -= step * d
        return total

    step = 1e-6
    assert slope == pytest.approx((formula(step) - formula(-step)) / (2 * step), rel=1e-6)
    assert all(parameter.grad is None for parameter in base.parameters())
    limit_logits(40)
    for one, other in zip(found, gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_base_of_an_adapter_is_the_reference_and_a_new_adapter_has_a_margin_of_zero() -> None:
    network, base = model(1), model(1)
    batch = ScoredRows(TOKENS, CONTEXT, packed=False, examples=EXAMPLES).batch([0, 1, 2])
    layers = add_adapter(network, AdapterConfig(base="", base_digest="", rank=2, dropout=0.0, targets=("q_proj",)))

    @contextlib.contextmanager
    def reference() -> Iterator[LanguageModel]:
        with without_adapters(network):
            yield network

    assert dpo(network, batch, reference, BETA).total.item() == pytest.approx(3 * math.log(2), rel=1e-12)
    with torch.no_grad():
        for layer in layers.values():
            for parameter in layer.trainable_parameters().values():
                parameter.copy_(torch.randn_like(parameter))
    found = dpo(network, batch, reference, BETA)
    expected = dpo(network, batch, lambda: contextlib.nullcontext(base), BETA)
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-12) != pytest.approx(3 * math.log(2))
    assert all(layer.adapter_scale == 1.0 for layer in layers.values())
