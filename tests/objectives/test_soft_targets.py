"""Soft targets. References: softmax in float64 of one window at a time, and the loss by its formula."""

import numpy as np
import pytest
import torch

from tests.objectives.conftest import LimitLogits
from tests.variants import randomised, small
from tinylm.config.model import ModelConfig
from tinylm.jobs.text.soft_targets import predict
from tinylm.objectives.loss import next_token, soft_next_token
from tinylm.text.batches import Batch, Windows
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

CONFIG = small(dropout=0.3)


def decoder(seed: int, config: ModelConfig = CONFIG) -> Decoder:
    return randomised(build_model(config, seed)).double()


def probabilities(model: Decoder, before: np.ndarray) -> torch.Tensor:
    """The distribution after these tokens, without dropout."""
    model.eval()
    with torch.no_grad():
        return model.last_logits(torch.from_numpy(before.astype(np.int64))[None], None)[0].double().softmax(-1)


def test_each_position_has_the_likeliest_ids_after_at_least_half_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinylm.jobs.text.soft_targets.SOFT_CANDIDATES", 5)
    teacher = decoder(0)
    text = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 29)
    checks: list[int] = []
    soft = predict(teacher, text, 8, "fp32", lambda: checks.append(1))
    assert len(checks) > 0
    for position in range(28):
        start = 0 if position < 8 else 4 * ((position - 4) // 4)
        expected = probabilities(teacher, text[start : position + 1]).topk(5)
        assert soft.ids[position].tolist() == expected.indices.tolist()
        np.testing.assert_allclose(soft.probabilities[position], expected.values, rtol=1e-3)
    assert not soft.probabilities[28].any()


def test_windows_have_the_soft_targets_of_their_positions_also_in_a_text_that_goes_round() -> None:
    tokens = np.arange(60) % 13
    windows = Windows(tokens, 8, 3, 0, 12)
    soft = predict(decoder(0), windows.tokens, 8, "fp32", lambda: None)
    batch, (ids, values) = windows.batch(7), soft.at(windows.starts(7), 8)
    for row, start in enumerate(windows.starts(7)):
        assert batch.ids[row].tolist() == [int(windows.tokens[start + t]) for t in range(8)]
        np.testing.assert_array_equal(ids[row], soft.ids[start : start + 8])
        np.testing.assert_array_equal(values[row], soft.probabilities[start : start + 8].astype(np.float32))


@pytest.mark.parametrize("chunk", [1 << 25, 30])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_is_the_cross_entropy_with_soft_targets_and_the_rest_on_the_text(
    weight: float, chunk: int, limit_logits: LimitLogits
) -> None:
    limit_logits(chunk)
    model = decoder(3, small())
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (3, 8), generator=rng)
    batch = Batch(ids[:, :-1], ids[:, 1:])
    soft = torch.rand(3, 7, 4, generator=rng, dtype=torch.float64)
    soft = 0.9 * soft / soft.sum(-1, keepdim=True)
    soft_ids = torch.rand(3, 7, model.vocab_size, generator=rng).topk(4).indices
    taught = Batch(batch.ids, batch.targets, soft_ids=soft_ids, soft=soft)
    log_p = model.logits(model(batch.ids).hidden).detach().log_softmax(-1)
    expected = 0.0
    for row in range(3):
        for t in range(7):
            wanted = torch.zeros(model.vocab_size, dtype=torch.float64)
            wanted[soft_ids[row, t]] = weight * soft[row, t]
            wanted[batch.targets[row, t]] += 1 - wanted.sum()
            expected -= float((wanted * log_p[row, t]).sum())
    loss = soft_next_token(model, taught, weight, 0.0)
    assert loss.total.item() == pytest.approx(expected, rel=1e-12)
    assert (loss.n_targets, loss.aux.item()) == (21, 0)
    both = soft_next_token(model, taught, weight, 0.3)
    assert both.total.item() == pytest.approx(expected, rel=1e-12)
    second = -log_p[:, :-1].gather(2, batch.targets[:, 1:, None]).sum()
    assert both.aux.item() == pytest.approx(0.3 / 7 * second.item(), rel=1e-12)
    if weight == 0:
        assert loss.total.item() == pytest.approx(next_token(model, batch).total.item(), rel=1e-12)
    loss.total.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)
