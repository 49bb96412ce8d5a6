"""Small configurations of decoders, which together cover every choice of ModelConfig.

A variant combines many parts. `tests/transformer/test_build.py` checks that no choice is left out.
"""

from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from tinylm.config.model import ModelConfig, RopeScaling
from tinylm.config.presets import PRESETS
from tinylm.transformer.layers import UnitOffsetRMSNorm

Model = TypeVar("Model", bound=nn.Module)

SHAPE: dict[str, Any] = {"vocab_size": 13, "context": 24, "layers": 2, "heads": 4, "kv_heads": 2, "width": 16}
SHAPE |= {"ffn_width": 24}

LLAMA3 = RopeScaling(kind="llama3", factor=4.0, original_context=16, low_freq_factor=0.6, high_freq_factor=2.0)
YARN = RopeScaling(kind="yarn", factor=3.0, original_context=32, beta_fast=4.0, beta_slow=0.5)


def small(preset: str = "modern", **choices: Any) -> ModelConfig:
    """A preset at a width of 16, with any part replaced."""
    return ModelConfig(**{**PRESETS[preset], **SHAPE, **choices})


# fmt: off
VARIANTS: tuple[tuple[str, ModelConfig], ...] = (
    ("modern", small()),
    ("gpt2", small("gpt2", kv_heads=4)),
    ("original", small("original", kv_heads=4)),
    ("relative, clipped at 2", small("gpt2", position="relative", relative_clip=2)),
    ("no positions", small(position="none")),
    ("local, relative, unscaled scores, one expert per token",
     small(position="relative", relative_clip=3, local_window=4, local_layers=(1,), attention_scale=False, experts=2,
           experts_per_token=1)),
    ("local everywhere, learned, unscaled scores, norms without parameters",
     small(position="learned", local_window=6, local_layers=(0, 1), attention_scale=False, qk_norm=False,
           norm="layernorm", norm_gain=False, qkv_bias=True)),
    ("no norms, all experts merged, with biases",
     small("gpt2", norm="none", norm_bias=False, experts=3, experts_per_token=3, expert_mode="merge")),
    ("no residuals, multi-query", small(residual=False, kv_heads=1)),
    ("post-norm without residuals", small("original", kv_heads=4, residual=False)),
    ("post-norm with rope, three experts per token",
     small("original", position="rope", qk_norm=True, activation="swiglu", norm_gain=False, tie=False, experts=4,
           experts_per_token=3)),
    ("merged experts, not normalised, with biases in parallel",
     small(experts=3, expert_mode="merge", normalise_top_k=False, ffn_bias=True, parallel_residual=True,
           norm_gain=False, norm_bias=True)),
    # The shapes of published decoders, with sizes and factors that leave no part without effect.
    ("llama 3",
     small(heads=2, kv_heads=1, qk_norm=False, norm_epsilon=0.01, rope_theta=30.0, rope_scaling=LLAMA3, tie=False)),
    ("gpt-neox",
     small("gpt2", kv_heads=4, position="rope", rotary_dim=2, parallel_residual=True, activation="gelu-exact",
           norm_epsilon=1e-3, tie=False)),
    ("gemma 3",
     small(head_dim=6, norm_unit_offset=True, norm_placement="sandwich", activation="geglu", embedding_scale=2.5,
           attention_multiplier=0.2, local_window=3, local_layers=(0,), local_rope_theta=20.0,
           rope_scaling=RopeScaling(kind="linear", factor=4.0))),
    ("qwen 3 moe, not normalised", small(head_dim=6, experts=4, normalise_top_k=False, expert_mode="route")),
    ("yarn, partial, biases of outputs",
     small(head_dim=10, rotary_dim=8, rope_theta=40.0, rope_scaling=YARN, output_bias=True,
           activation="geglu-exact")),
)
# fmt: on

every_variant = pytest.mark.parametrize(
    "config", [c for _, c in VARIANTS], ids=[n.replace(" ", "-") for n, _ in VARIANTS]
)


def randomised(model: Model, seed: int = 0) -> Model:
    """Draw all parameters again, gains around 1 and others around 0, without dropout, so that every term matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
            owner = model.get_submodule(name.rpartition(".")[0])
            if name.endswith("norm.weight") and not isinstance(owner, UnitOffsetRMSNorm):
                parameter.add_(1.0)
    model.eval()
    return model
