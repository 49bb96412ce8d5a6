"""Position encodings and the scaling of RoPE, compared with their formulas and with transformers."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests import reference, reference_parts
from tinylm.config.model import RopeScaling
from tinylm.transformer.build import rope_rotation
from tinylm.transformer.position import (
    LocalRotaryPosition,
    RotaryPosition,
    SinusoidalPosition,
    rope_frequencies,
    rotate,
)


def rotary(head_dim: int, theta: float, context: int = 1024) -> RotaryPosition:
    return RotaryPosition(context, rope_frequencies(head_dim, theta))


def test_the_sinusoid_table_equals_the_formula_and_is_not_in_the_state_dict() -> None:
    position = SinusoidalPosition(50, 12)
    table = position.add(torch.zeros(1, 50, 12), torch.arange(50))[0]
    expected = [[reference.sinusoid(p, i, 12) for i in range(12)] for p in range(50)]
    np.testing.assert_allclose(table.numpy(), expected, atol=1e-7)  # float32 keeps 6e-8
    assert position.state_dict() == rotary(4, 100.0).state_dict() == {}


@given(
    st.integers(0, 400),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([10.0, 1e4, 1e6]),
    st.sampled_from([1, 1.25]),
)
@settings(max_examples=50)
def test_rope_rotates_split_half_pairs_of_the_first_features_as_complex_numbers_and_keeps_the_others(
    p: int, half: int, kept: int, theta: float, magnitude: float
) -> None:
    x = torch.randn(2, 3, 1, 2 * half + kept, generator=torch.Generator().manual_seed(p), dtype=torch.float64)
    position = RotaryPosition(1024, rope_frequencies(2 * half, theta), magnitude=magnitude)
    turned = rotate(x, position.rotation(torch.tensor([p])))
    rates = [theta ** (-pair / half) for pair in range(half)]
    expected = reference_parts.rotary_part(x[1, 2, 0].numpy(), p, rates, magnitude)
    np.testing.assert_allclose(turned[1, 2, 0].numpy(), expected, atol=1e-6)  # the tables are float32
    assert torch.equal(turned[..., 2 * half :], x[..., 2 * half :])


def test_rope_scores_depend_on_the_offset_alone() -> None:
    position = rotary(8, 10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        turned = (rotate(x, position.rotation(torch.tensor([at]))) for x, at in ((q, query_at), (k, key_at)))
        return float(torch.mul(*turned).sum())

    assert score(0, 0) != pytest.approx(score(7, 0), abs=1e-2)
    for shift in (1, 20, 400):
        assert score(7 + shift, shift) == pytest.approx(score(7, 0), abs=1e-5)


def test_angles_are_exact_at_large_positions() -> None:
    """An angle computed in float32 would have an error of several thousandths here."""
    rope, sinusoids = rotary(2, 10_000.0, context=100_000), SinusoidalPosition(100_000, 2)
    for p in (1, 999, 99_999):
        cosines, sines = rope.rotation(torch.tensor([p]))
        assert cosines[0].tolist() == pytest.approx([math.cos(p), math.cos(p)], abs=1e-7)
        assert sines[0].tolist() == pytest.approx([-math.sin(p), math.sin(p)], abs=1e-7)
        table = sinusoids.add(torch.zeros(1, 1, 2), torch.tensor([p]))
        assert table.flatten().tolist() == pytest.approx([math.sin(p), math.cos(p)], abs=1e-7)


def test_layers_share_the_tables_of_rope_except_local_layers_with_other_angles() -> None:
    plain, local = rotary(4, 100.0), rotary(4, 10.0)
    both = LocalRotaryPosition(1024, rope_frequencies(4, 100.0), local=local, local_layers=(0, 2))
    for positions in (torch.tensor([3, 5]), torch.tensor([[3, 5], [0, 9]])):
        for layer, found in enumerate(both.rotations(positions, 4)):
            expected = (local, plain, local, plain)[layer].rotation(positions)
            assert all(map(torch.equal, found, expected))
    assert len({id(rotation) for rotation in plain.rotations(torch.arange(3), 5)}) == 1


# Of Llama 3.1 and Qwen2.5, and of small models, where the ends of ramps meet or leave the pairs.
SCALINGS = {
    "linear": RopeScaling(kind="linear", factor=8.0),
    "llama 3.1": RopeScaling(kind="llama3", factor=8.0, original_context=8192),
    "llama 3.2": RopeScaling(kind="llama3", factor=32.0, original_context=8192),
    "short llama3": RopeScaling(
        kind="llama3", factor=2.0, original_context=32, low_freq_factor=0.5, high_freq_factor=5.0
    ),
    "qwen 2.5": RopeScaling(kind="yarn", factor=4.0, original_context=32_768),
    "yarn with a magnitude": RopeScaling(kind="yarn", factor=4.0, original_context=512, attention_factor=1.5),
    "short yarn": RopeScaling(kind="yarn", factor=3.0, original_context=64, beta_fast=3.0, beta_slow=0.5),
}
every_scaling = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=[name.replace(" ", "-") for name in SCALINGS])


@every_scaling
def test_scaled_frequencies_equal_the_formula_and_those_of_transformers(scaling: RopeScaling) -> None:
    parameters = {name: value for name, value in vars(scaling).items() if value is not None}
    parameters |= {"rope_type": parameters.pop("kind"), "original_max_position_embeddings": scaling.original_context}
    for width, theta in ((128, 1e6), (64, 500_000.0), (8, 100.0)):
        found, strength = rope_rotation(width, theta, scaling)
        expected = [reference_parts.rope_rate(pair, width, theta, scaling) for pair in range(width // 2)]
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
        assert strength == pytest.approx(reference_parts.rope_magnitude(scaling))
        config = LlamaConfig(
            hidden_size=width * 2,
            num_attention_heads=2,
            max_position_embeddings=(scaling.original_context or 512) * int(scaling.factor),
            rope_parameters={**parameters, "rope_theta": theta},
        )
        theirs, magnitude = ROPE_INIT_FUNCTIONS[scaling.kind](config, device=torch.device("cpu"))
        np.testing.assert_allclose(found.numpy(), theirs.double().numpy(), rtol=2e-5)  # computed in float32
        assert strength == pytest.approx(magnitude)


def test_yarn_of_few_pairs_or_a_short_context_keeps_or_divides_each_frequency() -> None:
    for original_context, width in itertools.product((1, 2, 6, 7, 50, 1 << 20), (2, 4)):
        scaling = RopeScaling(kind="yarn", factor=2.0, original_context=original_context)
        plain, scaled = (rope_rotation(width, 10.0, one).frequencies for one in (None, scaling))
        assert scaled.isfinite().all()
        assert ((scaled >= plain / 2 - 1e-12) & (scaled <= plain + 1e-12)).all(), scaling
