"""The decoders that every promise about decoders is tested on: small, and between them every choice of ModelConfig."""

from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from tinylm.config import ModelConfig
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


def small(preset: str = "modern", **choices: Any) -> ModelConfig:
    """A preset at a width of 16, with any part replaced."""
    return ModelConfig(**{**PRESETS[preset], **SHAPE, **choices})


VARIANTS: tuple[tuple[str, ModelConfig], ...] = (
    ("modern", small()),
    ("gpt2", small("gpt2", kv_heads=4)),
    ("original", small("original", kv_heads=4)),
    ("learned", small(position="learned")),
    ("sinusoidal", small(position="sinusoidal")),
    ("rope of another theta", small(rope_theta=100.0, heads=2, kv_heads=1)),
    ("no qk-norm", small(qk_norm=False)),
    ("multi-head", small(kv_heads=4)),
    ("multi-query", small(kv_heads=1)),
    ("post-norm", small(norm_placement="post")),
    ("layernorm in the heads", small(norm="layernorm", norm_bias=True)),
    ("bare layernorm", small("gpt2", norm_gain=False, norm_bias=False)),
    ("rmsnorm of bias alone", small(norm_gain=False, norm_bias=True)),
    ("gelu", small(activation="gelu")),
    ("relu", small(activation="relu", bias=True)),
    ("swiglu of biases", small(bias=True, norm_bias=True)),
    ("untied", small("gpt2", tie=False)),
    ("scaled embedding", small(scale_embedding=True, tie=False)),
    ("relative", small(position="relative", relative_clip=16)),
    ("relative, clipped at 2", small("gpt2", position="relative", relative_clip=2)),
    ("no positions", small(position="none")),
    ("local", small(local_window=3, local_layers=(0,))),
    ("local everywhere, learned", small(position="learned", local_window=6, local_layers=(0, 1))),
    ("local, relative", small(position="relative", relative_clip=3, local_window=4, local_layers=(1,))),
    ("experts", small(experts=4)),
    ("experts of biases, three at a time", small("original", kv_heads=4, experts=4, experts_per_token=3)),
    ("one expert at a time", small(experts=2, experts_per_token=1)),
    ("merged experts", small(experts=4, expert_mode="merge")),
    ("merged experts of biases, all", small("gpt2", experts=3, experts_per_token=3, expert_mode="merge")),
    ("no norms", small("gpt2", norm="none", norm_bias=False)),
    ("no residuals", small(residual=False)),
    ("post-norm without residuals", small("original", kv_heads=4, residual=False)),
    ("products as they are", small(attention_scale=False, qk_norm=False)),
    ("relative products as they are", small(position="relative", relative_clip=2, attention_scale=False)),
    ("post-norm of rope", small("original", position="rope", qk_norm=True, activation="swiglu", norm_gain=False)),
)

every_variant = pytest.mark.parametrize(
    "config", [c for _, c in VARIANTS], ids=[n.replace(" ", "-") for n, _ in VARIANTS]
)


def randomised(model: Model, seed: int = 0) -> Model:
    """Every parameter drawn anew, gains around 1 and the rest around 0, and dropout off: no term is trivial."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    model.eval()
    return model
