"""Judge: the weighted mean of all weights so far, with the weights of Shamir and Zhang 2013 written out in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tinylm.training.average import WeightAverage


def walk(steps: int, share: float) -> tuple[list[Tensor], WeightAverage, nn.Linear]:
    """A model whose weights are drawn anew at every step."""
    rng = torch.Generator().manual_seed(steps)
    model = nn.Linear(3, 2, dtype=torch.float64)
    average = WeightAverage(torch.optim.SGD(model.parameters()), share)
    seen = []
    for step in range(1, steps + 1):
        model.weight.data = torch.randn(2, 3, generator=rng, dtype=torch.float64)
        average.update(step)
        seen.append(model.weight.detach().clone())
    return seen, average, model


def shares_of_steps(steps: int, share: float) -> list[float]:
    """Step i weighs as much as Gamma(i + n) / Gamma(i), and all weigh 1 together."""
    n = 1 / share - 2
    raw = [math.lgamma(i + n) - math.lgamma(i) for i in range(1, steps + 1)]
    largest = max(raw)
    total = sum(math.exp(value - largest) for value in raw)
    return [math.exp(value - largest) / total for value in raw]


@given(steps=st.integers(1, 40), share=st.floats(0.02, 0.5))
def test_the_average_is_the_weighted_mean_of_all_weights_so_far(steps: int, share: float) -> None:
    seen, average, model = walk(steps, share)
    expected = sum(part * weights for part, weights in zip(shares_of_steps(steps, share), seen, strict=True))
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("share", [0.5, 0.1, 0.03])
def test_the_mean_age_is_the_share_of_the_steps(share: float) -> None:
    steps = 100_000
    age = sum(part * (steps - i) for i, part in enumerate(shares_of_steps(steps, share), start=1))
    assert math.isclose(age, share * steps, rel_tol=1e-3)


def test_a_share_of_a_half_is_the_plain_mean() -> None:
    seen, average, model = walk(7, 0.5)
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), torch.stack(seen).mean(0))


def test_afterwards_the_model_has_its_own_weights_again_even_after_an_error() -> None:
    seen, average, model = walk(5, 0.1)
    with pytest.raises(ZeroDivisionError), average.in_place():
        assert not torch.equal(model.weight, seen[-1])
        raise ZeroDivisionError
    assert torch.equal(model.weight, seen[-1])


def test_before_the_first_step_the_average_is_the_model() -> None:
    _, average, model = walk(0, 0.1)
    before = model.weight.detach().clone()
    with average.in_place():
        assert torch.equal(model.weight, before)
