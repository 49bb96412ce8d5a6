import itertools

import pytest
import torch
from torch import nn

from tests.variants import VARIANTS, every_variant, randomised, small
from tinylm.adapters.lora import add_lora
from tinylm.config.model import ModelConfig
from tinylm.config.run import AdapterConfig
from tinylm.generation import fuse_layers
from tinylm.generation.fuse_layers import FusedAttention, FusedGatedFeedForward, Int8Linear, fuse_model
from tinylm.models.adapter import set_adapter_scale
from tinylm.transformer.attention import CrossAttention
from tinylm.transformer.build import build_model


def names_of_type(model: nn.Module, type_: type[nn.Module]) -> set[str]:
    return {name for name, found in model.named_modules() if type(found) is type_}


@every_variant
def test_a_fused_model_predicts_the_same_with_a_cache_and_without(config: ModelConfig) -> None:
    """The reference is the model before fusing, in float64."""
    model = randomised(build_model(config))
    exact = randomised(build_model(config)).double()
    fuse_model(model)
    ids = torch.randint(config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = exact.logits(exact(ids).hidden).float()
        tolerance = {"rtol": 1e-3, "atol": 1e-3 * float(expected.abs().max())}
        torch.testing.assert_close(model.logits(model(ids).hidden), expected, **tolerance)
        cache = model.make_cache(2, 20)
        parts = [model.logits(model(part, cache).hidden) for part in ids.split([7, 1, 1, 11], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, **tolerance)


def test_layers_with_the_same_input_are_fused_but_no_experts_and_no_cross_attention() -> None:
    for choices, fused, expected in (
        ({}, FusedAttention, {"layers.0.attention", "layers.1.attention"}),
        ({}, FusedGatedFeedForward, {"layers.0.feedforward", "layers.1.feedforward"}),
        ({"experts": 4}, FusedAttention, {"layers.0.attention", "layers.1.attention"}),
        ({"experts": 4}, FusedGatedFeedForward, set()),
    ):
        model = build_model(small(**choices))
        fuse_model(model)
        assert names_of_type(model, fused) == expected
    translator = build_model(small("original", kv_heads=4, architecture="encoder-decoder", encoder_layers=2))
    fuse_model(translator)
    assert names_of_type(translator, CrossAttention) == {"layers.0.cross_attention", "layers.1.cross_attention"}
    assert len(names_of_type(translator, FusedAttention)) == 4


@pytest.mark.parametrize("int8", [False, True])
def test_weights_stored_by_columns_are_stored_by_rows_afterwards(int8: bool) -> None:
    """Those of an imported GPT-2 are; the int8 kernel reads all weights by rows."""
    config = small(activation="gelu", tie=False)
    model, reference = randomised(build_model(config)), randomised(build_model(config))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = layer.weight.data.T.contiguous().T
    for fused in (model, reference):
        fuse_model(fused, int8)
    assert all(tensor.is_contiguous() for tensor in (*model.parameters(), *model.buffers()))
    ids = torch.randint(config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).hidden, reference(ids).hidden)


def test_a_tied_output_layer_is_quantized_if_it_is_large_and_the_embedding_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = small().vocab_size * small().width
    for large, int8, untied in ((weights + 1, True, False), (weights, False, False), (weights, True, True)):
        monkeypatch.setattr(fuse_layers, "LARGE_EMBEDDING", large)
        model, exact = (randomised(build_model(small())) for _ in range(2))
        fuse_model(model, int8)
        assert (type(model.output) is Int8Linear) == untied == (model.output is not None)
        assert model.embedding.weight.dtype == torch.float32
    hidden = torch.randn(3, 16)
    found, expected = (m.logits(hidden) for m in (model, exact))
    assert 0 < (found - expected).norm() / expected.norm() < 0.02


def test_layers_with_adapters_are_not_fused_and_adapters_can_still_be_scaled() -> None:
    """Adapters are on layers that would be fused, on one that would not, and on the tied embedding."""
    targets = ("q_proj", "up_proj", "o_proj", "embedding")
    config = AdapterConfig(base="", base_digest="", rank=2, dropout=0.0, targets=targets)
    model, exact = (randomised(build_model(small())) for _ in range(2))
    layers = [add_lora(adapted, config) for adapted in (model, exact)]
    for adapted in (model, exact):
        randomised(adapted, 3)
    exact.double()
    fuse_model(model.eval())
    assert not names_of_type(model, FusedAttention) and not names_of_type(model, FusedGatedFeedForward)
    assert model.output is None
    ids = torch.arange(10).unsqueeze(0)
    for scale in (1.0, 0.0, 0.5):
        for group in layers:
            set_adapter_scale(group, scale)
        with torch.inference_mode():
            found, expected = model.logits(model(ids).hidden), exact.logits(exact(ids).hidden).float()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_fused_encoders_and_encoder_decoders_predict_the_same_with_padding() -> None:
    ids, lengths, targets = torch.arange(24).view(2, 12) % 13, torch.tensor([12, 7]), torch.arange(10).view(2, 5)
    for preset, sides in itertools.product(("modern", "original"), (None, 2)):
        architecture = "encoder-decoder" if sides else "encoder"
        config = small(preset, kv_heads=4, architecture=architecture, encoder_layers=sides)
        model, exact = randomised(build_model(config)), randomised(build_model(config)).double()
        fuse_model(model)
        inputs = (targets, ids, lengths) if sides else (ids, lengths)
        with torch.inference_mode():
            found, expected = (m.logits(m(*inputs).hidden)[1, :7] for m in (model, exact))
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_a_fused_model_in_bf16_keeps_gains_that_bf16_would_round() -> None:
    """Weights of 2^-9 and 3 * 2^-9, for gains of 1 + weight, which in bf16 would be 1 and 1 + 2^-7."""
    config = dict(VARIANTS)["gemma 3"]
    model, exact = (randomised(build_model(config)) for _ in range(2))
    for one in (model, exact):
        for name, parameter in one.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.constant_(parameter, 2**-9)
                parameter.data[::2] *= 3
        one.bfloat16()
    fuse_model(model)
    assert names_of_type(model, FusedAttention)
    ids = torch.randint(config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    norms = [one.get_submodule("layers.0.attention") for one in (model, exact)]
    x = torch.randn(2, 5, config.width, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        fused, plain = (norm.project(x, None) for norm in norms)
        assert all(map(torch.equal, fused, plain))
        found, expected = (one.logits(one(ids).hidden).float() for one in (model, exact))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()))
