import numpy as np
import pytest
import torch
from torch import nn

from tests.variants import every_variant, randomised, small
from tinylm.adapters.lora import add_lora
from tinylm.config.model import ModelConfig
from tinylm.config.run import AdapterConfig
from tinylm.generation.fuse_layers import Int8Linear, quantize_int8
from tinylm.transformer.build import build_model

SHAPES = [(16, 16), (1, 5), (7, 1), (33, 64), (100, 3)]


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs, bias)


def test_a_row_is_stored_as_whole_numbers_up_to_127_and_one_scale() -> None:
    for inputs, outputs in SHAPES:
        layer = linear(inputs, outputs)
        quantized = Int8Linear(layer)
        assert quantized.weight.dtype == torch.int8 and quantized.scale.dtype == torch.bfloat16
        for row, weights in enumerate(layer.weight.detach().double().numpy()):
            scale = quantized.scale[row].item()
            assert scale == pytest.approx(np.abs(weights).max() / 127, rel=2**-8)
            stored = quantized.weight[row, :inputs].numpy()
            assert np.abs(stored).max() == 127
            np.testing.assert_array_less(np.abs(weights - stored * scale), scale * 0.5001)


def test_the_output_has_the_shape_and_the_number_format_of_the_input_and_rows_of_zeros_stay_zero() -> None:
    """`tests/kernels/test_int8.py` compares the product with its formula."""
    layer = linear(16, 8)
    with torch.no_grad():
        layer.weight[1] = 0
    x = torch.randn(2, 5, 16)
    expected = layer(x)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = Int8Linear(layer)(x.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
        assert torch.equal(found[..., 1], layer.bias[1].to(dtype).expand(2, 5))


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


def test_every_linear_layer_except_routers_is_quantized_and_the_embedding_is_not() -> None:
    for tie in (True, False):
        model = build_model(small(tie=tie, experts=2))
        every = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        routers = {f"layers.{n}.feedforward.router" for n in range(2)}
        quantize_int8(model)
        assert {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} == routers < every
        assert {name for name, module in model.named_modules() if isinstance(module, Int8Linear)} == every - routers
        assert ("output" in every) != tie
        assert model.embedding.weight.dtype == torch.float32
