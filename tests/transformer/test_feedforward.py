import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import reference_parts
from tests.variants import randomised
from tinylm.transformer.blocks import FeedForward, MergedExperts, RoutedExperts, summarise_routing

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
