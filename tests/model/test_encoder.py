"""Encoders. Reference: the formulas in float64, one token at a time."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
    "relative, two of four experts": encoder(position="relative", relative_clip=2, experts=4, layers=1),
    "no positions, merged experts": encoder(position="none", tie=False, experts=3, expert_mode="merge", layers=1),
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=[name.replace(" ", "-") for name in VARIANTS])


def logits_of(model: Encoder, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    return model.logits(model(ids, lengths).hidden)


@every_variant
def test_logits_equal_the_formula_also_in_padded_batches(config: ModelConfig) -> None:
    """Every token attends to every other, and to no padding, whatever its id."""
    model = randomised(build_model(config)).double()
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    padded = [
        logits_of(model, torch.tensor([ids + [fill] * (7 - len(ids)) for ids in IDS]), torch.tensor([7, 4, 1]))
        for fill in (0, 5)
    ]
    for row, ids in enumerate(IDS):
        expected = reference_parts.encoder_logits(weights, config, ids, len(ids), table=np.float32)
        for found in (logits_of(model, torch.tensor([ids]))[0], *(batch[row, : len(ids)] for batch in padded)):
            np.testing.assert_allclose(found.detach().numpy(), expected, rtol=0, atol=1e-10)


def test_without_positions_a_permuted_input_gives_the_permuted_output() -> None:
    """Attention and feed-forward layers are permutation equivariant."""
    ids, order = torch.tensor(IDS[:1]), [4, 0, 6, 1, 3, 2, 5]
    for config in VARIANTS.values():
        model = randomised(build_model(config)).double()
        equal = torch.allclose(logits_of(model, ids[:, order]), logits_of(model, ids)[:, order], rtol=0, atol=1e-12)
        assert equal == (config.position == "none")


@pytest.mark.slow
@pytest.mark.parametrize("config", [VARIANTS["modern"], VARIANTS["original"]], ids=["modern", "original"])
def test_masked_tokens_of_one_batch_can_be_overfitted(config: ModelConfig) -> None:
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
