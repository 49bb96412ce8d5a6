"""Modules with a bottleneck, or with parameters that an adapter brings, compared with their formulas."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests import reference_parts
from tests.variants import small
from tinylm.adapters.adapter import Replacement
from tinylm.adapters.bottleneck import SUBLAYERS, Bottleneck, add_bottlenecks, sublayers
from tinylm.adapters.lora import LoRALinear, merge_lora
from tinylm.config.run import AdapterConfig
from tinylm.transformer.build import build_model
from tinylm.transformer.layers import LayerNorm, RMSNorm, UnitOffsetRMSNorm

SETTINGS = AdapterConfig(
    kind="bottleneck", base="b", base_digest="d", rank=3, alpha=1.0, dropout=0.0, targets=SUBLAYERS
)


def test_a_bottleneck_around_an_identity_equals_the_formula() -> None:
    layer = Bottleneck(torch.nn.Identity(), 5, 3, 0.0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 5, dtype=torch.float64)
    weights = [p.detach().numpy() for p in (layer.down.weight, layer.down.bias, layer.up.weight, layer.up.bias)]
    expected = reference_parts.bottleneck(x.numpy(), *weights, "gelu")
    np.testing.assert_allclose(layer(x).detach(), expected, atol=1e-10)


def test_bottlenecks_follow_every_sublayer_are_fp32_and_leave_16_bit_weights_as_they_are() -> None:
    model = build_model(small()).bfloat16()
    assert sublayers(model) == ("attention", "feedforward")
    layers = add_bottlenecks(model, SETTINGS)
    assert list(layers) == [f"layers.{n}.{name}" for n in range(2) for name in ("attention", "feedforward")]
    dtypes = {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    assert set(dtypes.values()) == {(torch.float32, True), (torch.bfloat16, False)}
    assert {name.split(".")[3] for name, (_, trained) in dtypes.items() if trained} == {"down", "up"}


def test_an_encoder_decoder_has_a_bottleneck_after_cross_attention() -> None:
    model = build_model(small(architecture="encoder-decoder", encoder_layers=1, layers=1))
    assert sublayers(model) == SUBLAYERS
    names = {name.rpartition(".")[2] for name in add_bottlenecks(model, SETTINGS)}
    assert names == {"attention", "cross_attention", "feedforward"}


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
