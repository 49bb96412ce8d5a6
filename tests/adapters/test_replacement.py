"""Parameters that an adapter brings, compared with modules that have interpolated parameters."""

import copy

import pytest
import torch
from torch import nn

from tinylm.adapters.adapter import Replacement
from tinylm.adapters.lora import LoRALinear, merge_lora
from tinylm.transformer.layers import LayerNorm, RMSNorm, UnitOffsetRMSNorm

torch.manual_seed(0)
MODULES: dict[str, nn.Module] = {
    "linear": nn.Linear(6, 4),
    "layer norm": LayerNorm(6, bias=True),
    "rms norm": RMSNorm(6),
    "unit-offset norm": UnitOffsetRMSNorm(6, bias=True),
    "embedding": nn.Embedding(9, 6),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_output_is_that_of_interpolated_parameters(name: str) -> None:
    for scale in (0.0, 0.3, 1.0, -2.0):
        module = copy.deepcopy(MODULES[name]).double()
        x = torch.tensor([[1, 8, 3]]) if name == "embedding" else torch.randn(2, 6, dtype=torch.float64)
        new = {key: torch.randn_like(value) for key, value in module.named_parameters()}
        expected = copy.deepcopy(module)
        with torch.no_grad():
            for key, value in expected.named_parameters():
                value += scale * (new[key] - value)
        layer = Replacement(module, new)
        layer.adapter_scale = scale
        torch.testing.assert_close(layer(x), expected(x), rtol=0, atol=1e-12)
        torch.testing.assert_close(layer.weight, expected.weight, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer.merged()(x), expected(x), rtol=0, atol=1e-12)


def test_replacements_and_low_rank_updates_of_one_module_add_up() -> None:
    module = nn.Linear(6, 4).double()
    w, b = module.weight.detach().clone(), module.bias.detach().clone()
    first, second, bias = torch.randn(4, 6).double(), torch.randn(4, 6).double(), torch.randn(4).double()
    inner = Replacement(module, {"weight": first})
    lora = LoRALinear(inner, 2, 1.5, 0.0)
    with torch.no_grad():
        lora.lora_B.normal_()
    outer = Replacement(lora, {"weight": second, "bias": bias})
    inner.adapter_scale, outer.adapter_scale = 0.5, 2.0
    x = torch.randn(3, 6).double()
    weight = w + 0.5 * (first - w) + 2.0 * (second - w) + 1.5 * lora.lora_B @ lora.lora_A
    expected = x @ weight.T + b + 2.0 * (bias - b)
    torch.testing.assert_close(outer(x), expected, rtol=0, atol=1e-12)


def test_a_replaced_bias_and_a_low_rank_update_are_merged_together() -> None:
    module = nn.Linear(6, 4).double()
    bias = torch.randn(4).double()
    model = nn.Sequential(LoRALinear(Replacement(module, {"bias": bias}), 2, 1.5, 0.0))
    with torch.no_grad():
        model[0].lora_B.normal_()
    x = torch.randn(3, 6).double()
    expected = model(x)
    merge_lora(model)
    assert model[0] is module
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)
    assert torch.equal(module.bias, bias)


def test_parameters_that_are_not_replaced_are_shared() -> None:
    module = nn.Linear(6, 4)
    layer = Replacement(module, {"bias": torch.randn(4)})
    assert layer.replacement.weight is module.weight
    assert layer.trainable_parameters().keys() == {"bias"}
