import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.variants import VARIANTS, every_variant, randomised, small
from tinylm.config import model as model_config
from tinylm.config.model import ModelConfig
from tinylm.transformer.build import BLOCKS, build_empty_model, build_model, count_parameters

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 12, 0]]

# Large enough to estimate a standard deviation within 1 %.
LARGE = {"vocab_size": 400, "context": 100, "layers": 3, "heads": 4, "kv_heads": 4, "width": 96, "ffn_width": 320}


def test_the_variants_have_every_value_of_every_choice() -> None:
    """Of numbers without bounds, two values. Dropout, encoders and classifiers are tested apart from the variants."""
    configs = [config for _, config in VARIANTS]
    names = {"position": "POSITIONS", "norm": "NORMS", "norm_placement": "NORM_PLACEMENTS"}
    names |= {"activation": "ACTIVATIONS", "expert_mode": "EXPERT_MODES", "initialisation": "INITIALISATIONS"}
    wanted: dict[str, set[object]] = {name: set(getattr(model_config, values)) for name, values in names.items()}
    same = {"vocab_size", "context", "layers", "width", "ffn_width"}
    same |= {"architecture", "encoder_layers", "dropout", "attention_dropout", "expert_balance", "labels"}
    missing = []
    for field in dataclasses.fields(ModelConfig):
        found = {getattr(config, field.name) for config in configs}
        if field.name not in same and (wanted.get(field.name, set()) - found or len(found) < 2):
            missing.append(f"{field.name} has only the values {found}")
    scalings = {config.rope_scaling.kind for config in configs if config.rope_scaling}
    assert scalings == set(model_config.ROPE_SCALINGS)
    blocks = {(config.norm_placement, config.residual, config.parallel_residual) for config in configs}
    assert blocks == set(BLOCKS)
    assert not missing, "\n".join(missing)


def assert_distributed(weight: Tensor, kind: str, size: float) -> None:
    """Within five standard errors: mean and deviation of a normal distribution and its share beyond two deviations,
    or mean and bound of a uniform one and its share within half the bound."""
    n, mean, within = weight.numel(), abs(float(weight.mean())), float((weight.abs() < size / 2).float().mean())
    if kind == "uniform":
        assert 0.99 * size < float(weight.abs().max()) <= size
        assert mean < 5 * size / math.sqrt(3 * n)
        assert within == pytest.approx(0.5, abs=2.5 / math.sqrt(n))
    else:
        assert mean < 5 * size / math.sqrt(n)
        assert float(weight.std()) == pytest.approx(size, rel=5 / math.sqrt(2 * n))
        share = float((weight.abs() > 2 * size).float().mean())
        assert share == pytest.approx(0.0455, abs=5 * math.sqrt(0.0455 / n))


INITIAL: list[tuple[str, dict[str, Any], float | None, float, float]] = [
    # preset, choices, and the deviations of projections into the residual stream, of positions and of other matrices.
    # Those of modern are zero unless that would stop learning: in sandwich blocks and without residual connections.
    *(("modern", choices, 0.0, 0.02, 0.02) for choices in ({}, {"tie": False}, {"position": "learned"})),
    *(("modern", choices, 0.02, 0.02, 0.02) for choices in ({"norm_placement": "sandwich"}, {"residual": False})),
    # 0.02 / sqrt(N) for N residual sublayers; 0.01 for positions, as in the published code.
    *(("gpt2", {"layers": n, "tie": False}, 0.02 / math.sqrt(2 * n), 0.01, 0.02) for n in (1, 3)),
    ("original", {"tie": False}, None, 96**-0.5, 96**-0.5),  # Glorot's uniform distribution, but for the embedding
    *((preset, {}, None, std, 0.0) for preset, std in (("modern", 0.02), ("gpt2", 0.01), ("original", 96**-0.5))),
]


def test_weights_start_with_the_distributions_of_their_scheme_and_relative_positions_with_those_of_positions() -> None:
    for preset, choices, residual, of_positions, std in INITIAL:
        relative = {"position": "relative", "relative_clip": 60} if std == 0.0 else {}
        model = build_model(small(preset, **{**LARGE, **choices, **relative}))
        for name, parameter in model.named_parameters():
            weight = parameter.detach()
            if name.endswith(("relative_keys", "relative_values")):
                assert_distributed(weight, "normal", of_positions)
            elif weight.dim() < 2 or "norm" in name or relative:
                continue
            elif residual is None and name != "embedding.weight":
                assert_distributed(weight, "uniform", math.sqrt(6 / sum(weight.shape)))
            elif name.endswith(("o_proj.weight", "down_proj.weight")) and not residual:
                assert not weight.any()
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                assert_distributed(weight, "normal", residual)
            else:
                assert_distributed(weight, "normal", of_positions if name == "position.weight" else std)


def test_biases_start_at_zero_and_gains_at_one() -> None:
    for variant, config in VARIANTS:
        for name, parameter in build_model(config).named_parameters():
            if name.endswith("bias"):
                assert not parameter.any(), (variant, name)
            elif name.endswith("norm.weight"):
                assert (parameter == (0 if config.norm_unit_offset else 1)).all(), (variant, name)


def test_a_seed_gives_the_same_weights_and_neither_depends_on_a_global_generator_nor_changes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither that of the CPU nor those of other devices."""
    seeded: list[int] = []
    for variant, config in VARIANTS:
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        with monkeypatch.context() as patch:
            patch.setattr("torch.cuda.manual_seed_all", seeded.append)
            first = build_model(config, seed=7).state_dict()
        assert torch.equal(torch.rand(3), expected) and seeded == [], variant
        second, other = (build_model(config, seed=seed).state_dict() for seed in (7, 8))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first), variant
        assert not torch.equal(first["embedding.weight"], other["embedding.weight"]), variant
        layers = [first[f"layers.{n}.attention.q_proj.weight"] for n in range(2)]
        assert not torch.equal(*layers), variant


@every_variant
def test_a_model_on_the_meta_device_equals_the_original_after_loading_its_weights(config: ModelConfig) -> None:
    """Position tables are computed, not loaded, so they exist before the weights are loaded."""
    model, empty = randomised(build_model(config)), build_empty_model(config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    ids = torch.tensor(IDS)
    assert torch.equal(empty.eval()(ids).hidden, model(ids).hidden)


def test_parameters_are_counted_by_part() -> None:
    """Width 16, 4 heads of 4, 2 for keys and values, feed-forward 24, vocabulary 13, context 24, 2 layers.

    QK-norms count as attention.
    """
    assert count_parameters(build_model(small())) == {
        "embedding": 13 * 16,
        "norms": 2 * (16 + 16) + 16,
        "attention": 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 4 + 4),
        "feedforward": 2 * (3 * 16 * 24),
        "total": 208 + 80 + 1552 + 2304,
    }
    assert count_parameters(build_model(small("gpt2", kv_heads=4, tie=False))) == {
        "embedding": 13 * 16,
        "position": 24 * 16,
        "norms": (2 * 2 + 1) * (16 + 16),
        "attention": 2 * 4 * (16 * 16 + 16),
        "feedforward": 2 * (16 * 24 + 24 + 24 * 16 + 16),
        "output": 16 * 13,
        "total": 208 + 384 + 160 + 2176 + 1616 + 208,
    }
