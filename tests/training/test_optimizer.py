"""Optimizers, learning rates and averages. References: the formulas of their papers in float64, and torch's Muon."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.variants import small
from tinylm.config.training import SCHEDULES, Budget, TrainingConfig
from tinylm.errors import UsageError
from tinylm.training.optimizer import WeightAverage, allocate_state, build_optimizer, layer_matrices, learning_rate
from tinylm.transformer.build import build_model


def config(**choices: object) -> TrainingConfig:
    plain: dict[str, object] = {"budget": Budget(steps=1), "batch_size": 1, "micro_batch": 1, "weight_decay": 0.3}
    plain |= {"lr": 0.01, "min_lr": 0.0, "warmup": 0.0, "beta1": 0.8, "beta2": 0.95}
    return TrainingConfig(**{**plain, **choices})


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        for name, shape in {"matrix": (3, 4), "cube": (2, 2, 2), "vector": (5,), "number": ()}.items():
            value = torch.randn(shape, generator=rng, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))
        self.frozen = nn.Parameter(torch.ones(2, 2, dtype=torch.float64), requires_grad=False)


@pytest.mark.parametrize(("optimizer", "epsilon"), [("adam", 1e-8), ("adamw", 1e-3)])
def test_four_steps_equal_the_formula_with_decay_on_matrices_only(optimizer: str, epsilon: float) -> None:
    model = Weights()
    chosen = config(optimizer=optimizer, epsilon=epsilon)
    built = build_optimizer(model, chosen, "fp32")
    assert all(parameter is not model.frozen for group in built.param_groups for parameter in group["params"])
    rng = np.random.default_rng(1)
    x = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    m = {name: np.zeros_like(value) for name, value in x.items()}
    v = {name: np.zeros_like(value) for name, value in x.items()}
    for step in range(1, 5):
        lr = 0.01 / step
        for group in built.param_groups:
            group["lr"] = lr
        for name, parameter in model.named_parameters():
            if name == "frozen":
                continue
            g = rng.normal(size=x[name].shape)
            parameter.grad = torch.tensor(g)
            decay = 0.3 if x[name].ndim >= 2 else 0.0
            if optimizer == "adam":
                g = g + decay * x[name]
            else:
                x[name] = x[name] - lr * decay * x[name]
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            first, second = m[name] / (1 - 0.8**step), v[name] / (1 - 0.95**step)
            x[name] = x[name] - lr * first / (np.sqrt(second) + epsilon)
        built.step()
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(parameter.detach().numpy(), x[name], rtol=1e-12, atol=1e-13, err_msg=name)


def test_a_model_without_vectors_can_be_trained_and_a_decay_rate_may_be_an_integer() -> None:
    (group,) = build_optimizer(nn.Linear(2, 2, bias=False), config(beta1=0), "fp32").param_groups
    assert (group["weight_decay"], group["lr"], group["betas"]) == (0.3, 0.01, (0.0, 0.95))


def orthogonalise(matrix: np.ndarray) -> np.ndarray:
    """Five steps of the quintic Newton-Schulz iteration X <- a X + (b X X^T + c (X X^T)^2) X (Jordan et al. 2024)."""
    x = matrix / np.linalg.norm(matrix)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize(
    ("optimizer", "dtype", "tolerance"), [("muon", "fp32", 1e-4), ("normuon", "fp16", 1e-4), ("normuon", "bf16", 0.05)]
)
def test_muon_equals_its_formula_for_layer_matrices_and_adamw_for_other_parameters(
    optimizer: str, dtype: str, tolerance: float
) -> None:
    """Nesterov momentum, decay, and updates times 0.2 sqrt(max(rows, columns)) (Liu et al. 2025) or, with the rows
    normalised, of root mean square 0.2 (Li et al. 2025, algorithm 1). In each step, other parameters have no gradient.

    The relative error of products in bf16 is a few hundredths.
    """
    model, twin = (build_model(small(experts=2), seed=1).double() for _ in range(2))
    settings = (config(optimizer=name, epsilon=1e-3, momentum=0.9) for name in (optimizer, "adamw"))
    muon, adamw = (build_optimizer(m, chosen, dtype) for m, chosen in zip((model, twin), settings, strict=True))
    matrices = {id(matrix) for matrix in layer_matrices(model)}
    momentum = {name: np.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    moment = {name: np.zeros(len(parameter)) for name, parameter in model.named_parameters()}
    rng = np.random.default_rng(1)
    for step in range(4):
        lr = 0.01 / (step + 1)
        before = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
        nesterov: dict[str, np.ndarray] = {}
        for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            parameter.grad = other.grad = None
            if rng.random() > 0.2:
                g = rng.normal(size=parameter.shape)
                parameter.grad, other.grad = torch.tensor(g), torch.tensor(g)
                momentum[name] = 0.9 * momentum[name] + 0.1 * g
                nesterov[name] = 0.1 * g + 0.9 * momentum[name]
        for built in (muon, adamw):
            for group in built.param_groups:
                group["lr"] = lr
            built.step()
        for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            if id(parameter) not in matrices or name not in nesterov:
                assert torch.equal(parameter, other if name in nesterov else torch.tensor(before[name])), name
                continue
            update = 0.2 * math.sqrt(max(parameter.shape)) * orthogonalise(nesterov[name])
            if optimizer == "normuon":
                update = orthogonalise(nesterov[name])
                moment[name] = 0.95 * moment[name] + 0.05 * (update**2).mean(axis=1)
                update = update / np.sqrt(moment[name])[:, None]
                update = 0.2 * update / np.sqrt((update**2).mean())
            found = ((1 - lr * 0.3) * before[name] - parameter.detach().numpy()) / lr
            assert np.linalg.norm(found - update) < tolerance * np.linalg.norm(update), name


def test_muon_trains_linear_layers_of_blocks_but_no_routers_and_no_embeddings() -> None:
    shape = {"architecture": "encoder-decoder", "encoder_layers": 1, "layers": 1}
    model = build_model(small(experts=2, position="relative", **shape))
    matrices = {id(matrix) for matrix in layer_matrices(model)}
    names = [name.split(".")[-2] for name, parameter in model.named_parameters() if id(parameter) in matrices]
    assert set(names) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(names) == (4 + 2 * 3) + (2 * 4 + 2 * 3)
    with pytest.raises(UsageError, match="none is trained here; use adamw"):
        build_optimizer(nn.Linear(2, 2), config(optimizer="muon"), "fp32")


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "normuon"])
def test_state_allocated_before_the_first_step_equals_the_state_of_that_step(optimizer: str) -> None:
    """Reference: an optimizer of the same class that allocates its state in its first step."""
    ours, theirs = (build_model(small(), seed=1) for _ in range(2))
    early, late = (build_optimizer(model, config(optimizer=optimizer), "fp32") for model in (ours, theirs))
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    allocate_state(early)
    for step in range(2):
        for one, other in pairs:
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
            other.grad = one.grad.clone()
        early.step()
        late.step()
        allocate_state(early)  # keeps the existing state
    for one, other in pairs:
        assert torch.equal(one, other)
        torch.testing.assert_close(dict(early.state[one]), dict(late.state[other]), rtol=0, atol=0)
    other = torch.optim.SGD(Weights().parameters(), lr=1.0, momentum=0.9)
    allocate_state(other)
    assert not other.state


# Learning rates.


# The fraction of lr - min_lr that is left at progress p after a warmup of w, with x = (p - w) / (1 - w).
LEFT: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "trapezoid": lambda x: 1 if x <= 0.5 else 2 - 2 * x,
}


def test_each_decay_equals_its_formula_and_ends_at_min_lr() -> None:
    """After a linear warmup. That of inverse-sqrt may end before, and without a warmup begins at 0.001."""
    assert set(SCHEDULES) == {*LEFT, "inverse-sqrt"}
    for schedule, warmup in itertools.product(SCHEDULES, (0.0, 0.02, 0.5, 1.0)):
        chosen = config(lr=3e-3, min_lr=1e-4, warmup=warmup, schedule=schedule)
        for progress in (0.0, 1e-9, 4e-3, 0.02, 0.021, 0.25, 0.5, 0.501, 0.7, 0.75, 0.9, 0.999, 1.0, 1 + 1e-9, 1.5):
            if progress < warmup:
                expected = 3e-3 * progress / warmup
            elif schedule == "inverse-sqrt":
                expected = max(1e-4, 3e-3 * min(1, ((warmup or 1e-3) / max(progress, 1e-3)) ** 0.5))
            else:
                x = (progress - warmup) / (1 - warmup) if warmup < 1 else 0
                expected = 1e-4 + (3e-3 - 1e-4) * LEFT[schedule](min(1, x))
            found = learning_rate(progress, chosen)
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-15), (schedule, warmup, progress)


# Averaged weights: the weighted mean of all weights so far (Shamir and Zhang 2013).


def average_random_weights(steps: int, mean_age: float) -> tuple[list[Tensor], WeightAverage, nn.Linear]:
    """Average weights that are drawn at random in each step; returns them, the average and the model."""
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
    raw = [math.exp(math.lgamma(i + eta) - math.lgamma(i) - math.lgamma(steps + eta)) for i in range(1, steps + 1)]
    return [value / sum(raw) for value in raw]


@given(steps=st.integers(1, 40), mean_age=st.floats(0.02, 0.5))
def test_the_average_is_the_weighted_mean_of_all_weights_so_far(steps: int, mean_age: float) -> None:
    seen, average, model = average_random_weights(steps, mean_age)
    expected = sum(c * weights for c, weights in zip(coefficients(steps, mean_age), seen, strict=True))
    with average.average_parameters():
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-10, atol=1e-10)


def test_the_model_gets_its_own_weights_back_even_after_an_error() -> None:
    """Before the first step, the average equals them."""
    for steps in (5, 0):
        _, average, model = average_random_weights(steps, 0.1)
        before = model.weight.detach().clone()
        with pytest.raises(ZeroDivisionError), average.average_parameters():
            assert torch.equal(model.weight, before) == (steps == 0)
            raise ZeroDivisionError
        assert torch.equal(model.weight, before)
