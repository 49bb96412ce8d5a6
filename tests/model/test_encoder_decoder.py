"""Encoder and decoder together. Reference: the formulas in float64, one token at a time."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import reference_parts
from tests.variants import randomised, small
from tinylm.model.build import build_model, count_parameters
from tinylm.model.encoder_decoder import EncoderDecoder
from tinylm.model.moe import RoutedExperts
from tinylm.model_config import ModelConfig
from tinylm.objectives.loss import sequence_to_sequence
from tinylm.text.batches import Batch

SOURCES = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
TARGETS = [[0, 2, 7, 1], [0, 8, 2, 8, 1, 8], [0, 4]]


def both(preset: str = "modern", **choices: Any) -> ModelConfig:
    sides = {"architecture": "encoder-decoder", "encoder_layers": 3}
    return small(preset, **{**sides, **choices})


VARIANTS = {
    "modern, sandwich": both(norm_placement="sandwich"),
    "gpt2": both("gpt2", kv_heads=4),
    "original": both("original", kv_heads=4),
    "sinusoidal, multi-query, one encoder layer": both(position="sinusoidal", kv_heads=1, encoder_layers=1),
    "relative, local decoder layers": both(position="relative", relative_clip=2, local_window=2, local_layers=(0,)),
    "no positions, two of four experts": both(position="none", tie=False, experts=4, layers=1, encoder_layers=1),
    "merged experts": both(experts=3, expert_mode="merge", layers=1, encoder_layers=1, qk_norm=False),
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=[name.replace(" ", "-") for name in VARIANTS])


def exact(config: ModelConfig) -> EncoderDecoder:
    model = randomised(build_model(config)).double()
    assert isinstance(model, EncoderDecoder)
    return model


def rows_of(texts: list[list[int]], padding: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, texts))
    return torch.tensor([text + [padding] * (longest - len(text)) for text in texts]), torch.tensor(
        [len(text) for text in texts]
    )


def logits_of(model: EncoderDecoder, ids: Tensor, source: Tensor, lengths: Tensor | None = None) -> Tensor:
    return model.logits(model(ids, source, lengths).hidden)


@every_variant
def test_logits_equal_the_formula_also_in_padded_batches(config: ModelConfig) -> None:
    """A target token attends to the whole source, to itself and earlier targets, and to no padding."""
    model = exact(config)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    padded = [
        logits_of(model, rows_of(TARGETS, padding)[0], *rows_of(SOURCES, padding)).detach().numpy()
        for padding in (0, 7)
    ]
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        expected = reference_parts.encoder_decoder_logits(weights, config, source, target, table=np.float32)
        alone = logits_of(model, torch.tensor([target]), torch.tensor([source]))[0].detach().numpy()
        for found in (alone, *(batch[row, : len(target)] for batch in padded)):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_routing_statistics_are_those_of_each_layer_without_padding() -> None:
    """Reference: the formulas, for the router probabilities of each pair. Both sides differ in the number of layers."""
    model = exact(both(experts=4, layers=1, encoder_layers=3)).train()
    source, lengths = rows_of(SOURCES, 0)
    ids, target_lengths = rows_of(TARGETS, 0)
    routed: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.register_forward_hook(lambda layer, inputs, output: routed.append(output[1].probabilities.detach()))
    batch = Batch(ids, ids, torch.arange(ids.shape[1]) < target_lengths.unsqueeze(1), source, lengths)
    loss = sequence_to_sequence(model, batch)
    sequences = [
        [rows[row, : len(text)].numpy() for row, text in enumerate(SOURCES if layer < 3 else TARGETS)]
        for layer, rows in enumerate(routed)
    ]
    assert len(sequences) == 4
    balance = sum(reference_parts.load_balance(p, 2) for layer in sequences for p in layer)
    assert loss.aux.item() == pytest.approx(0.01 * balance, rel=1e-12)
    entropies = [reference_parts.router_entropy(p) for layer in sequences for p in layer]
    assert loss.metrics["router_entropy"].item() == pytest.approx(np.mean(entropies), rel=1e-12)
    shares = []
    for layer in sequences:
        chosen = [[np.isin(range(4), reference_parts.largest(row, 2)) / 2 for row in p] for p in layer]
        shares.append(np.mean([np.mean(rows, axis=0) for rows in chosen], axis=0))
    np.testing.assert_allclose(loss.metrics["expert_shares"].numpy(), shares, rtol=0, atol=1e-12)


@every_variant
def test_cached_decoding_equals_teacher_forcing(config: ModelConfig) -> None:
    """Later steps attend to the cached keys and values of the sources, and do not use the memory."""
    model = exact(config)
    source, lengths = rows_of(SOURCES, 0)
    ids = torch.tensor([[0, 2, 7, 1, 3], [0, 8, 2, 8, 1], [0, 4, 4, 9, 2]])
    with torch.no_grad():
        expected = model(ids, source, lengths).hidden
        memory, _ = model.encode(source, lengths)
        cache, cross_cache = model.make_cache(3, 5), model.make_cross_cache()
        parts = []
        for part in ids.split([2, 1, 1, 1], dim=1):
            parts.append(model.decode(part, memory, cache, cross_cache).hidden)
            memory = memory._replace(hidden=memory.hidden + 100)  # has no effect once the cross-cache is filled
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-12)
    shape = (3, config.kv_heads, 7, config.head_dim)
    assert all(layer.keys_and_values[0].shape == shape for layer in cross_cache)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["modern", "original"])
def test_one_batch_can_be_overfitted(preset: str) -> None:
    config = both(preset, kv_heads=4)
    model = build_model(config, seed=1).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    source, ids = (torch.randint(config.vocab_size, (3, 7), generator=generator) for _ in range(2))
    ids[:, 0] = 0
    for _ in range(400):
        loss = F.cross_entropy(logits_of(model, ids[:, :-1], source).flatten(0, 1), ids[:, 1:].flatten())
        if loss < 0.05:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss is still {loss:.3f}")


def test_every_parameter_has_a_gradient() -> None:
    source, lengths = rows_of(SOURCES, 0)
    ids = torch.tensor([[0, 2, 7, 1, 3], [0, 8, 2, 8, 1], [0, 4, 4, 9, 2]])
    for name, config in VARIANTS.items():
        model = exact(config).train()
        F.cross_entropy(logits_of(model, ids, source, lengths).flatten(0, 1), ids.flatten()).backward()
        idle = [part for part, parameter in model.named_parameters() if not parameter.grad.any()]
        assert idle == [], name


def test_parameters_of_encoder_and_decoder_are_counted_separately() -> None:
    parts = count_parameters(build_model(both()))
    assert parts["encoder attention"] == parts["attention"] // 2 * 3
    assert parts["cross_attention"] == parts["attention"]
    assert sum(value for name, value in parts.items() if name != "total") == parts["total"]
