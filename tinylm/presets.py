"""The names of common shapes: presets say which transformer, sizes how large; every part may be chosen by itself."""

import math
from typing import Any

from tinylm.checks import check_numbers, flag, one_of
from tinylm.config import ModelConfig
from tinylm.errors import UsageError

PRESETS: dict[str, dict[str, Any]] = {
    # The shape of Qwen3, which other tools can run.
    "modern": {},
    # Radford et al. 2019.
    "gpt2": {
        "position": "learned",
        "norm": "layernorm",
        "norm_bias": True,
        "qk_norm": False,
        "bias": True,
        "activation": "gelu",
        "initialisation": "gpt2",
    },
    # Vaswani et al. 2017, the decoder half.
    "original": {
        "position": "sinusoidal",
        "norm": "layernorm",
        "norm_placement": "post",
        "norm_bias": True,
        "qk_norm": False,
        "bias": True,
        "activation": "relu",
        "scale_embedding": True,
        "initialisation": "original",
    },
}

SIZES: dict[str, dict[str, int]] = {
    "nano": {"layers": 3, "heads": 3, "width": 96, "context": 64},
    "micro": {"layers": 4, "heads": 4, "width": 128, "context": 128},
    "tiny": {"layers": 4, "heads": 4, "width": 192, "context": 256},
    "mini": {"layers": 4, "heads": 4, "width": 256, "context": 256},
    "small": {"layers": 6, "heads": 6, "width": 384, "context": 512},
    "medium": {"layers": 8, "heads": 8, "width": 512, "context": 512},
    "base": {"layers": 12, "heads": 12, "width": 768, "context": 1024},
}


def default_ffn_width(width: int, activation: str) -> int:
    """Four widths, or for SwiGLU, which has three matrices, as many parameters as that: 8/3, rounded up to 32."""
    if activation == "swiglu":
        return math.ceil(8 * width / 3 / 32) * 32
    return 4 * width


def make_model_config(*, vocab_size: int, preset: str, size: str, **choices: Any) -> ModelConfig:
    """A preset and a size, with any part chosen by its own flag; a choice of `None` means not chosen.

    Raises UsageError for an unknown preset or size and for parts that do not fit together.
    """
    one_of("preset", preset, tuple(PRESETS))
    one_of("size", size, tuple(SIZES))
    check_numbers({"vocab_size": vocab_size, **choices})
    values = {**PRESETS[preset], **SIZES[size], **{k: v for k, v in choices.items() if v is not None}}
    width, heads = values["width"], values["heads"]
    if "heads" not in choices or choices["heads"] is None:
        values["heads"] = heads = _heads_for(
            width, heads, choices.get("kv_heads"), in_pairs=values.get("position", "rope") == "rope"
        )
    values.setdefault("kv_heads", heads // 2 if preset == "modern" and heads % 2 == 0 else heads)
    values.setdefault("ffn_width", default_ffn_width(width, values.get("activation", "swiglu")))
    if values.get("local_window") is not None and "local_layers" not in values:
        values["local_layers"] = tuple(range(0, values["layers"], 2))
    if values.get("architecture") == "encoder-decoder":
        values.setdefault("encoder_layers", values["layers"])
    config = ModelConfig(vocab_size=vocab_size, **values)
    _refuse_idle(config, choices)
    return config


def _refuse_idle(config: ModelConfig, choices: dict[str, Any]) -> None:
    """Raises UsageError for a choice of which nothing would come in this model."""
    idle = {
        "relative_clip": (config.position != "relative", "--position relative"),
        "rope_theta": (config.position != "rope", "--position rope"),
        "experts_per_token": (config.experts == 1, "--experts"),
        "expert_mode": (config.experts == 1, "--experts"),
        "expert_balance": (config.experts == 1, "--experts"),
        "norm_gain": (config.norm == "none", "a --norm"),
        "norm_bias": (config.norm == "none", "a --norm"),
        "norm_placement": (config.norm == "none", "a --norm"),
        "local_window": ((config.local_window or 0) >= config.context, f"a --context above {config.local_window}"),
        "qk_norm": (config.norm == "none" and config.qk_norm, "a --norm"),
    }
    for name, (is_idle, needed) in idle.items():
        if is_idle and choices.get(name) is not None:
            raise UsageError(f"{flag(name)} is for models with {needed}; add that, or leave it out.")


def _heads_for(width: int, wanted: int, kv_heads: int | None, in_pairs: bool) -> int:
    """The number of heads nearest to the size's own that fits the width and the key/value heads the user chose.

    `in_pairs`: whether a head's features must be even in number, for rotation.
    """
    fitting = [
        n
        for n in range(1, width + 1)
        if width % n == 0 and (not in_pairs or width // n % 2 == 0) and (not kv_heads or n % kv_heads == 0)
    ]
    return min(fitting, key=lambda n: (abs(n - wanted), n), default=wanted)
