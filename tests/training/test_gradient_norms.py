"""Gradient norms by layer. Reference: the norm in float64."""

from typing import Any

import pytest
import torch

from tinylm.training.gradient_norms import layer_gradient_norms


def test_gradient_norms_that_are_not_finite_are_none() -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))})
    for layer, gradient in zip(model["layers"].children(), (3.0, float("inf"), float("nan")), strict=True):
        layer.weight.grad = torch.full((1, 1), gradient)
        layer.bias.grad = torch.full((1,), 4.0)
    assert layer_gradient_norms(model) == {"layers.0": 5.0, "layers.1": None, "layers.2": None}


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_gradient_norms_equal_those_in_float64_at_every_scale(scale: float) -> None:
    """In fp32, the squares of 1e30 overflow and those of 1e-30 underflow."""
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(30, 40) for _ in range(2))})
    rng = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=rng)
    for name, norm in layer_gradient_norms(model).items():
        gradients = [parameter.grad for parameter in model.get_submodule(name).parameters()]
        exact = torch.cat([gradient.double().flatten() for gradient in gradients if gradient is not None]).norm()
        assert norm == pytest.approx(exact.item(), rel=1e-6)


def test_gradient_norms_are_computed_without_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2).bfloat16()])})
    model["layers"][0].weight.grad = torch.full((2, 2), 3.0).bfloat16()
    found: set[torch.dtype] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            found.update({result.dtype} if isinstance(result, torch.Tensor) else ())
            return result

    with Watch():
        assert layer_gradient_norms(model) == {"layers.0": 6.0}
    assert torch.float64 not in found
    assert torch.float32 in found


def test_gradients_of_zero_have_a_norm_of_zero_and_missing_gradients_have_none() -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    assert layer_gradient_norms(model) == {}
    model["layers"][0].weight.grad = torch.zeros(2, 2)
    assert layer_gradient_norms(model) == {"layers.0": 0.0}
