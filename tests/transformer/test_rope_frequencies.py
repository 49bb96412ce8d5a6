import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests import reference_parts
from tinylm.config.model import RopeScaling
from tinylm.transformer.build import rope_rotation

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
