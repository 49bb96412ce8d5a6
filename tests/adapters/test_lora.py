import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.variants import every_variant, randomised, small
from tinylm.adapters.lora import (
    TARGETS,
    LoRALinear,
    adapter_tensors,
    add_lora,
    check_merged,
    load_adapter_tensors,
    lora_layers,
    merge_lora,
    module_names,
    peft_config,
)
from tinylm.config import AdapterConfig, ModelConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder

EVERYWHERE = module_names(["attention", "mlp"])
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 12]])


def settings(
    rank: int = 3, alpha: float = 5.0, dropout: float = 0.0, targets: tuple[str, ...] = EVERYWHERE
) -> AdapterConfig:
    return AdapterConfig(base="b", base_digest="d", rank=rank, alpha=alpha, dropout=dropout, targets=targets)


def exact(config: ModelConfig) -> Decoder:
    return randomised(build_model(config)).double()


def adapted(config: ModelConfig, adapter: AdapterConfig | None = None, seed: int = 0) -> Decoder:
    """With B drawn too, so that the adapter changes something."""
    model = exact(config)
    add_lora(model, adapter or settings(), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.logits(model(IDS).hidden)


def wrapped(inputs: int = 6, outputs: int = 4, bias: bool = True, dropout: float = 0.0) -> LoRALinear:
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(inputs, outputs, bias).double(), 2, 3.0, dropout)
    with torch.no_grad():
        layer.lora_B.normal_()
    return layer


# One layer


@pytest.mark.parametrize("bias", [True, False])
def test_the_output_is_the_formula(bias: bool) -> None:
    """y_o = sum_i W_oi x_i + b_o + alpha / r sum_k B_ok sum_i A_ki x_i, entry by entry (seed 002, with A r x k)."""
    layer = wrapped(bias=bias)
    x = torch.randn(3, 6, dtype=torch.float64)
    w, a, b = (p.detach().numpy() for p in (layer.base.weight, layer.lora_A, layer.lora_B))
    found = layer(x).detach().numpy()
    for row, entries in enumerate(x.numpy()):
        for o in range(4):
            own = sum(w[o, i] * entries[i] for i in range(6)) + (layer.base.bias[o].item() if bias else 0.0)
            update = sum(b[o, k] * sum(a[k, i] * entries[i] for i in range(6)) for k in range(2))
            assert found[row, o] == pytest.approx(own + 3.0 / 2 * update, rel=1e-12)


def test_merging_adds_the_scaled_product_to_the_weight() -> None:
    layer = wrapped()
    w, a, b = (p.detach().numpy().copy() for p in (layer.base.weight, layer.lora_A, layer.lora_B))
    x = torch.randn(3, 6, dtype=torch.float64)
    before = layer(x)
    merged = layer.merged()
    np.testing.assert_allclose(merged.weight.detach(), w + 1.5 * (b @ a), rtol=1e-12)
    torch.testing.assert_close(merged(x), before, rtol=0, atol=1e-12)
    assert type(merged) is nn.Linear


def test_shapes_are_rank_by_inputs_and_outputs_by_rank() -> None:
    layer = LoRALinear(nn.Linear(6, 4), 2, 1.0, 0.0)
    assert (layer.lora_A.shape, layer.lora_B.shape) == ((2, 6), (4, 2))
    assert layer.lora_B.count_nonzero() == 0
    assert layer.lora_A.count_nonzero() == 12


def test_dropout_touches_the_adapters_input_alone_and_in_training_alone() -> None:
    layer = wrapped(dropout=0.5)
    x = torch.ones(2000, 6, dtype=torch.float64)
    layer.eval()
    expected = layer(x)
    torch.testing.assert_close(expected, layer(x))
    layer.train()
    dropped = layer(x)
    assert not torch.allclose(dropped, expected)
    torch.testing.assert_close(dropped.mean(0), expected.mean(0), rtol=0, atol=0.3)
    with torch.no_grad():
        layer.lora_B.zero_()
    torch.testing.assert_close(layer(x), layer.base(x), rtol=0, atol=0)


# A whole model


@every_variant
def test_it_begins_at_no_change(config: ModelConfig) -> None:
    model = exact(config)
    before = logits(model)
    add_lora(model, settings())
    assert lora_layers(model)
    assert torch.equal(logits(model), before)


@every_variant
def test_only_a_and_b_are_trained(config: ModelConfig) -> None:
    model = adapted(config)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_" not in name}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        f"{layer}.{part}" for layer in lora_layers(model) for part in ("lora_A", "lora_B")
    }
    optimizer = torch.optim.SGD(trained, lr=0.1)
    model.logits(model(IDS).hidden).logsumexp(-1).sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert parameter.grad is None and torch.equal(parameter, frozen[name])
        else:
            assert parameter.grad is not None or "experts" in name  # some experts may have no token here


@every_variant
def test_merged_equals_adapted_and_not_the_base(config: ModelConfig) -> None:
    base, model = exact(config), adapted(config)
    before = logits(model)
    merge_lora(model)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-10)
    assert not torch.allclose(before, logits(base), atol=1e-3)
    assert model.state_dict().keys() == base.state_dict().keys()
    assert not lora_layers(model)


