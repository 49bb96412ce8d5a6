import dataclasses
import math

import pytest
import torch
from torch import Tensor

from tests.variants import VARIANTS, every_variant, randomised, small
from tinylm import model_config
from tinylm.model.build import BLOCKS, build_empty_model, build_model, count_parameters
from tinylm.model.decoder import Decoder
from tinylm.model_config import ModelConfig

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 12, 0]]

# Large enough to estimate a standard deviation within 1 %.
LARGE = {"vocab_size": 400, "context": 100, "layers": 3, "heads": 4, "kv_heads": 4, "width": 96, "ffn_width": 320}


def large(preset: str, **choices: object) -> ModelConfig:
    return small(preset, **{**LARGE, **choices})


def matrices(model: Decoder) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.dim() == 2 and "norm" not in n}


def writes_to_residual(name: str) -> bool:
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def assert_normal(weight: Tensor, std: float) -> None:
    """Mean, deviation and share beyond two deviations, each within five standard errors of N(0, std)."""
    n = weight.numel()
    assert abs(float(weight.mean())) < 5 * std / math.sqrt(n)
    assert float(weight.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * n))
    share = float((weight.abs() > 2 * std).float().mean())
    assert share == pytest.approx(0.0455, abs=5 * math.sqrt(0.0455 / n))


def assert_uniform(weight: Tensor, bound: float) -> None:
    """All values within the bound, the largest close to it, and half of them within half the bound."""
    n = weight.numel()
    assert 0.99 * bound < float(weight.abs().max()) <= bound
    assert abs(float(weight.mean())) < 5 * bound / math.sqrt(3 * n)
    assert float((weight.abs() < bound / 2).float().mean()) == pytest.approx(0.5, abs=2.5 / math.sqrt(n))


def test_the_variants_have_every_value_of_every_choice() -> None:
    """Of numbers without bounds, two values. Dropout, and encoders, are tested apart from the variants."""
    configs = [config for _, config in VARIANTS]
    names = {"position": "POSITIONS", "norm": "NORMS", "norm_placement": "NORM_PLACEMENTS"}
    names |= {"activation": "ACTIVATIONS", "expert_mode": "EXPERT_MODES", "initialisation": "INITIALISATIONS"}
    wanted: dict[str, set[object]] = {name: set(getattr(model_config, values)) for name, values in names.items()}
    same = {"vocab_size", "context", "layers", "width", "ffn_width"}
    same |= {"architecture", "encoder_layers", "dropout", "attention_dropout", "expert_balance"}
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


def test_modern_weights_are_normal_and_zero_for_projections_into_the_residual_stream() -> None:
    for choices in ({}, {"tie": False}, {"position": "learned"}):
        for name, weight in matrices(build_model(large("modern", **choices))).items():
            if writes_to_residual(name):
                assert not weight.any()
            else:
                assert_normal(weight, 0.02)


def test_modern_projections_are_normal_where_zeros_would_stop_learning() -> None:
    """In sandwich blocks and without residual connections."""
    for choices in ({"norm_placement": "sandwich"}, {"residual": False}):
        for weight in matrices(build_model(large("modern", **choices))).values():
            assert_normal(weight, 0.02)


def test_gpt2_weights_are_normal_and_scaled_down_for_projections_into_the_residual_stream() -> None:
    """0.02; 0.01 for positions, as in the published code; 0.02 / sqrt(N) for the N = 2 layers residual sublayers."""
    for layers in (1, 3):
        for name, weight in matrices(build_model(large("gpt2", layers=layers, tie=False))).items():
            if writes_to_residual(name):
                assert_normal(weight, 0.02 / math.sqrt(2 * layers))
            else:
                assert_normal(weight, 0.01 if name == "position.weight" else 0.02)


def test_original_weights_are_glorot_uniform_and_the_scaled_embedding_has_deviation_one() -> None:
    config = large("original", tie=False)
    for name, weight in matrices(build_model(config)).items():
        if name == "embedding.weight":
            assert_normal(weight * math.sqrt(config.width), 1.0)
        else:
            assert_uniform(weight, math.sqrt(6 / sum(weight.shape)))


def test_relative_positions_start_as_the_other_positions_of_the_scheme() -> None:
    for preset, std in (("modern", 0.02), ("gpt2", 0.01), ("original", 96**-0.5)):
        model = build_model(large(preset, position="relative", relative_clip=60))
        for name in ("relative_keys", "relative_values"):
            assert_normal(model.get_parameter(f"layers.0.attention.core.{name}").detach(), std)


def test_biases_start_at_zero_and_gains_at_one() -> None:
    for variant, config in VARIANTS:
        for name, parameter in build_model(config).named_parameters():
            if name.endswith("bias"):
                assert not parameter.any(), (variant, name)
            elif name.endswith("norm.weight"):
                assert (parameter == (0 if config.norm_unit_offset else 1)).all(), (variant, name)


def test_a_seed_gives_the_same_weights_whatever_the_state_of_the_global_generator() -> None:
    for variant, config in VARIANTS:
        torch.manual_seed(1)
        first = build_model(config, seed=7).state_dict()
        torch.manual_seed(2)
        second = build_model(config, seed=7).state_dict()
        other = build_model(config, seed=8).state_dict()
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first), variant
        assert not torch.equal(first["embedding.weight"], other["embedding.weight"]), variant
        layers = [first[f"layers.{n}.attention.q_proj.weight"] for n in range(2)]
        assert not torch.equal(*layers), variant


def test_building_a_model_does_not_change_any_global_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of the CPU nor those of other devices."""
    seeded: list[int] = []
    monkeypatch.setattr("torch.cuda.manual_seed_all", seeded.append)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    seeded.clear()
    build_model(small(), seed=7)
    assert torch.equal(torch.rand(3), expected)
    assert seeded == []


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
