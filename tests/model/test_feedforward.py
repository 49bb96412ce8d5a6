import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import reference, reference_parts
from tests.variants import randomised
from tinylm.model.build import FEEDFORWARDS
from tinylm.model.feedforward import FeedForward, GatedFeedForward, gelu
from tinylm.model_config import ACTIVATIONS, GATED_ACTIVATIONS


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    ("activation", "formula"), [(F.relu, reference.relu), (gelu, reference.gelu)], ids=["relu", "gelu"]
)
def test_feedforward_equals_its_formula(activation, formula, bias: bool) -> None:
    """activation(x W1 + b1) W2 + b2."""
    layer = randomised(FeedForward(4, 7, bias, activation)).double()
    w = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    assert all(f"{name.split('.')[0]}.bias" in w for name in w) == bias
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    inner = formula(x.numpy() @ w["up_proj.weight"].T + w.get("up_proj.bias", 0))
    expected = inner @ w["down_proj.weight"].T + w.get("down_proj.bias", 0)
    np.testing.assert_allclose(layer(x)[0].detach().numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_gated_feedforward_equals_its_formula(bias: bool) -> None:
    """(silu(x Wg + bg) * (x W1 + b1)) W2 + b2."""
    layer = randomised(GatedFeedForward(4, 7, bias, F.silu)).double()
    w = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    assert all(f"{name.split('.')[0]}.bias" in w for name in w) == bias
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    gate, up = (x.numpy() @ w[f"{n}_proj.weight"].T + w.get(f"{n}_proj.bias", 0) for n in ("gate", "up"))
    expected = (reference.silu(gate) * up) @ w["down_proj.weight"].T + w.get("down_proj.bias", 0)
    np.testing.assert_allclose(layer(x)[0].detach().numpy(), expected, atol=1e-12)


def test_gelu_is_the_tanh_approximation() -> None:
    """At 2 the approximation gives 1.954598 and the error function 1.954500."""
    assert float(gelu(torch.tensor(2.0, dtype=torch.float64))) == pytest.approx(1.9545977, abs=1e-6)


def test_exact_gelu_is_x_times_the_normal_distribution_function() -> None:
    """Phi(2) = 0.977249868."""
    assert float(FEEDFORWARDS["gelu-exact"][1](torch.tensor(2.0, dtype=torch.float64))) == pytest.approx(1.954499736)


@pytest.mark.parametrize("activation", ["gelu", "gelu-exact", "relu", "swiglu", "geglu", "geglu-exact"])
def test_every_activation_equals_its_formula(activation: str) -> None:
    kind, function = FEEDFORWARDS[activation]
    layer = randomised(kind(4, 7, True, function)).double()
    parts = {
        name.replace("_proj.bias", "_bias").removesuffix(".weight"): p.detach().numpy()
        for name, p in layer.named_parameters()
    }
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [reference_parts.feedforward(row, parts, activation) for row in x.numpy()]
    np.testing.assert_allclose(layer(x)[0].detach().numpy(), expected, atol=1e-12)


def test_every_activation_of_a_configuration_has_a_layer() -> None:
    assert set(FEEDFORWARDS) == set(ACTIVATIONS)
    assert {name for name, (kind, _) in FEEDFORWARDS.items() if kind is GatedFeedForward} == set(GATED_ACTIVATIONS)
