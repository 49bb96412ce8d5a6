"""Decoders, encoders and both together. Reference: their formulas in float64, one token at a time."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import reference_parts
from tests.variants import VARIANTS, randomised, small
from tinylm.config.model import ModelConfig
from tinylm.jobs.pairs.job import sequence_to_sequence
from tinylm.text.batches import Batch
from tinylm.transformer.blocks import RoutedExperts
from tinylm.transformer.build import build_model, count_parameters

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 12, 0]]
ENCODED = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8], [6]]
SOURCES = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
TARGETS = [[0, 2, 7, 1], [0, 8, 2, 8, 1, 8], [0, 4]]
TEXTS = {"decoder": [IDS], "encoder": [ENCODED], "encoder-decoder": [TARGETS, SOURCES]}
LONG_TARGETS = torch.tensor([[0, 2, 7, 1, 3], [0, 8, 2, 8, 1], [0, 4, 4, 9, 2]])


def encoder(preset: str = "modern", **choices: Any) -> ModelConfig:
    return small(preset, architecture="encoder", **choices)


def both(preset: str = "modern", **choices: Any) -> ModelConfig:
    return small(preset, **{"architecture": "encoder-decoder", "encoder_layers": 3, **choices})


ENCODERS = {
    "modern": encoder(),
    "gpt2": encoder("gpt2", kv_heads=4),
    "original": encoder("original", kv_heads=4),
    "relative, two of four experts": encoder(position="relative", relative_clip=2, experts=4, layers=1),
    "no positions, merged experts": encoder(position="none", tie=False, experts=3, expert_mode="merge", layers=1),
}
ENCODER_DECODERS = {
    "modern, sandwich": both(norm_placement="sandwich"),
    "gpt2": both("gpt2", kv_heads=4),
    "original": both("original", kv_heads=4),
    "sinusoidal, multi-query, one encoder layer": both(position="sinusoidal", kv_heads=1, encoder_layers=1),
    "relative, local decoder layers": both(position="relative", relative_clip=2, local_window=2, local_layers=(0,)),
    "no positions, two of four experts": both(position="none", tie=False, experts=4, layers=1, encoder_layers=1),
    "merged experts": both(experts=3, expert_mode="merge", layers=1, encoder_layers=1, qk_norm=False),
}
ALL = {f"{c.architecture}, {n}": c for v in (VARIANTS, ENCODERS.items(), ENCODER_DECODERS.items()) for n, c in v}


OVERFITTED = [f"{kind}, {name}" for kind in ("encoder", "encoder-decoder") for name in ("gpt2", "original")]


def each(variants: Mapping[str, ModelConfig]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("config", variants.values(), ids=[name.replace(" ", "-") for name in variants])


def exact(config: ModelConfig) -> Any:
    """Random weights in float64, so that tolerances can be tight."""
    return randomised(build_model(config)).double()


def rows_of(texts: list[list[int]], padding: int) -> tuple[Tensor, Tensor]:
    """The padded texts and their lengths."""
    rows = [text + [padding] * (max(map(len, texts)) - len(text)) for text in texts]
    return torch.tensor(rows), torch.tensor([len(text) for text in texts])


def logits_of(model: Any, *inputs: Tensor) -> Tensor:
    return model.logits(model(*inputs).hidden)


@each(ALL)
def test_logits_equal_the_formula_also_in_padded_batches(config: ModelConfig) -> None:
    """Tokens attend to no padding, whatever its id. The model stores its tables of sines and cosines in float32, so the
    reference rounds its tables as well."""
    model, kind = exact(config), config.architecture
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    formula: Any = {
        "decoder": reference_parts.decoder_logits_with_parts,
        "encoder": lambda *parts, **table: reference_parts.encoder_logits(*parts, len(parts[-1]), **table),
        "encoder-decoder": reference_parts.encoder_decoder_logits,
    }[kind]
    padded = []
    for padding in (0, 7):
        (ids, lengths), *source = (rows_of(texts, padding) for texts in TEXTS[kind])
        padded.append(logits_of(model, ids, *([lengths] if kind == "encoder" else []), *sum(source, ())))
    for row, texts in enumerate(zip(*TEXTS[kind], strict=True)):
        expected = formula(weights, config, *reversed(texts), table=np.float32)
        alone = logits_of(model, *(torch.tensor([text]) for text in texts))[0]
        for found in (alone, *(batch[row, : len(texts[0])] for batch in padded)):
            np.testing.assert_allclose(found.detach().numpy(), expected, rtol=0, atol=1e-10)


@each(ALL)
def test_every_parameter_has_a_gradient(config: ModelConfig) -> None:
    model, source = exact(config).train(), rows_of(SOURCES, 0)
    ids = torch.randint(13, (6, 20), generator=torch.Generator().manual_seed(0))
    inputs = (LONG_TARGETS, *source) if config.architecture == "encoder-decoder" else (ids,)
    F.cross_entropy(logits_of(model, *inputs).flatten(0, 1), inputs[0].flatten()).backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert idle == []


@pytest.mark.slow
@each({name: config for name, config in ALL.items() if config.architecture == "decoder" or name in OVERFITTED})
def test_one_batch_can_be_overfitted(config: ModelConfig) -> None:
    """Rows start with different tokens, so that every next token, or a masked one, is determined by the others."""
    model = build_model(config, seed=1).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rng = torch.Generator().manual_seed(0)
    ids, source = (torch.randint(config.vocab_size, (3, 9), generator=rng) for _ in range(2))
    ids[:, 0] = torch.arange(3)
    inputs, targets = (ids[:, :-1],), ids[:, 1:]
    if config.architecture == "encoder-decoder":
        inputs = (*inputs, source)
    elif config.architecture == "encoder":
        inputs = (ids.masked_fill(torch.arange(9) == 1, 12),)
        targets = ids.masked_fill(torch.arange(9) != 1, -100)
    # Without residual connections, gradients are small at first, and how long depends on rounding.
    steps = {"decoder": 300, "encoder": 600, "encoder-decoder": 400}[config.architecture]
    for _ in range(steps if config.residual else 3000):
        loss = F.cross_entropy(logits_of(model, *inputs).flatten(0, 1), targets.flatten())
        if loss < 0.05:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss is still {loss:.3f}")


def test_the_embedding_is_scaled_by_a_number_rounded_to_its_dtype() -> None:
    """sqrt(640) is 25.298, and 25.25 in bf16, whose products with 16-bit numbers differ in the last digit."""
    ids = torch.arange(13).unsqueeze(0)
    for dtype, scale in ((torch.float32, float(np.float32(640**0.5))), (torch.bfloat16, 25.25)):
        model = randomised(build_model(small(embedding_scale=640**0.5))).to(dtype)
        assert torch.equal(model.embed(ids)[0], (model.embedding.weight.double() * scale).to(dtype))


def test_without_positions_a_permuted_input_of_an_encoder_gives_the_permuted_output() -> None:
    """Attention and feed-forward layers are permutation equivariant."""
    ids, order = torch.tensor(ENCODED[:1]), [4, 0, 6, 1, 3, 2, 5]
    for config in ENCODERS.values():
        model = exact(config)
        equal = torch.allclose(logits_of(model, ids[:, order]), logits_of(model, ids)[:, order], rtol=0, atol=1e-12)
        assert equal == (config.position == "none")


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


@each(ENCODER_DECODERS)
def test_cached_decoding_of_targets_equals_teacher_forcing(config: ModelConfig) -> None:
    """Later steps attend to the cached keys and values of the sources, and do not use the memory."""
    model = exact(config)
    source, lengths = rows_of(SOURCES, 0)
    with torch.no_grad():
        expected = model(LONG_TARGETS, source, lengths).hidden
        memory, _ = model.encode(source, lengths)
        cache, cross_cache = model.make_cache(3, 5), model.make_cross_cache()
        parts = []
        for part in LONG_TARGETS.split([2, 1, 1, 1], dim=1):
            parts.append(model.decode(part, memory, cache, cross_cache).hidden)
            memory = memory._replace(hidden=memory.hidden + 100)  # has no effect once the cross-cache is filled
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-12)
    shape = (3, config.kv_heads, 7, config.head_dim)
    assert all(layer.keys_and_values[0].shape == shape for layer in cross_cache)


def test_parameters_of_encoder_and_decoder_are_counted_separately() -> None:
    parts = count_parameters(build_model(both()))
    assert parts["encoder attention"] == parts["attention"] // 2 * 3
    assert parts["cross_attention"] == parts["attention"]
    assert sum(value for name, value in parts.items() if name != "total") == parts["total"]
