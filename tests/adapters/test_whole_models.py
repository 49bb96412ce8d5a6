"""Adapters in whole models of every architecture, compared with float64 formulas for one token at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import reference_parts
from tests.variants import every_variant, randomised, small
from tinylm.adapters.adapter import adapter_layers, adapter_tensors, load_adapter_tensors, unwrapped_name
from tinylm.adapters.bottleneck import add_bottlenecks, sublayers
from tinylm.adapters.lora import LoRAEmbedding, LoRALinear, add_lora, merge_lora, target_modules
from tinylm.config.model import ModelConfig
from tinylm.config.run import AdapterConfig
from tinylm.models.load_adapter import set_adapter_scale
from tinylm.transformer.architectures import EncoderDecoder, Transformer
from tinylm.transformer.build import build_model

RANK, ALPHA = 3, 5.0
IDS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]]
SOURCES = torch.tensor([[9, 7, 9, 3], [5, 0, 0, 0]])
LENGTHS = torch.tensor([4, 1])

AddAdapter = Callable[..., None]
MODELS = {
    "decoder": small(),
    "original decoder": small("original", kv_heads=4),
    "untied decoder": small("gpt2", tie=False),
    "local, relative decoder": small(local_window=3, local_layers=(0,), position="relative", relative_clip=2),
    "decoder of experts": small(experts=4),
    "encoder of merged experts": small(architecture="encoder", experts=3, expert_mode="merge"),
    "encoder-decoder of experts": small(architecture="encoder-decoder", encoder_layers=1, layers=1, experts=2),
}


def with_lora(model: Transformer, rank: int = RANK) -> None:
    targets = target_modules(["all"], model)
    add_lora(model, AdapterConfig(base="b", base_digest="d", rank=rank, alpha=ALPHA, dropout=0.0, targets=targets))


def with_bottlenecks(model: Transformer, rank: int = RANK) -> None:
    targets = sublayers(model)
    add_bottlenecks(
        model, AdapterConfig(kind="bottleneck", base="b", base_digest="d", rank=rank, dropout=0.0, targets=targets)
    )


every_kind = pytest.mark.parametrize("add", [with_lora, with_bottlenecks], ids=["lora", "bottleneck"])
every_model = pytest.mark.parametrize("config", MODELS.values(), ids=[name.replace(" ", "-") for name in MODELS])


def adapted(config: ModelConfig, add: AddAdapter, seed: int = 1) -> Transformer:
    """A float64 model with random adapter parameters, so that the adapter has an effect."""
    model = randomised(build_model(config)).double()
    add(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapter_layers(model).values():
            for parameter in layer.trainable_parameters().values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def logits_of(model: Transformer, ids: list[list[int]]) -> Tensor:
    if isinstance(model, EncoderDecoder):
        return model.logits(model(torch.tensor(ids), SOURCES, LENGTHS).hidden)
    return model.logits(model(torch.tensor(ids)).hidden)


def plain_weights(model: Transformer) -> dict[str, np.ndarray]:
    """The parameters by their names without adapters, with LoRA's weight changes added."""
    weights = {unwrapped_name(name): value.detach().numpy().copy() for name, value in model.named_parameters()}
    for name, layer in adapter_layers(model).items():
        if isinstance(layer, LoRALinear):
            a, b = layer.lora_A.detach().numpy(), layer.lora_B.detach().numpy()
            weights[f"{unwrapped_name(name)}.weight"] += ALPHA / RANK * b @ a
        elif isinstance(layer, LoRAEmbedding):
            a, b = layer.lora_embedding_A.detach().numpy(), layer.lora_embedding_B.detach().numpy()
            weights[f"{unwrapped_name(name)}.weight"] += ALPHA / RANK * (b @ a).T
    return weights


@every_kind
@every_model
@torch.no_grad()
def test_logits_equal_the_formula_with_and_without_a_cache(config: ModelConfig, add: AddAdapter) -> None:
    model = adapted(config, add)
    weights = plain_weights(model)
    found = logits_of(model, IDS)
    for row, ids in enumerate(IDS):
        if config.architecture == "encoder-decoder":
            source = SOURCES[row, : LENGTHS[row]].tolist()
            expected = reference_parts.encoder_decoder_logits(weights, config, source, ids, table=np.float32)
        elif config.architecture == "encoder":
            expected = reference_parts.encoder_logits(weights, config, ids, len(ids), table=np.float32)
        else:
            expected = reference_parts.decoder_logits_with_parts(weights, config, ids, table=np.float32)
        np.testing.assert_allclose(found[row].numpy(), expected, rtol=0, atol=1e-9)
    without = randomised(build_model(config)).double()
    assert (logits_of(without, IDS) - found).abs().max() > 0.1
    if config.architecture != "encoder":
        torch.testing.assert_close(cached_logits(model), found, rtol=0, atol=1e-11)


