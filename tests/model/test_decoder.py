"""Decoders of all variants. Reference: their formulas in float64, one token at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import reference_parts
from tests.variants import every_variant, randomised, small
from tinylm.model.build import build_model
from tinylm.model.stack import Transformer
from tinylm.model_config import ModelConfig

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 12, 0]]


def exact(config: ModelConfig) -> Transformer:
    """Random weights in float64, so that tolerances can be tight."""
    return randomised(build_model(config)).double()


def logits_of(model: Transformer, ids: Tensor) -> Tensor:
    return model.logits(model(ids).hidden)


@every_variant
def test_logits_equal_the_formula(config: ModelConfig) -> None:
    """The model stores its tables of sines and cosines in float32, so the reference rounds its tables as well."""
    model = exact(config)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    logits = logits_of(model, torch.tensor(IDS)).detach().numpy()
    for row, ids in zip(logits, IDS, strict=True):
        expected = reference_parts.decoder_logits_with_parts(weights, config, ids, table=np.float32)
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-10)


@every_variant
def test_every_parameter_has_a_gradient(config: ModelConfig) -> None:
    model, ids = exact(config), torch.randint(13, (6, 20), generator=torch.Generator().manual_seed(0))
    F.cross_entropy(logits_of(model, ids).flatten(0, 1), ids.flatten()).backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert idle == []


@pytest.mark.slow
@every_variant
def test_one_batch_can_be_overfitted(config: ModelConfig) -> None:
    """Rows start with different tokens, so that every next token is determined by the tokens before it."""
    model = build_model(config, seed=1).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = torch.randint(config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = torch.arange(3)
    # Without residual connections, gradients are small at first, and how long depends on rounding.
    for _ in range(300 if config.residual else 3000):
        loss = F.cross_entropy(logits_of(model, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        if loss < 0.05:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss is still {loss:.3f}")


def test_the_embedding_is_scaled_by_a_number_rounded_to_its_dtype() -> None:
    """sqrt(640) is 25.298, and 25.25 in bf16, whose products with 16-bit numbers differ in the last digit."""
    ids = torch.arange(13).unsqueeze(0)
    for dtype, scale in ((torch.float32, float(np.float32(640**0.5))), (torch.bfloat16, 25.25)):
        model = randomised(build_model(small(embedding_scale=640**0.5))).to(dtype)
        assert torch.equal(model.embed(ids)[0], (model.embedding.weight.double() * scale).to(dtype))
