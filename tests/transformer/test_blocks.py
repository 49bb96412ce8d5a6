"""Experts and their routing, and dropout of the embedding, the sublayers and the attention weights."""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import reference_parts
from tests.variants import randomised, small
from tinylm.transformer.architectures import CacheShape, Decoder, Embeddings
from tinylm.transformer.attention import DotProduct, Heads, SelfAttention
from tinylm.transformer.blocks import (
    FeedForward,
    MergedExperts,
    ParallelBlock,
    PostNormBlock,
    PreNormBlock,
    RoutedExperts,
    SandwichNormBlock,
    summarise_routing,
)
from tinylm.transformer.build import build_model
from tinylm.transformer.position import Position

E, K, D = 5, 2, 8
BALANCE = 0.25


def experts(
    kind: type[RoutedExperts] = RoutedExperts, n: int = E, k: int = K, normalise: bool | None = None
) -> RoutedExperts:
    each = [FeedForward(D, 12, True, F.relu) for _ in range(n)]
    return randomised(kind(D, each, k, k > 1 if normalise is None else normalise, BALANCE)).double()


def tokens(batch: int = 1, steps: int = 7) -> torch.Tensor:
    return torch.randn(batch, steps, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_balance_loss_entropy_and_expert_shares_equal_their_formulas() -> None:
    """Of one layer; `test_architectures.py` compares those of several layers with padding."""
    for kind in (RoutedExperts, MergedExperts):
        layer, x = experts(kind).train(), tokens(batch=3)
        weight = layer.router.weight.detach().numpy()
        p = np.array([[reference_parts.router_probabilities(row, weight) for row in rows] for rows in x.numpy()])
        summary = summarise_routing(layer(x)[1], None)
        balance = sum(reference_parts.load_balance(rows, K) for rows in p)
        assert summary.balance_loss.item() == pytest.approx(BALANCE * balance, rel=1e-12)
        assert summary.entropy.item() == pytest.approx(reference_parts.router_entropy(p.reshape(-1, E)), rel=1e-12)
        chosen = [e for row in p.reshape(-1, E) for e in reference_parts.largest(row, K)]
        assert summary.shares[0].tolist() == pytest.approx([chosen.count(e) / len(chosen) for e in range(E)])


def test_unused_experts_have_a_gradient_in_training_and_are_not_computed_in_evaluation() -> None:
    """The cost of a decoded token is K experts, whatever the number of experts. There is no routing to report."""
    for kind in (RoutedExperts, MergedExperts):
        layer = experts(kind, n=40)
        layer.train()(tokens(steps=1))[0].sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
        run: set[int] = set()
        for e, expert in enumerate(layer.experts):
            expert.up_proj.register_forward_hook(lambda *_, e=e, run=run: run.add(e))
        assert layer.eval()(tokens(steps=1))[1] is None
        assert len(run) == K


def test_experts_equal_their_formula_with_and_without_normalised_router_weights() -> None:
    modes, x = ((RoutedExperts, "route"), (MergedExperts, "merge")), tokens()
    for (kind, mode), normalise, k in itertools.product(modes, (True, False), (1, 3)):
        layer = experts(kind, k=k, normalise=normalise).eval()
        weights = {"m.router.weight": layer.router.weight.detach().numpy()}
        for name in ("up_proj", "down_proj"):
            for ours, theirs in (("weight", name), ("bias", name.replace("proj", "bias"))):
                each = [expert.get_parameter(f"{name}.{ours}").detach().numpy() for expert in layer.experts]
                weights[f"m.{theirs}"] = np.array(each)
        row_of = functools.partial(reference_parts.experts_forward, weights=weights, prefix="m", k=k)
        expected = [row_of(row, activation="relu", mode=mode, normalise=normalise) for row in x[0].numpy()]
        np.testing.assert_allclose(layer(x)[0][0].detach().numpy(), expected, atol=1e-12)


class Ones(nn.Module):
    """A sublayer that outputs ones, and no routing if it is a feed-forward layer."""

    def __init__(self, feedforward: bool = False) -> None:
        super().__init__()
        self.feedforward = feedforward

    def forward(self, x: Tensor, *context: object) -> Tensor | tuple[Tensor, None]:
        return (torch.ones_like(x), None) if self.feedforward else torch.ones_like(x)


def shares(x: Tensor) -> dict[float, float]:
    """The share of each value, in thirds."""
    values, counts = x.mul(3).round().unique(return_counts=True)
    return dict(zip(values.tolist(), (counts / x.numel()).tolist(), strict=True))


def test_the_dropout_of_embeddings_and_sublayers_rescales_kept_values_and_is_off_in_evaluation() -> None:
    """Each sublayer outputs 1 and, with p = 1/4, independently adds 0 with probability 1/4, else 4/3."""
    torch.manual_seed(0)
    x = torch.zeros(100, 100, 10)
    for block in (PreNormBlock, PostNormBlock, SandwichNormBlock, ParallelBlock):
        layer = block(Ones(), Ones(feedforward=True), nn.Identity, dropout=0.25)
        found = shares(layer.train()(x, None, None, None)[0])
        assert found == pytest.approx({0.0: 1 / 16, 4.0: 6 / 16, 8.0: 9 / 16}, abs=0.01)
        assert torch.equal(layer.eval()(x, None, None, None)[0], torch.full_like(x, 2.0))
    parts = (Position(), [], nn.Identity(), 0.25, Embeddings(nn.Embedding.from_pretrained(torch.ones(1, 10)), None), 8)
    model, ids = Decoder(*parts, cache_shape=CacheShape(1, 2, ())), torch.zeros(1000, 10, dtype=torch.long)
    assert shares(model.train()(ids).hidden) == pytest.approx({0.0: 0.25, 4.0: 0.75}, abs=0.01)
    assert torch.equal(model.eval()(ids).hidden, torch.ones(1000, 10, 10))


def test_the_dropout_of_attention_is_unbiased_and_off_in_evaluation() -> None:
    torch.manual_seed(0)
    parts = (16, Heads(4, 4, 4), DotProduct(0.5), nn.Identity(), nn.Identity(), True, True)
    attention = randomised(SelfAttention(*parts)).double()
    x = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = attention(x)
    assert torch.equal(attention(x), exact)
    many = attention.train()(x.expand(4000, -1, -1))
    spread = many.std(dim=0)
    assert (spread > 0.01).any(dim=-1).all()  # the weights of every token vary, even the single weight of the first
    error = (many.mean(dim=0) - exact[0]).abs() / (spread / 4000**0.5 + 1e-12)
    assert error.max() < 5  # standard errors, over 112 numbers


def test_a_model_has_its_rates_of_dropout_in_all_places_and_in_training_only() -> None:
    model = build_model(small(dropout=0.3, attention_dropout=0.2, layers=2))
    dropped = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    attention = {f"layers.{i}.attention.core.dropout": 0.2 for i in range(2)}
    assert dropped == {"dropout": 0.3, "layers.0.dropout": 0.3, "layers.1.dropout": 0.3, **attention}
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    for position in ("rope", "relative"):
        for choices in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
            dropping = randomised(build_model(small(position=position, **choices)))
            assert torch.equal(dropping(ids).hidden, randomised(build_model(small(position=position)))(ids).hidden)
            dropping.train()
            assert not torch.equal(dropping(ids).hidden, dropping(ids).hidden)