def test_a_is_drawn_from_the_seed_and_nothing_else_is() -> None:
    one, again, other = (build_model(small()) for _ in range(3))
    for model, seed in ((one, 5), (again, 5), (other, 6)):
        before = torch.get_rng_state()
        add_lora(model, settings(), seed)
        assert torch.equal(torch.get_rng_state(), before)
    first, same, different = (adapter_tensors(model) for model in (one, again, other))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], different[name]) for name in first if "lora_A" in name)


# Targets


@pytest.mark.parametrize(
    "words, names",
    [
        (["attention"], ("q_proj", "k_proj", "v_proj", "o_proj")),
        (["query,value"], ("q_proj", "v_proj")),
        (["value", " key , query "], ("v_proj", "k_proj", "q_proj")),
        (["attention", "query"], ("q_proj", "k_proj", "v_proj", "o_proj")),
        (["mlp", "output"], ("gate_proj", "up_proj", "down_proj", "o_proj")),
    ],
)
def test_words_stand_for_projections(words: list[str], names: tuple[str, ...]) -> None:
    assert module_names(words) == names


@pytest.mark.parametrize("words", [["brain"], ["query,"], [""], ["Query"]])
def test_other_words_are_refused_with_those_there_are(words: list[str]) -> None:
    with pytest.raises(UsageError, match=f"--target .* is not known; choose from: {', '.join(TARGETS)}."):
        module_names(words)


@pytest.mark.parametrize("word", TARGETS)
@pytest.mark.parametrize("preset", ["modern", "gpt2"])
def test_a_target_adapts_these_projections_of_every_layer_and_no_other(word: str, preset: str) -> None:
    """A plain feed-forward layer has no gate."""
    model = build_model(small(preset, kv_heads=4))
    there = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = {name for name in there if name.rpartition(".")[2] in TARGETS[word]}
    add_lora(model, settings(targets=module_names([word])))
    assert set(lora_layers(model)) == expected
    assert len(expected) % 2 == 0 and expected  # two layers


def test_a_target_that_is_not_in_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match="--target gate_proj names nothing"):
        add_lora(build_model(small("gpt2", kv_heads=4)), settings(targets=("gate_proj",)))


# On disk


def test_tensors_carry_pefts_names_and_come_back() -> None:
    model, other = adapted(small()), adapted(small(), seed=1)
    tensors = {name: tensor.detach().clone() for name, tensor in adapter_tensors(model).items()}
    assert "base_model.model.layers.1.attention.q_proj.lora_A.weight" in tensors
    assert len(tensors) == 2 * 2 * len(EVERYWHERE)
    assert not torch.equal(logits(model), logits(other))
    load_adapter_tensors(other, tensors)
    assert torch.equal(logits(model), logits(other))


@pytest.mark.parametrize("how", ["missing", "surplus", "shape", "empty"])
def test_tensors_of_another_adapter_are_refused_and_change_nothing(how: str) -> None:
    model = adapted(small())
    before = logits(model)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in adapter_tensors(model).items()}
    name = next(iter(tensors))
    if how == "missing":
        del tensors[name]
    elif how == "surplus":
        tensors["more"] = torch.zeros(1)
    elif how == "shape":
        tensors[name] = torch.zeros(9, 9)
    else:
        tensors = {}
    with pytest.raises(TinyLMError, match="do not fit the layers of this base"):
        load_adapter_tensors(model, tensors)
    assert torch.equal(logits(model), before)


def test_pefts_configuration_says_what_was_trained() -> None:
    config = peft_config(settings(rank=4, alpha=6.0, dropout=0.1, targets=("q_proj",)))
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 6.0, 0.1)
    assert config["target_modules"] == ["q_proj"]
    assert config["peft_type"] == "LORA"


# The check before a merge is written


def merged_copy(config: ModelConfig) -> Decoder:
    model = adapted(config)
    merge_lora(model)
    return model


def test_a_right_merge_passes_and_says_by_how_much() -> None:
    difference, change = check_merged(exact(small()), adapted(small()), merged_copy(small()))
    assert difference < 1e-10
    assert change > 0.01


def test_a_wrong_merge_is_caught() -> None:
    with pytest.raises(TinyLMError, match="logits differ from the adapter's by"):
        check_merged(exact(small()), adapted(small()), exact(small()))


def test_a_merge_that_is_not_a_number_is_caught() -> None:
    broken = merged_copy(small())
    with torch.no_grad():
        next(broken.parameters()).fill_(math.nan)
    with pytest.raises(TinyLMError, match="differ from the adapter's by nan"):
        check_merged(exact(small()), adapted(small()), broken)


def test_an_adapter_that_changes_nothing_is_caught() -> None:
    idle = exact(small())
    add_lora(idle, settings())
    with pytest.raises(TinyLMError, match="The adapter changes nothing"):
        check_merged(exact(small()), idle, exact(small()))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"rank": 0}, "--rank is 0"),
        ({"alpha": 0.0}, "--alpha is 0.0"),
        ({"alpha": math.inf}, "--alpha is inf"),
        ({"dropout": 1.0}, "--dropout is 1.0"),
        ({"targets": ()}, "--target names no module"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(**values)
