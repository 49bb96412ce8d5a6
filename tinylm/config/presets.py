"""Named model configurations: a preset sets the kinds of layers, a size the dimensions; any field can be replaced."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from tinylm.config.model import GATED_ACTIVATIONS, ModelConfig, ModelSettings
from tinylm.config.validation import Panel, Setting, check_choice, check_settings
from tinylm.errors import UsageError

PRESETS: dict[str, dict[str, Any]] = {
    # The defaults of ModelConfig: the architecture of Qwen3, which other tools can run.
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
    # Vaswani et al. 2017; by default only the decoder.
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

# In ascending order of parameters. "tiny" was added by decision 018. `context` is that of models with RoPE.
SIZES: dict[str, dict[str, int]] = {
    "nano": {"layers": 3, "heads": 3, "width": 96, "context": 256},
    "micro": {"layers": 4, "heads": 4, "width": 128, "context": 512},
    "tiny": {"layers": 4, "heads": 4, "width": 192, "context": 512},
    "mini": {"layers": 4, "heads": 4, "width": 256, "context": 512},
    "small": {"layers": 6, "heads": 6, "width": 384, "context": 512},
    "medium": {"layers": 8, "heads": 8, "width": 512, "context": 512},
    "base": {"layers": 12, "heads": 12, "width": 768, "context": 1024},
}
# Of models with other positions, whose sequences do not grow in training (decision 037); larger sizes have those above.
SHORT_CONTEXTS = {"nano": 64, "micro": 128, "tiny": 256, "mini": 256}


@dataclass(frozen=True, kw_only=True)
class ShapeSettings:
    """A preset and a size of a model."""

    preset: Annotated[
        str | None,
        Setting(
            "Architecture preset: modern (Qwen3 shape), GPT-2, or the original transformer (default: modern).",
            Panel.MODEL,
            tuple(PRESETS),
        ),
    ] = None
    size: Annotated[
        str | None,
        Setting(
            "Sets layers, heads, width and context; auto fits the corpus, the machine and the budget (default: auto).",
            Panel.MODEL,
            ("auto", *SIZES),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PresetSettings(ModelSettings, ShapeSettings):
    """A preset and a size of a model, and the fields of ModelConfig that replace theirs."""


def default_ffn_width(width: int, activation: str) -> int:
    """4 * width; for gated activations, 8/3 * width, rounded up to a multiple of 32.

    Gated feed-forward layers have three matrices in place of two; both widths give about the same number of parameters
    (Shazeer 2020).
    """
    if activation in GATED_ACTIVATIONS:
        return math.ceil(8 * width / 3 / 32) * 32
    return 4 * width


def find_preset(config: ModelConfig) -> str | None:
    """The preset with the same kinds of layers as the model; `None` if there is none."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    names = {name for values in PRESETS.values() for name in values}
    for preset, values in PRESETS.items():
        if all(getattr(config, name) == {**defaults, **values}[name] for name in names):
            return preset
    return None


def make_model_config(*, vocab_size: int, preset: str, size: str, **choices: Any) -> ModelConfig:
    """The configuration of a preset in a size. `choices` replace fields of ModelConfig; `None` leaves the default.

    Defaults of `context`, `heads`, `head_dim`, `kv_heads`, `ffn_width`, `local_layers` and `encoder_layers` depend on
    other fields.

    Raises UsageError for an unknown preset or size, for fields that contradict each other, and for a choice that has
    no effect in this model.
    """
    check_choice("preset", preset, tuple(PRESETS))
    check_choice("size", size, tuple(SIZES))
    check_settings(ModelConfig, {"vocab_size": vocab_size, **choices})
    choices = {name: value for name, value in choices.items() if value is not None}
    values = {**PRESETS[preset], **SIZES[size], **choices}
    has_rope = values.get("position", "rope") == "rope"
    if "context" not in choices and not has_rope:
        values["context"] = SHORT_CONTEXTS.get(size, values["context"])
    if "heads" not in choices:
        # The number closest to that of the size (the smaller of two) that divides the width and is a multiple of
        # `kv_heads`; RoPE rotates pairs of features of each head. If none fits, ModelConfig raises the error.
        width, preferred, kv_heads = values["width"], values["heads"], values.get("kv_heads", 1)
        fitting = [
            heads
            for heads in range(1, width + 1)
            if width % heads == 0 and heads % kv_heads == 0 and not (has_rope and width // heads % 2)
        ]
        values["heads"] = min(fitting, key=lambda heads: (abs(heads - preferred), heads), default=preferred)
    heads = values["heads"]
    values.setdefault("kv_heads", heads // 2 if preset == "modern" and heads % 2 == 0 else heads)
    values.setdefault("ffn_width", default_ffn_width(values["width"], values.get("activation", "swiglu")))
    if "local_window" in values:
        values.setdefault("local_layers", tuple(range(0, values["layers"], 2)))
    if values.get("architecture") == "encoder-decoder":
        values.setdefault("encoder_layers", values["layers"])
    config = ModelConfig(vocab_size=vocab_size, **values)
    check_options_have_effect(config, choices)
    return config


def check_options_have_effect(config: ModelConfig, choices: Mapping[str, Any]) -> None:
    """Raise UsageError if one of the chosen fields has no effect in a model of this configuration."""
    for name, needed in _unused_options(config).items():
        if choices.get(name) is not None:
            raise UsageError(f"`{name}` has no effect without {needed}; add that, or leave it out.")


def _unused_options(config: ModelConfig) -> dict[str, str]:
    """The fields that have no effect in a model of this configuration, each with the setting that it needs."""
    unused = {}
    if config.position != "rope":
        unused["rope_theta"] = '`position="rope"`'
    if config.experts == 1:
        unused |= dict.fromkeys(("experts_per_token", "expert_mode", "expert_balance"), "`experts`")
    elif config.experts <= config.experts_per_token:  # the load-balancing loss is constant
        unused["expert_balance"] = "more `experts` than `experts_per_token`"
    if config.norm == "none":
        unused |= dict.fromkeys(("norm_gain", "norm_bias", "norm_placement"), "a `norm`")
        if config.qk_norm:
            unused["qk_norm"] = "a `norm`"
    if config.local_window is not None and config.local_window >= config.context:
        unused["local_window"] = f"a `context` above {config.local_window}"
    if config.position != "relative":
        unused["relative_clip"] = '`position="relative"`'
    elif config.relative_clip > config.context:
        unused["relative_clip"] = f"a `context` of at least {config.relative_clip}"
    return unused
