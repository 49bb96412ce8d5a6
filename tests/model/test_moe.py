import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import reference_parts
from tests.variants import randomised
from tinylm.model.feedforward import FeedForward
from tinylm.model.moe import MergedExperts, RoutedExperts
from tinylm.model.routing import RoutingSummary, merge_summaries, summarise_routing

E, K, D = 5, 2, 8
BALANCE = 0.25


def experts(
    kind: type[RoutedExperts] = RoutedExperts, n: int = E, k: int = K, normalise: bool | None = None
) -> RoutedExperts:
    each = [FeedForward(D, 12, True, F.relu) for _ in range(n)]
    return randomised(kind(D, each, k, k > 1 if normalise is None else normalise, BALANCE)).double()


def tokens(batch: int = 3, steps: int = 7) -> torch.Tensor:
    return torch.randn(batch, steps, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def probabilities(layer: RoutedExperts, x: torch.Tensor) -> np.ndarray:
    """(B, T, E), by the formula in float64."""
    weight = layer.router.weight.detach().numpy()
    return np.array([[reference_parts.router_probabilities(row, weight) for row in rows] for rows in x.numpy()])


def summary_of(layer: RoutedExperts, x: torch.Tensor, valid: torch.Tensor | None = None) -> RoutingSummary:
    routing = layer.train()(x)[1]
    assert routing is not None
    return summarise_routing(routing, valid)


@pytest.mark.parametrize("kind", [RoutedExperts, MergedExperts])
def test_balance_loss_entropy_and_expert_shares_equal_their_formulas(kind: type[RoutedExperts]) -> None:
    layer, x = experts(kind), tokens()
    p = probabilities(layer, x)
    summary = summary_of(layer, x)
    balance = sum(reference_parts.load_balance(rows, K) for rows in p)
    assert summary.balance_loss.item() == pytest.approx(BALANCE * balance, rel=1e-12)
    assert summary.entropy.item() == pytest.approx(reference_parts.router_entropy(p.reshape(-1, E)), rel=1e-12)
    chosen = [e for row in p.reshape(-1, E) for e in reference_parts.largest(row, K)]
    assert summary.shares[0].tolist() == pytest.approx([chosen.count(e) / len(chosen) for e in range(E)])


def test_padding_is_left_out_of_the_routing_statistics() -> None:
    layer, x = experts(), tokens()
    lengths = [7, 2, 4]
    valid = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
    padded = summary_of(layer, x, valid)
    alone = [summary_of(layer, x[i : i + 1, :length]) for i, length in enumerate(lengths)]
    assert padded.balance_loss.item() == pytest.approx(sum(one.balance_loss.item() for one in alone), rel=1e-12)
    assert padded.entropy.item() == pytest.approx(sum(one.entropy.item() for one in alone) / 3, rel=1e-12)
    torch.testing.assert_close(padded.shares, torch.stack([one.shares for one in alone]).mean(0), rtol=0, atol=1e-12)


def test_expert_shares_are_reported_per_layer() -> None:
    """Expert e of one layer is unrelated to expert e of another; a mean over layers would report even shares here."""
    summaries = []
    for favourite in range(2):
        layer = experts(n=2, k=1)
        torch.nn.init.zeros_(layer.router.weight)
        layer.router.weight.data[favourite] = 1.0
        summaries.append(summary_of(layer, torch.ones(1, 4, D, dtype=torch.float64)))
    assert merge_summaries(summaries).shares.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    total = sum(summary.balance_loss.item() for summary in summaries)
    assert merge_summaries(summaries).balance_loss.item() == pytest.approx(total)


@pytest.mark.parametrize("kind", [RoutedExperts, MergedExperts])
def test_unused_experts_are_not_computed_in_evaluation(kind: type[RoutedExperts]) -> None:
    """The cost of a decoded token is K experts, whatever the number of experts. There is no routing to report."""
    layer = experts(kind, n=40).eval()
    run: set[int] = set()
    for e, expert in enumerate(layer.experts):
        expert.up_proj.register_forward_hook(lambda *_, e=e: run.add(e))
    assert layer(tokens(batch=1, steps=1))[1] is None
    assert len(run) == K


@pytest.mark.parametrize("kind", [RoutedExperts, MergedExperts])
def test_every_expert_has_a_gradient_in_training_even_without_tokens(kind: type[RoutedExperts]) -> None:
    layer = experts(kind, n=40).train()
    layer(tokens(batch=1, steps=1))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_experts_equal_their_formula_with_and_without_normalised_router_weights() -> None:
    modes = ((RoutedExperts, "route"), (MergedExperts, "merge"))
    for (kind, mode), normalise, k in itertools.product(modes, (True, False), (1, 3)):
        compare(experts(kind, k=k, normalise=normalise).eval(), mode, normalise, k)


def compare(layer: RoutedExperts, mode: str, normalise: bool, k: int) -> None:
    """Compare a layer with the formula."""
    x = tokens(batch=1)
    weights = {"m.router.weight": layer.router.weight.detach().numpy()}
    for name in ("up_proj", "down_proj"):
        for ours, theirs in (("weight", name), ("bias", name.replace("proj", "bias"))):
            each = [expert.get_parameter(f"{name}.{ours}").detach().numpy() for expert in layer.experts]
            weights[f"m.{theirs}"] = np.array(each)
    expected = [reference_parts.experts_forward(row, weights, "m", k, "relu", mode, normalise) for row in x[0].numpy()]
    np.testing.assert_allclose(layer(x)[0][0].detach().numpy(), expected, atol=1e-12)
