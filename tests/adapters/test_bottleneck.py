from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests import reference_parts
from tests.variants import every_variant, randomised, small
from tinylm.adapters.adapter import adapter_layers, adapter_tensors, load_adapter_tensors
from tinylm.adapters.bottleneck import SUBLAYERS, Bottleneck, add_bottlenecks, sublayers
from tinylm.adapters.load import set_adapter_scale
from tinylm.model.build import build_model
from tinylm.model.stack import Transformer
from tinylm.model_config import ModelConfig
from tinylm.run_config import AdapterConfig

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 12]])
SETTINGS = AdapterConfig(
    kind="bottleneck", base="b", base_digest="d", rank=3, alpha=1.0, dropout=0.0, targets=SUBLAYERS
)


def exact(config: ModelConfig) -> Transformer:
    return randomised(build_model(config)).double()


def logits(model: Transformer) -> Tensor:
    with torch.no_grad():
        return model.logits(model.probe(IDS).hidden)


def adapted(config: ModelConfig, seed: int = 0) -> Transformer:
    model = exact(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in add_bottlenecks(model, SETTINGS).values():
            for parameter in layer.trainable_parameters().values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def test_a_bottleneck_around_an_identity_equals_the_formula() -> None:
    torch.manual_seed(0)
    layer = Bottleneck(torch.nn.Identity(), 5, 3, 0.0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 5, dtype=torch.float64)
    weights = [p.detach().numpy() for p in (layer.down.weight, layer.down.bias, layer.up.weight, layer.up.bias)]
    expected = reference_parts.bottleneck(x.numpy(), *weights, "gelu")
    np.testing.assert_allclose(layer(x).detach(), expected, atol=1e-10)


@every_variant
def test_bottlenecks_follow_both_sublayers_change_nothing_at_first_and_load_by_name(config: ModelConfig) -> None:
    base, new, one, other = exact(config), exact(config), adapted(config), adapted(config, seed=1)
    layers = add_bottlenecks(new, SETTINGS)
    assert list(layers) == [f"layers.{n}.{name}" for n in range(2) for name in ("attention", "feedforward")]
    assert torch.equal(logits(new), logits(base))
    assert {name.split(".")[3] for name, p in new.named_parameters() if p.requires_grad} == {"down", "up"}
    assert not torch.allclose(logits(one), logits(other))
    load_adapter_tensors(adapter_layers(other), adapter_tensors(adapter_layers(one)), Path("adapter"))
    assert torch.equal(logits(one), logits(other))
    set_adapter_scale(adapter_layers(other), 0.0)
    assert torch.equal(logits(other), logits(base))


def test_bottlenecks_are_fp32_and_leave_16_bit_weights_as_they_are() -> None:
    model = build_model(small()).bfloat16()
    add_bottlenecks(model, SETTINGS)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {dtypes[name] for name in trained} == {torch.float32}
    assert {dtypes[name] for name in dtypes.keys() - trained} == {torch.bfloat16}


def test_an_encoder_decoder_has_a_bottleneck_after_cross_attention() -> None:
    model = exact(small(architecture="encoder-decoder", encoder_layers=1, layers=1))
    assert sublayers(model) == SUBLAYERS
    assert sublayers(exact(small())) == ("attention", "feedforward")
    names = {name.rpartition(".")[2] for name in add_bottlenecks(model, SETTINGS)}
    assert names == {"attention", "cross_attention", "feedforward"}
