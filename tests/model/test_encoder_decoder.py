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
    "modern": both(),
    "gpt2": both("gpt2", kv_heads=4),
    "original": both("original", kv_heads=4),
    "sinusoidal": both(position="sinusoidal"),
    "relative": both(position="relative", relative_clip=2),
    "no positions": both(position="none", tie=False),
    "local decoder layers": both(local_window=2, local_layers=(0,)),
    "experts": both(experts=2, experts_per_token=2, layers=1, encoder_layers=1),
    "two of four experts": both(experts=4, layers=1, encoder_layers=1),
    "merged experts": both(experts=3, expert_mode="merge", layers=1, encoder_layers=1),
    "multi-query, one encoder layer": both(kv_heads=1, encoder_layers=1, qk_norm=False),
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
def test_logits_equal_the_formula(config: ModelConfig) -> None:
    model = exact(config)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    for source, target in zip(SOURCES, TARGETS, strict=True):
        expected = reference_parts.encoder_decoder_logits(weights, config, source, target, table=np.float32)
        found = logits_of(model, torch.tensor([target]), torch.tensor([source]))[0].detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@every_variant
@pytest.mark.parametrize("padding", [0, 7])
def test_padding_of_source_and_target_does_not_change_the_output(config: ModelConfig, padding: int) -> None:
    model = exact(config)
    source, lengths = rows_of(SOURCES, padding)
    ids, _ = rows_of(TARGETS, padding)
    together = logits_of(model, ids, source, lengths)
    for row, (one, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        alone = logits_of(model, torch.tensor([target]), torch.tensor([one]))[0]
        torch.testing.assert_close(together[row, : len(target)], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["route", "merge"])
def test_padding_of_source_and_target_is_left_out_of_the_balance_loss(mode: str) -> None:
    """Losses are sums over pairs and metrics are means over pairs, so both follow from the pairs one by one."""
    model = exact(both(experts=4, experts_per_token=2, expert_mode=mode)).train()
    source, lengths = rows_of(SOURCES, 0)
    ids, target_lengths = rows_of(TARGETS, 0)
    batch = Batch(ids, ids, torch.arange(ids.shape[1]) < target_lengths.unsqueeze(1), source, lengths)
    together = sequence_to_sequence(model, batch)
    alone = [
        sequence_to_sequence(model, Batch(torch.tensor([t]), torch.tensor([t]), None, torch.tensor([s]), None))
        for s, t in zip(SOURCES, TARGETS, strict=True)
    ]
    assert together.aux.item() == pytest.approx(sum(loss.aux.item() for loss in alone), rel=1e-12)
    assert together.total.item() == pytest.approx(sum(loss.total.item() for loss in alone), rel=1e-12)
    for name, value in together.metrics.items():
        mean = torch.stack([loss.metrics[name] for loss in alone]).mean(0)
        torch.testing.assert_close(value, mean, rtol=1e-12, atol=0)


def test_routing_statistics_count_each_token_of_each_layer_and_no_padding() -> None:
    """Reference: the experts of every token, counted one by one. Encoder and decoder differ in the number of layers."""
    model = exact(both(experts=4, layers=1, encoder_layers=3)).train()
    source, lengths = rows_of(SOURCES, 0)
    ids, target_lengths = rows_of(TARGETS, 0)
    routings: list[tuple[Tensor, Tensor]] = []
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.register_forward_hook(lambda layer, inputs, output: routings.append(output[1][:2]))
    batch = Batch(ids, ids, torch.arange(ids.shape[1]) < target_lengths.unsqueeze(1), source, lengths)
    metrics = sequence_to_sequence(model, batch).metrics
    shares, entropies = [], []
    for index, (probabilities, experts) in enumerate(routings):
        lengths_of_rows = [len(text) for text in (SOURCES if index < 3 else TARGETS)]
        counts = np.zeros(4)
        for row, length in enumerate(lengths_of_rows):
            for token in range(length):
                for expert in experts[row, token].tolist():
                    counts[expert] += 1 / (2 * length * len(lengths_of_rows))
        shares.append(counts.tolist())
        entropies.append(
            np.mean(
                [
                    reference_parts.router_entropy(probabilities[row, :length].detach().numpy())
                    for row, length in enumerate(lengths_of_rows)
                ]
            )
        )
    assert len(routings) == 4
    np.testing.assert_allclose(metrics["expert_shares"].numpy(), shares, rtol=0, atol=1e-12)
    assert metrics["router_entropy"].item() == pytest.approx(np.mean(entropies), rel=1e-12)


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


@every_variant
def test_a_target_token_attends_to_the_whole_source_and_to_no_later_target(config: ModelConfig) -> None:
    model = exact(config)
    source, ids = torch.tensor(SOURCES[2:]), torch.tensor([[0, 2, 7, 1, 3]])
    before = logits_of(model, ids, source)
    for t in range(1, ids.shape[1]):
        changed = ids.clone()
        changed[0, t:] = (ids[0, t:] + 1) % config.vocab_size
        torch.testing.assert_close(logits_of(model, changed, source)[0, :t], before[0, :t], rtol=0, atol=1e-12)
    for s in range(source.shape[1]):
        changed = source.clone()
        changed[0, s] = (source[0, s] + 1) % config.vocab_size
        assert ((logits_of(model, ids, changed) - before)[0].abs().amax(dim=-1) > 1e-9).all()


@pytest.mark.slow
@every_variant
def test_one_batch_can_be_overfitted(config: ModelConfig) -> None:
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


@every_variant
def test_every_parameter_has_a_gradient(config: ModelConfig) -> None:
    model = exact(config).train()
    source, lengths = rows_of(SOURCES, 0)
    ids = torch.tensor([[0, 2, 7, 1, 3], [0, 8, 2, 8, 1], [0, 4, 4, 9, 2]])
    F.cross_entropy(logits_of(model, ids, source, lengths).flatten(0, 1), ids.flatten()).backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert idle == []


def test_parameters_of_encoder_and_decoder_are_counted_separately() -> None:
    parts = count_parameters(build_model(both()))
    assert parts["encoder attention"] == parts["attention"] // 2 * 3
    assert parts["cross_attention"] == parts["attention"]
    assert sum(value for name, value in parts.items() if name != "total") == parts["total"]