def cached_logits(model: Any) -> Tensor:
    """The logits of the ids in four parts."""
    cache = model.make_cache(2, 6)
    parts = torch.tensor(IDS).split([3, 1, 1, 1], dim=1)
    if isinstance(model, EncoderDecoder):
        memory, _ = model.encode(SOURCES, LENGTHS)
        cross_cache = model.make_cross_cache()
        return torch.cat([model.logits(model.decode(part, memory, cache, cross_cache).hidden) for part in parts], dim=1)
    return torch.cat([model.logits(model(part, cache).hidden) for part in parts], dim=1)


@every_kind
@every_variant
def test_an_adapter_begins_without_effect_is_trained_alone_loads_by_name_and_can_be_turned_off(
    config: ModelConfig, add: AddAdapter
) -> None:
    base, new = (randomised(build_model(config)).double() for _ in range(2))
    one, other = adapted(config, add), adapted(config, add, seed=2)
    add(new)
    parameters = {id(p) for layer in adapter_layers(new).values() for p in layer.trainable_parameters().values()}
    assert {id(parameter) for parameter in new.parameters() if parameter.requires_grad} == parameters != set()
    with torch.no_grad():
        without, found = logits_of(base, IDS), logits_of(one, IDS)
        assert torch.equal(logits_of(new, IDS), without)
        assert (found - without).abs().max() > 1e-3 and not torch.allclose(found, logits_of(other, IDS))
        load_adapter_tensors(adapter_layers(other), adapter_tensors(adapter_layers(one)), Path("adapter"))
        assert torch.equal(logits_of(other, IDS), found)
        set_adapter_scale(adapter_layers(other), 0.0)
        assert torch.equal(logits_of(other, IDS), without)


@every_variant
@torch.no_grad()
def test_a_merge_gives_equal_logits_and_is_undone(config: ModelConfig) -> None:
    """Of every matrix, including the embedding, the router and, if it is tied, the output layer."""
    base, model = randomised(build_model(config)).double(), adapted(config, with_lora)
    before, tensors = logits_of(model, IDS), adapter_tensors(adapter_layers(model))
    changes = {name: layer.delta_weight() for name, layer in adapter_layers(model).items()}
    merge_lora(model)
    torch.testing.assert_close(logits_of(model, IDS), before, rtol=0, atol=1e-10)
    assert model.state_dict().keys() == base.state_dict().keys() and not adapter_layers(model)
    for name, change in changes.items():
        expected = base.get_submodule(name).weight + change
        torch.testing.assert_close(model.get_submodule(name).weight, expected, rtol=0, atol=1e-12)
    with_lora(model)
    load_adapter_tensors(adapter_layers(model), tensors, Path("adapter"))
    merge_lora(model, sign=-1.0)
    torch.testing.assert_close(logits_of(model, IDS), logits_of(base, IDS), rtol=0, atol=1e-10)


@every_kind
@pytest.mark.parametrize("name", ["decoder", "decoder of experts", "encoder-decoder of experts"])
def test_training_overfits_one_batch_and_leaves_the_base_unchanged(name: str, add: AddAdapter) -> None:
    torch.manual_seed(0)
    model = randomised(build_model(MODELS[name]))
    with torch.no_grad():  # lets the frozen output layer give probabilities near 1
        (model.embedding if model.output is None else model.output).weight.mul_(5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    add(model, 8)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.02)
    ids, targets = [row[:4] for row in IDS], torch.tensor([[1, 4, 2, 8], [0, 3, 3, 6]])
    for _ in range(600):
        losses = F.cross_entropy(logits_of(model, ids).flatten(0, 1), targets.flatten(), reduction="none")
        if losses.max() < 0.05:
            break
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    else:
        pytest.fail(f"the worst loss is still {losses.max():.3f}")
    after = {unwrapped_name(name): value for name, value in model.state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in before.items())
