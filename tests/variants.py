"""Small configurations of decoders, which together cover every choice of ModelConfig."""

from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from tinylm.model.norm import UnitOffsetRMSNorm
from tinylm.model_config import ModelConfig, RopeScaling
from tinylm.presets import PRESETS

Model = TypeVar("Model", bound=nn.Module)

SHAPE: dict[str, Any] = {
    "vocab_size": 13,
    "context": 24,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "width": 16,
    "ffn_width": 24,
}

LLAMA3 = RopeScaling(kind="llama3", factor=4.0, original_context=16, low_freq_factor=0.6, high_freq_factor=2.0)
YARN = RopeScaling(kind="yarn", factor=3.0, original_context=32, beta_fast=4.0, beta_slow=0.5)
PLAIN: dict[str, Any] = {"qk_norm": False}
LLAMA: dict[str, Any] = {"qk_norm": False, "heads": 2, "kv_heads": 1, "norm_epsilon": 0.01}
NEOX: dict[str, Any] = {
    "kv_heads": 4,
    "position": "rope",
    "rotary_dim": 2,
    "parallel_residual": True,
    "activation": "gelu-exact",
    "norm_epsilon": 1e-3,
    "tie": False,
}
GEMMA: dict[str, Any] = {"head_dim": 6, "norm_unit_offset": True, "activation": "geglu", "embedding_scale": 2.5}


def small(preset: str = "modern", **choices: Any) -> ModelConfig:
    """A preset at a width of 16, with any part replaced."""
    return ModelConfig(**{**PRESETS[preset], **SHAPE, **choices})


VARIANTS: tuple[tuple[str, ModelConfig], ...] = (
    ("modern", small()),
    ("gpt2", small("gpt2", kv_heads=4)),
    ("original", small("original", kv_heads=4)),
    ("learned", small(position="learned")),
    ("sinusoidal", small(position="sinusoidal")),
    ("rope with theta 100", small(rope_theta=100.0, heads=2, kv_heads=1)),
    ("no qk-norm", small(qk_norm=False)),
    ("multi-head", small(kv_heads=4)),
    ("multi-query", small(kv_heads=1)),
    ("post-norm", small(norm_placement="post")),
    ("layernorm as qk-norm", small(norm="layernorm", norm_bias=True)),
    ("layernorm without gain and bias", small("gpt2", norm_gain=False, norm_bias=False)),
    ("rmsnorm with bias only", small(norm_gain=False, norm_bias=True)),
    ("gelu", small(activation="gelu")),
    ("relu", small(activation="relu", bias=True)),
    ("swiglu with biases", small(bias=True, norm_bias=True)),
    ("untied", small("gpt2", tie=False)),
    ("scaled embedding", small(scale_embedding=True, tie=False)),
    ("relative", small(position="relative", relative_clip=16)),
    ("relative, clipped at 2", small("gpt2", position="relative", relative_clip=2)),
    ("no positions", small(position="none")),
    ("local", small(local_window=3, local_layers=(0,))),
    ("local everywhere, learned", small(position="learned", local_window=6, local_layers=(0, 1))),
    ("local, relative", small(position="relative", relative_clip=3, local_window=4, local_layers=(1,))),
    ("experts", small(experts=4)),
    ("experts with biases, three per token", small("original", kv_heads=4, experts=4, experts_per_token=3)),
    ("one expert per token", small(experts=2, experts_per_token=1)),
    ("merged experts", small(experts=4, expert_mode="merge")),
    ("all experts merged, with biases", small("gpt2", experts=3, experts_per_token=3, expert_mode="merge")),
    ("no norms", small("gpt2", norm="none", norm_bias=False)),
    ("no residuals", small(residual=False)),
    ("post-norm without residuals", small("original", kv_heads=4, residual=False)),
    ("unscaled attention scores", small(attention_scale=False, qk_norm=False)),
    ("unscaled relative scores", small(position="relative", relative_clip=2, attention_scale=False)),
    # The shapes of published decoders, with sizes and factors that leave no part without effect.
    ("llama 3", small(**LLAMA, rope_theta=30.0, rope_scaling=LLAMA3, tie=False)),
    ("qwen 2", small(**PLAIN, qkv_bias=True)),
    ("gpt-neox", small("gpt2", **NEOX)),
    ("gemma 1", small(**GEMMA, kv_heads=1, qk_norm=False)),
    (
        "gemma 3",
        small(
            **GEMMA,
            norm_placement="sandwich",
            attention_multiplier=0.2,
            local_window=3,
            local_layers=(0,),
            local_rope_theta=20.0,
            rope_scaling=RopeScaling(kind="linear", factor=4.0),
        ),
    ),
    ("mixtral", small(**PLAIN, experts=4, local_window=5, local_layers=(0, 1))),
    ("qwen 3 moe, not normalised", small(head_dim=6, experts=4, normalise_top_k=False, expert_mode="route")),
    # And pairs of parts that none of them has.
    (
        "yarn, partial, biases of outputs",
        small(
            head_dim=10, rotary_dim=8, rope_theta=40.0, rope_scaling=YARN, output_bias=True, activation="geglu-exact"
        ),
    ),
    (
        "merged experts, not normalised, with biases in parallel",
        small(experts=3, expert_mode="merge", normalise_top_k=False, ffn_bias=True, parallel_residual=True),
    ),
    ("post-norm with rope", small("original", position="rope", qk_norm=True, activation="swiglu", norm_gain=False)),
)

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
