import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import reference_parts
from tests.variants import randomised
from tinylm.model.feedforward import FeedForward
from tinylm.model.moe import MergedExperts, RoutedExperts
from tinylm.model.routing import RoutingSummary, summarise, together

E, K, D = 5, 2, 8
BALANCE = 0.25


def experts(kind: type[RoutedExperts] = RoutedExperts, n: int = E, k: int = K) -> RoutedExperts:
    each = [FeedForward(D, 12, True, F.relu) for _ in range(n)]
    return randomised(kind(D, each, k, BALANCE)).double()


def tokens(batch: int = 3, steps: int = 7) -> torch.Tensor:
    return torch.randn(batch, steps, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def probabilities(layer: RoutedExperts, x: torch.Tensor) -> np.ndarray:
    """(B, T, E) as the formula has them."""
    weight = layer.router.weight.detach().numpy()
    return np.array([[reference_parts.router_probabilities(row, weight) for row in rows] for rows in x.numpy()])


def routing(layer: RoutedExperts, x: torch.Tensor, real: torch.Tensor | None = None) -> RoutingSummary:
    told = layer.train()(x)[1]
    assert told is not None
    return summarise(told, real)


@pytest.mark.parametrize("kind", [RoutedExperts, MergedExperts])
def test_the_router_tells_balance_entropy_and_shares_by_their_formulas(kind: type[RoutedExperts]) -> None:
    layer, x = experts(kind), tokens()
    p = probabilities(layer, x)
    told = routing(layer, x)
    balance = sum(reference_parts.load_balance(rows, K) for rows in p)
    assert told.balance.item() == pytest.approx(BALANCE * balance, rel=1e-12)
    assert told.entropy.item() == pytest.approx(reference_parts.router_entropy(p.reshape(-1, E)), rel=1e-12)
    chosen = [e for row in p.reshape(-1, E) for e in reference_parts.largest(row, K)]
    assert told.shares[0].tolist() == pytest.approx([chosen.count(e) / len(chosen) for e in range(E)])


def test_the_balance_of_sequences_adds_up_so_that_accumulation_changes_nothing() -> None:
    layer, x = experts(), tokens()
    assert routing(layer, x).balance.item() == pytest.approx(
        sum(routing(layer, x[i : i + 1]).balance.item() for i in range(3))
    )


def test_padding_counts_in_nothing_that_is_told() -> None:
    layer, x = experts(), tokens()
    lengths = [7, 2, 4]
    real = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
    padded = routing(layer, x, real)
    alone = [routing(layer, x[i : i + 1, :length]) for i, length in enumerate(lengths)]
    assert padded.balance.item() == pytest.approx(sum(one.balance.item() for one in alone), rel=1e-12)
    assert padded.entropy.item() == pytest.approx(sum(one.entropy.item() for one in alone) / 3, rel=1e-12)
    torch.testing.assert_close(padded.shares, torch.stack([one.shares for one in alone]).mean(0), rtol=0, atol=1e-12)


def test_an_expert_that_starves_in_one_layer_is_seen_beside_the_others() -> None:
    """Numbers of experts mean nothing from layer to layer: a mean over layers would call these even."""
    told = []
    for favourite in range(2):
        layer = experts(n=2, k=1)
        torch.nn.init.zeros_(layer.router.weight)
        layer.router.weight.data[favourite] = 1.0
        told.append(routing(layer, torch.ones(1, 4, D, dtype=torch.float64)))
    assert together(told).shares.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert together(told).balance.item() == pytest.approx(sum(one.balance.item() for one in told))


def test_nothing_is_told_once_training_is_over() -> None:
    assert experts().eval()(tokens())[1] is None


def test_an_even_router_is_in_balance_at_one_a_sequence() -> None:
    """E times the sum of 1/E of the tokens times 1/E of the probability."""
    layer = experts(k=E)
    torch.nn.init.zeros_(layer.router.weight)
    assert routing(layer, tokens()).balance.item() == pytest.approx(3 * BALANCE)


def test_balance_pulls_the_router_towards_even_shares() -> None:
    layer, x = experts(), tokens(batch=8, steps=32)
    optimizer = torch.optim.Adam([layer.router.weight], lr=0.01)
    first = routing(layer, x)
    for _ in range(200):
        optimizer.zero_grad()
        routing(layer, x).balance.backward()
        optimizer.step()
    last = routing(layer, x)
    assert last.balance < first.balance
    assert last.shares.std() < 0.5 * first.shares.std()


@pytest.mark.parametrize("kind", [RoutedExperts, MergedExperts])
def test_equal_experts_are_one_dense_layer(kind: type[RoutedExperts]) -> None:
    layer = experts(kind)
    for expert in layer.experts:
        expert.load_state_dict(layer.experts[0].state_dict())
    torch.testing.assert_close(layer(tokens())[0], layer.experts[0](tokens())[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [RoutedExperts, MergedExperts])
def test_experts_that_no_token_is_sent_to_are_not_asked(kind: type[RoutedExperts]) -> None:
    """Decoding a token costs K experts, however many there are."""
    layer = experts(kind, n=40).eval()
    asked: set[int] = set()
    for e, expert in enumerate(layer.experts):
        expert.up_proj.register_forward_hook(lambda *_, e=e: asked.add(e))
    layer(tokens(batch=1, steps=1))
    assert len(asked) == K


@pytest.mark.parametrize("kind", [RoutedExperts, MergedExperts])
def test_in_training_every_expert_has_a_gradient_so_that_none_is_left_out_of_a_step(kind: type[RoutedExperts]) -> None:
    layer = experts(kind, n=40).train()
    layer(tokens(batch=1, steps=1))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
