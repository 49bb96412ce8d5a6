"""Judge: Adam and AdamW as their papers write them, in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.variants import small
from tinylm.config import Budget, TrainingConfig
from tinylm.model.build import build_model
from tinylm.training.optimizer import OPTIMIZERS, build_optimizer, set_learning_rate

EPS = 1e-8


def config(**choices: object) -> TrainingConfig:
    plain: dict[str, object] = {"budget": Budget(steps=1), "batch_size": 1, "micro_batch": 1}
    plain |= {"lr": 0.01, "min_lr": 0.0, "warmup": 0.0, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.95}
    return TrainingConfig(**{**plain, **choices})


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        for name, shape in {"matrix": (3, 4), "cube": (2, 2, 2), "vector": (5,), "number": ()}.items():
            value = torch.randn(shape, generator=rng, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))
        self.frozen = nn.Parameter(torch.ones(2, 2, dtype=torch.float64), requires_grad=False)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_four_steps_are_the_formula_with_decay_on_matrices_alone(optimizer: str) -> None:
    model = Weights()
    chosen = config(optimizer=optimizer)
    built = build_optimizer(model, chosen)
    assert all(parameter is not model.frozen for group in built.param_groups for parameter in group["params"])
    rng = np.random.default_rng(1)
    x = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    m = {name: np.zeros_like(value) for name, value in x.items()}
    v = {name: np.zeros_like(value) for name, value in x.items()}
    for step in range(1, 5):
        lr = 0.01 / step
        set_learning_rate(built, lr)
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
            x[name] = x[name] - lr * first / (np.sqrt(second) + EPS)
        built.step()
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(parameter.detach().numpy(), x[name], rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("preset", ["modern", "gpt2"])
def test_gains_and_biases_are_not_decayed_and_every_parameter_is_trained_once(preset: str) -> None:
    model = build_model(small(preset))
    decay = {
        id(p): group["weight_decay"] for group in build_optimizer(model, config()).param_groups for p in group["params"]
    }
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        vector = name.endswith(".bias") or "norm" in name
        assert decay[id(parameter)] == (0.0 if vector else 0.3), name


def test_a_model_of_matrices_alone_can_be_trained() -> None:
    model = nn.Linear(2, 2, bias=False)
    (group,) = build_optimizer(model, config()).param_groups
    assert group["weight_decay"] == 0.3
    assert math.isclose(group["lr"], 0.01)
