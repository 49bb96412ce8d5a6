import numpy as np
import torch

from tests import reference_parts
from tests.variants import small
from tinylm.adapters.bottleneck import SUBLAYERS, Bottleneck, add_bottlenecks, sublayers
from tinylm.config.run import AdapterConfig
from tinylm.transformer.build import build_model

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
