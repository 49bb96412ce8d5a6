import numpy as np
import pytest
import torch
from torch import nn

from tests.variants import every_variant, randomised, small
from tinylm.adapters.lora import add_lora
from tinylm.generation.quantize import Int8Linear, quantize_int8
from tinylm.model.build import build_model
from tinylm.model_config import ModelConfig
from tinylm.run_config import AdapterConfig

SHAPES = [(16, 16), (1, 5), (7, 1), (33, 64), (100, 3)]
ROUNDING, TRUNCATION = 2**-9, 2**-8  # largest relative errors of conversions to bf16


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs, bias)


@pytest.mark.parametrize("inputs, outputs", SHAPES)
def test_a_row_is_stored_as_whole_numbers_up_to_127_and_one_scale(inputs: int, outputs: int) -> None:
    layer = linear(inputs, outputs)
    quantized = Int8Linear(layer)
    assert quantized.weight.dtype == torch.int8 and quantized.scale.dtype == torch.bfloat16
    for row, weights in enumerate(layer.weight.detach().double().numpy()):
        scale = quantized.scale[row].item()
        assert scale == pytest.approx(np.abs(weights).max() / 127, rel=2**-8)
        stored = quantized.weight[row, :inputs].numpy()
        assert np.abs(stored).max() == 127
        np.testing.assert_array_less(np.abs(weights - stored * scale), scale * 0.5001)


@pytest.mark.parametrize("inputs, outputs", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (3,), (2, 5)])
def test_the_output_is_the_product_with_the_dequantized_weights(
    inputs: int, outputs: int, bias: bool, leading: tuple[int, ...]
) -> None:
    """scale * (W x) + b in float64, within the errors of converting inputs and sums to bf16."""
    layer = linear(inputs, outputs, bias)
    quantized = Int8Linear(layer)
    x = torch.randn(*leading, inputs)
    rows = x.reshape(-1, inputs).double().numpy()
    weights, scale = quantized.weight[:, :inputs].double().numpy(), quantized.scale.double().numpy()
    expected = rows @ weights.T * scale
    errors = np.abs(rows) @ np.abs(weights).T * ROUNDING + np.abs(rows @ weights.T) * TRUNCATION
    tolerance = errors * scale * 1.05 + 1e-6
    if layer.bias is not None:
        expected = expected + layer.bias.detach().double().numpy()
    found = quantized(x)
    assert found.shape == (*leading, outputs) and found.dtype == x.dtype
    np.testing.assert_array_less(np.abs(found.reshape(-1, outputs).double().numpy() - expected), tolerance)


def test_a_row_of_zeros_stays_zero() -> None:
    layer = linear(8, 2, bias=False)
    with torch.no_grad():
        layer.weight[1] = 0
    found = Int8Linear(layer)(torch.ones(1, 8))
    assert found[0, 1].item() == 0
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_number_format_of_the_input(dtype: torch.dtype) -> None:
    found = Int8Linear(linear(16, 8).to(dtype))(torch.ones(2, 16, dtype=dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), linear(16, 8)(torch.ones(2, 16)), rtol=0.05, atol=0.05)


@every_variant
def test_a_quantized_model_predicts_nearly_the_same(config: ModelConfig) -> None:
    """The relative error of the logits, over all positions, is below five per cent."""
    model, quantized = randomised(build_model(config)), randomised(build_model(config))
    quantize_int8(quantized)
    ids = torch.randint(config.vocab_size, (4, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        exact, found = (m.logits(m(ids).hidden) for m in (model, quantized))
    assert 0 < (found - exact).norm() / exact.norm() < 0.05


def test_a_router_with_an_adapter_is_not_quantized() -> None:
    model = build_model(small(experts=2))
    add_lora(model, AdapterConfig(base="", base_digest="", rank=2, dropout=0.0, targets=("router",)))
    quantize_int8(model)
    unquantized = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert unquantized == {f"layers.{n}.feedforward.router.base" for n in range(2)}


@pytest.mark.parametrize("tie", [True, False])
def test_every_linear_layer_except_routers_is_quantized_and_the_embedding_is_not(tie: bool) -> None:
    model = build_model(small(tie=tie, experts=2))
    every = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    routers = {f"layers.{n}.feedforward.router" for n in range(2)}
    names = every - routers
    quantize_int8(model)
    assert {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} == routers < every
    assert {name for name, module in model.named_modules() if isinstance(module, Int8Linear)} == names
    assert ("output" in names) != tie
    assert model.embedding.weight.dtype == torch.float32
