import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import reference_parts
from tests.variants import every_variant, randomised, small
from tinylm.model.build import build_model
from tinylm.model.decoder import CacheShape, Decoder
from tinylm.model.position import Position
from tinylm.model.stack import Embeddings, Transformer
from tinylm.model_config import ModelConfig

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 12, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]]


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
    logits = logits_of(model, torch.tensor(IDS[:2])).detach().numpy()
    for row, ids in zip(logits, IDS, strict=False):
        expected = reference_parts.decoder_logits_with_parts(weights, config, ids, table=np.float32)
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-10)


@every_variant
def test_position_tables_in_single_precision_change_logits_by_rounding_only(config: ModelConfig) -> None:
    model = exact(config)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    expected = reference_parts.decoder_logits_with_parts(weights, config, IDS[0])
    np.testing.assert_allclose(logits_of(model, torch.tensor(IDS[:1]))[0].detach().numpy(), expected, atol=3e-6)


@every_variant
def test_logits_of_a_batch_equal_those_of_single_rows(config: ModelConfig) -> None:
    model = exact(config)
    together = logits_of(model, torch.tensor(IDS))
    for row, ids in enumerate(IDS):
        torch.testing.assert_close(together[row], logits_of(model, torch.tensor([ids]))[0], rtol=0, atol=1e-12)


@every_variant
def test_attention_is_causal(config: ModelConfig) -> None:
    model = exact(config)
    ids = torch.tensor(IDS[:1])
    before = logits_of(model, ids)
    for t in range(1, ids.shape[1]):
        changed = ids.clone()
        changed[0, t:] = (ids[0, t:] + 1) % config.vocab_size
        after = logits_of(model, changed)
        torch.testing.assert_close(after[0, :t], before[0, :t], rtol=0, atol=1e-12)
        assert ((after[0, t:] - before[0, t:]).abs().amax(dim=-1) > 1e-6).all()


@every_variant
def test_gradients_reach_every_token_of_the_past_and_none_of_the_future(config: ModelConfig) -> None:
    model = exact(config)
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    logits = logits_of(model, torch.tensor(IDS[:1]))[0]
    direction = torch.randn(config.vocab_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for t, row in enumerate(logits):
        (gradient,) = torch.autograd.grad(row @ direction, embedded, retain_graph=True)
        size = gradient[0].abs().amax(dim=-1)
        assert (size[: t + 1] > 1e-8).all()
        assert (size[t + 1 :] == 0).all()


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


@every_variant
def test_every_parameter_has_a_gradient(config: ModelConfig) -> None:
    model = exact(config)
    F.cross_entropy(logits_of(model, torch.tensor(IDS)).flatten(0, 1), torch.tensor(IDS).flatten()).backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert idle == []


def test_a_dense_model_has_no_auxiliary_loss() -> None:
    assert exact(small())(torch.tensor(IDS)).aux.item() == 0


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_logits_of_a_slice_equal_a_slice_of_the_logits(tie: bool) -> None:
    model = exact(small(tie=tie))
    hidden = model(torch.tensor(IDS)).hidden
    all_logits = model.logits(hidden)
    assert all_logits.shape == (3, 9, 13)
    torch.testing.assert_close(model.logits(hidden[:, -1]), all_logits[:, -1], rtol=0, atol=1e-12)
    torch.testing.assert_close(model.logits(hidden.flatten(0, 1)[5:8]), all_logits.flatten(0, 1)[5:8])


def test_embedding_dropout_rescales_kept_values_and_is_off_in_evaluation() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(1, 10)
    nn.init.ones_(embedding.weight)
    embeddings = Embeddings(embedding, output=None)
    model = Decoder(Position(), [], nn.Identity(), 0.25, embeddings, 8, cache_shape=CacheShape(1, 2, ()))
    ids = torch.zeros(1000, 10, dtype=torch.long)
    values, counts = model.train()(ids).hidden.mul(3).round().unique(return_counts=True)
    assert values.tolist() == [0.0, 4.0]
    assert (counts / 100_000).tolist() == pytest.approx([0.25, 0.75], abs=0.01)
    assert torch.equal(model.eval()(ids).hidden, torch.ones(1000, 10, 10))


@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
@every_variant
def test_dropout_is_off_in_evaluation(config: ModelConfig, name: str) -> None:
    torch.manual_seed(0)
    dropping = randomised(build_model(ModelConfig(**{**vars(config), name: 0.5})))
    ids = torch.tensor(IDS)
    assert torch.equal(logits_of(dropping, ids), logits_of(randomised(build_model(config)), ids))
    dropping.train()
    assert not torch.equal(logits_of(dropping, ids), logits_of(dropping, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_embedding_is_scaled_by_a_number_rounded_to_its_dtype(dtype: torch.dtype) -> None:
    """sqrt(640) is 25.298, and 25.25 in bf16, whose products with 16-bit numbers differ in the last digit."""
    model = randomised(build_model(small(embedding_scale=640**0.5))).to(dtype)
    ids = torch.arange(13).unsqueeze(0)
    scale = {torch.float32: float(np.float32(640**0.5)), torch.bfloat16: 25.25}[dtype]
    assert torch.equal(model.embed(ids)[0], (model.embedding.weight.double() * scale).to(dtype))
