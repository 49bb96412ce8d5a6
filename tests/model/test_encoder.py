"""Attention is bidirectional. References: the formulas in float64, and equivariance to permutations."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import reference_parts
from tests.variants import randomised, small
from tinylm.model.build import build_model
from tinylm.model.encoder import Encoder
from tinylm.model_config import ModelConfig

IDS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8], [6]]


def encoder(preset: str = "modern", **choices: Any) -> ModelConfig:
    return small(preset, architecture="encoder", **choices)


VARIANTS = {
    "modern": encoder(),
    "gpt2": encoder("gpt2", kv_heads=4),
    "original": encoder("original", kv_heads=4),
    "relative": encoder(position="relative", relative_clip=2),
    "no positions": encoder(position="none", tie=False),
    "experts": encoder(experts=2, layers=1),
    "two of four experts": encoder(experts=4, layers=1),
    "merged experts": encoder(experts=3, expert_mode="merge", layers=1),
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=[name.replace(" ", "-") for name in VARIANTS])


def exact(config: ModelConfig) -> Encoder:
    model = randomised(build_model(config)).double()
    assert isinstance(model, Encoder)
    return model


def logits_of(model: Encoder, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    return model.logits(model(ids, lengths).hidden)


@every_variant
def test_logits_equal_the_formula(config: ModelConfig) -> None:
    model = exact(config)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    for ids in IDS:
        expected = reference_parts.encoder_logits(weights, config, ids, len(ids), table=np.float32)
        found = logits_of(model, torch.tensor([ids]))[0].detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@every_variant
@pytest.mark.parametrize("padding", [0, 5])
def test_padded_batches_equal_each_row_alone(config: ModelConfig, padding: int) -> None:
    model = exact(config)
    rows = torch.tensor([ids + [padding] * (7 - len(ids)) for ids in IDS])
    together = logits_of(model, rows, torch.tensor([len(ids) for ids in IDS]))
    for row, ids in enumerate(IDS):
        alone = logits_of(model, torch.tensor([ids]))[0]
        torch.testing.assert_close(together[row, : len(ids)], alone, rtol=0, atol=1e-12)


@every_variant
def test_every_token_attends_to_every_other(config: ModelConfig) -> None:
    model = exact(config)
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    logits = logits_of(model, torch.tensor(IDS[:1]))[0]
    direction = torch.randn(config.vocab_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for row in logits:
        (gradient,) = torch.autograd.grad(row @ direction, embedded, retain_graph=True)
        assert (gradient[0].abs().amax(dim=-1) > 1e-8).all()


@given(st.permutations(range(7)))
def test_without_positions_a_permuted_input_gives_the_permuted_output(order: list[int]) -> None:
    """Attention and feed-forward layers are permutation equivariant."""
    ids = torch.tensor(IDS[:1])
    without, with_rope = exact(VARIANTS["no positions"]), exact(VARIANTS["modern"])
    torch.testing.assert_close(logits_of(without, ids[:, order]), logits_of(without, ids)[:, order], rtol=0, atol=1e-12)
    if order != list(range(7)):
        assert not torch.allclose(logits_of(with_rope, ids[:, order]), logits_of(with_rope, ids)[:, order])


@every_variant
def test_masked_tokens_of_one_batch_can_be_overfitted(config: ModelConfig) -> None:
    """The unmasked tokens of the rows are different sets, since without positions their order has no effect."""
    model = build_model(config, seed=1).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    targets = torch.tensor([[1, 4, 2, 3], [2, 5, 3, 7], [3, 6, 8, 2]])
    masked = targets.clone()
    masked[:, 1] = 12  # the mask token
    for _ in range(600):
        loss = F.cross_entropy(logits_of(model, masked)[:, 1], targets[:, 1])
        if loss < 0.05:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss is still {loss:.3f}")
