"""Averaged weights. Reference: the weighted mean of all weights so far (Shamir and Zhang 2013) in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tinylm.training.weight_average import WeightAverage


def average_random_weights(steps: int, mean_age: float) -> tuple[list[Tensor], WeightAverage, nn.Linear]:
    """Average the weights of a model that are drawn at random in each step; returns them, the average and the model."""
    rng = torch.Generator().manual_seed(steps)
    model = nn.Linear(3, 2, dtype=torch.float64)
    average = WeightAverage(torch.optim.SGD(model.parameters()), mean_age)
    seen = []
    for step in range(1, steps + 1):
        model.weight.data = torch.randn(2, 3, generator=rng, dtype=torch.float64)
        average.update(step)
        seen.append(model.weight.detach().clone())
    return seen, average, model


def coefficients(steps: int, mean_age: float) -> list[float]:
    """The coefficient of step i is proportional to Gamma(i + eta) / Gamma(i), and their sum is 1."""
    eta = 1 / mean_age - 2
    raw = [math.lgamma(i + eta) - math.lgamma(i) for i in range(1, steps + 1)]
    largest = max(raw)
    total = sum(math.exp(value - largest) for value in raw)
    return [math.exp(value - largest) / total for value in raw]


@given(steps=st.integers(1, 40), mean_age=st.floats(0.02, 0.5))
def test_the_average_is_the_weighted_mean_of_all_weights_so_far(steps: int, mean_age: float) -> None:
    seen, average, model = average_random_weights(steps, mean_age)
    expected = sum(c * weights for c, weights in zip(coefficients(steps, mean_age), seen, strict=True))
    with average.average_parameters():
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-10, atol=1e-10)


def test_the_mean_age_is_the_fraction_of_the_steps() -> None:
    steps = 100_000
    for mean_age in (0.5, 0.1, 0.03):
        age = sum(c * (steps - i) for i, c in enumerate(coefficients(steps, mean_age), start=1))
        assert math.isclose(age, mean_age * steps, rel_tol=1e-3)


def test_the_model_gets_its_own_weights_back_even_after_an_error() -> None:
    seen, average, model = average_random_weights(5, 0.1)
    with pytest.raises(ZeroDivisionError), average.average_parameters():
        assert not torch.equal(model.weight, seen[-1])
        raise ZeroDivisionError
    assert torch.equal(model.weight, seen[-1])


def test_before_the_first_step_the_average_equals_the_model() -> None:
    _, average, model = average_random_weights(0, 0.1)
    before = model.weight.detach().clone()
    with average.average_parameters():
        assert torch.equal(model.weight, before)
