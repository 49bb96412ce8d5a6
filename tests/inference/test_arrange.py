import pytest
import torch
from torch import nn

from tests.variants import every_variant, randomised, small
from tinylm.adapters.load import set_strength
from tinylm.adapters.lora import add_lora
from tinylm.config import AdapterConfig, ModelConfig
from tinylm.inference import arrange as module
from tinylm.inference.arrange import JoinedAttention, JoinedGatedFeedForward, PackedLinear, arrange
from tinylm.inference.generator import generate
from tinylm.inference.quantize import Int8Linear
from tinylm.inference.sampler import Sampler, Sampling
from tinylm.model.attention import CrossAttention
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.model.linear import HAS_ONEDNN, Linear
from tinylm.model.stack import Transformer

needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has its products from another library."""
    monkeypatch.setattr(module, "USES_ONEDNN", HAS_ONEDNN)


@pytest.fixture
def small_counts_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 1)


def kinds(model: nn.Module, kind: type[nn.Module]) -> set[str]:
    return {name for name, found in model.named_modules() if type(found) is kind}


@every_variant
@pytest.mark.usefixtures("small_counts_as_large")
def test_an_arranged_model_predicts_the_same_with_a_cache_and_without(config: ModelConfig) -> None:
    """Every matrix packed, against the model as it was in float64."""
    model = randomised(build_model(config))
    exact = randomised(build_model(config)).double()
    arrange(model)
    ids = torch.randint(config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = exact.logits(exact(ids).hidden).float()
        room = {"rtol": 1e-3, "atol": 1e-3 * float(expected.abs().max())}
        torch.testing.assert_close(model.logits(model(ids).hidden), expected, **room)
        cache = model.make_cache(2, 20)
        parts = [model.logits(model(part, cache).hidden) for part in ids.split([7, 1, 1, 11], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, **room)


@needs_onednn
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (7, 5), (64, 48), (48, 64), (300, 33)])
@pytest.mark.parametrize("rows", [1, 2, 5, 32, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_formula_for_any_number_of_rows(outputs: int, inputs: int, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(inputs, outputs, bias), torch.randn(2, rows, inputs)
    expected = x.double() @ layer.weight.detach().double().T
    if bias:
        expected = expected + layer.bias.detach().double()
    with torch.inference_mode():
        found = PackedLinear(layer)(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("before, then", [(2, 2), (2, 1), (1, 2)])
def test_a_packed_layer_is_the_formula_with_any_number_of_threads(before: int, then: int) -> None:
    layer, x = nn.Linear(300, 500), torch.randn(7, 300)
    expected = x.double() @ layer.weight.detach().double().T + layer.bias.detach().double()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(before)
        packed = PackedLinear(layer)
        torch.set_num_threads(then)
        with torch.inference_mode():
            torch.testing.assert_close(packed(x).double(), expected, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(threads)


def test_layers_of_the_same_input_become_one_and_small_ones_stay_unpacked() -> None:
    model = build_model(small())
    arrange(model)
    assert kinds(model, JoinedAttention) == {"layers.0.attention", "layers.1.attention"}
    assert kinds(model, JoinedGatedFeedForward) == {"layers.0.feedforward", "layers.1.feedforward"}
    assert not kinds(model, PackedLinear) and model.output is None


@needs_onednn
@pytest.mark.usefixtures("small_counts_as_large")
def test_an_output_layer_that_shares_the_embedding_is_packed_and_the_embedding_stays() -> None:
    model = build_model(small())
    arrange(model)
    assert type(model.output) is PackedLinear
    assert model.embedding.weight.shape == (13, 16) and not model.embedding.weight.is_mkldnn


@needs_onednn
@pytest.mark.usefixtures("small_counts_as_large")
def test_a_model_that_was_to_be_compiled_can_be_packed_after_all() -> None:
    model, packed = build_model(small()), build_model(small())
    arrange(model, packed=False)
    assert not kinds(model, PackedLinear)
    arrange(model)
    arrange(packed)
    assert kinds(model, PackedLinear) == kinds(packed, PackedLinear) != set()


@pytest.mark.usefixtures("small_counts_as_large")
def test_nothing_is_packed_for_a_processor_with_a_faster_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "USES_ONEDNN", False)
    model = build_model(small())
    arrange(model)
    assert not kinds(model, PackedLinear) and type(model.output) is Linear


@pytest.mark.usefixtures("small_counts_as_large")
def test_a_large_output_layer_is_quantized_though_the_embedding_is_not() -> None:
    model = randomised(build_model(small()))
    exact = randomised(build_model(small()))
    arrange(model, int8=True)
    assert type(model.output) is Int8Linear and model.embedding.weight.dtype == torch.float32
    hidden = torch.randn(3, 16)
    found, expected = (m.logits(hidden) for m in (model, exact))
    assert 0 < (found - expected).norm() / expected.norm() < 0.02


@pytest.mark.usefixtures("small_counts_as_large")
def test_layers_with_adapters_stay_on_their_own_and_can_be_switched_off() -> None:
    """Adapters on a part of what would be joined, on what would be packed, and on the tied embedding."""
    targets = ("q_proj", "up_proj", "o_proj", "embedding")
    config = AdapterConfig(base="", base_digest="", rank=2, dropout=0.0, targets=targets)
    model, exact = (randomised(build_model(small())) for _ in range(2))
    layers = [add_lora(adapted, config) for adapted in (model, exact)]
    for adapted in (model, exact):
        randomised(adapted, 3)
    exact.double()
    arrange(model.eval())
    assert not kinds(model, JoinedAttention) and not kinds(model, JoinedGatedFeedForward)
    assert model.output is None
    ids = torch.arange(10).unsqueeze(0)
    for strength in (1.0, 0.0, 0.5):
        for group in layers:
            set_strength(group, strength)
        with torch.inference_mode():
            found, expected = model.logits(model(ids).hidden), exact.logits(exact(ids).hidden).float()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_experts_which_are_called_by_their_layers_names_stay_on_their_own() -> None:
    model = build_model(small(experts=4))
    arrange(model)
    assert not kinds(model, JoinedGatedFeedForward)
    assert kinds(model, JoinedAttention) == {"layers.0.attention", "layers.1.attention"}


@pytest.mark.usefixtures("small_counts_as_large")
@pytest.mark.parametrize("preset", ["modern", "original"])
def test_an_arranged_encoder_sees_all_but_padding_as_before(preset: str) -> None:
    config = small(preset, kv_heads=4, architecture="encoder")
    model, exact = randomised(build_model(config)), randomised(build_model(config)).double()
    arrange(model)
    ids, lengths = torch.arange(24).view(2, 12) % 13, torch.tensor([12, 7])
    with torch.inference_mode():
        found, expected = (m.logits(m(ids, lengths).hidden)[1, :7] for m in (model, exact))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("small_counts_as_large")
@pytest.mark.parametrize("preset", ["modern", "original"])
def test_an_arranged_encoder_decoder_predicts_the_same(preset: str) -> None:
    config = small(preset, kv_heads=4, architecture="encoder-decoder", encoder_layers=2)
    model, exact = randomised(build_model(config)), randomised(build_model(config)).double()
    arrange(model)
    ids, source, lengths = torch.arange(10).view(2, 5), torch.arange(24).view(2, 12) % 13, torch.tensor([12, 7])
    with torch.inference_mode():
        found, expected = (m.logits(m(ids, source, lengths).hidden) for m in (model, exact))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_attention_to_a_source_stays_as_it_is() -> None:
    model = build_model(small("original", kv_heads=4, architecture="encoder-decoder", encoder_layers=2))
    arrange(model)
    assert kinds(model, CrossAttention) == {"layers.0.cross_attention", "layers.1.cross_attention"}
    assert len(kinds(model, JoinedAttention)) == 4


def test_an_arranged_model_writes_what_it_wrote_before() -> None:
    """From prompts of unequal length, on past the context."""

    def written(model: Transformer) -> list[list[int]]:
        assert isinstance(model, Decoder)
        sampler = Sampler(Sampling(), 1, 2, model.device, 13)
        return list(generate(model, [[1], [2, 3, 4]], sampler, 60))

    before, after = (randomised(build_model(small())) for _ in range(2))
    arrange(after)
    assert written(after) == written(before)
