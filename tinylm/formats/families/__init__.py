"""The model families of Hugging Face that tinylm reads and writes, and the one that a model is exported as."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tinylm.config.model import ModelConfig, RopeScaling
from tinylm.config.validation import describe_value
from tinylm.errors import UsageError
from tinylm.formats.families.gemma import GEMMA, GEMMA3_TEXT
from tinylm.formats.families.gpt2 import GPT2
from tinylm.formats.families.gpt_neox import GPT_NEOX
from tinylm.formats.families.llama import LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE
from tinylm.formats.family import ConvertedTensors, Family, Source, convert_tensors
from tinylm.formats.foreign_config import refused
from tinylm.transformer.position import yarn_attention_factor

# In the order in which choose_family tries them.
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (QWEN3, LLAMA, MISTRAL, QWEN2, QWEN3_MOE, MIXTRAL, GPT2, GPT_NEOX, GEMMA, GEMMA3_TEXT)
}


def find_family(values: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ValueError if its `model_type` is missing or not a key of FAMILIES."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"its model_type is {describe_value(name)}; tinylm reads {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def convert(
    values: Mapping[str, Any], tensors: Source, file: str = "config.json"
) -> tuple[str, ModelConfig, ConvertedTensors]:
    """Convert a model. values: content of its config.json, which messages call `file`. tensors: by foreign names.

    Returns the name of its family, its configuration, and its tensors under tinylm's names, which are converted when
    they are looked up. Raises ValueError with a reason that completes a sentence such as "Cannot import PATH: ".
    """
    family = find_family(values)
    with refused("tinylm cannot build its model"):
        config = family.config(values, file)
    return family.name, config, convert_tensors(family, config, tensors)


def resolve(config: ModelConfig) -> ModelConfig:
    """The configuration with all defaults filled in, and fixed values in fields that do not change its logits.

    Two models with equal weights compute the same logits if their resolved configurations are equal.
    """
    epsilon = {"rmsnorm": 1e-6, "layernorm": 1e-5}.get(config.norm)
    multiplier = _given(config.attention_multiplier, config.head_dim**-0.5) if config.attention_scale else 1.0
    scale = math.sqrt(config.width) if config.scale_embedding else 1.0
    neutral: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "initialisation": "modern"}
    if config.experts == 1:
        neutral |= {"experts_per_token": 2, "expert_mode": "route"}
    else:
        neutral["normalise_top_k"] = _given(config.normalise_top_k, config.experts_per_token > 1)
    if config.position != "rope":
        neutral |= {"rope_theta": 10_000.0, "rope_scaling": None, "local_rope_theta": None, "rotary_dim": None}
    elif config.rotary_dim == config.head_dim:
        neutral["rotary_dim"] = None
    if config.position != "relative":
        neutral["relative_clip"] = 16
    if not config.local_layers or (config.local_rope_theta == config.rope_theta and config.rope_scaling is None):
        neutral["local_rope_theta"] = None
    if config.rope_scaling is not None and config.rope_scaling.kind == "yarn":
        factor = _given(config.rope_scaling.attention_factor, yarn_attention_factor(config.rope_scaling.factor))
        neutral["rope_scaling"] = dataclasses.replace(config.rope_scaling, attention_factor=factor)
    return dataclasses.replace(
        config,
        **neutral,
        expert_balance=0.01,
        local_layers=tuple(sorted(config.local_layers)),
        norm_epsilon=_given(config.norm_epsilon, epsilon),
        bias=False,
        qkv_bias=_given(config.qkv_bias, config.bias),
        output_bias=_given(config.output_bias, config.bias),
        ffn_bias=_given(config.ffn_bias, config.bias),
        attention_scale=True,
        attention_multiplier=multiplier,
        scale_embedding=False,
        embedding_scale=_given(config.embedding_scale, scale),
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def differing_fields(wanted: ModelConfig, found: ModelConfig, tolerance: float = 0.0) -> list[str]:
    """The fields in which two resolved configurations differ, numbers by more than the relative tolerance."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, float) and isinstance(other, float):
            return math.isclose(one, other, rel_tol=tolerance)
        if isinstance(one, RopeScaling) and isinstance(other, RopeScaling):
            return all(map(same, dataclasses.astuple(one), dataclasses.astuple(other)))
        return bool(one == other)

    names = [field.name for field in dataclasses.fields(ModelConfig)]
    return [name for name in names if not same(getattr(wanted, name), getattr(found, name))]


def choose_family(config: ModelConfig, preferred: str | None = None) -> Family:
    """The family to export a model of this configuration as: `preferred` if it fits, else the first that fits.

    Raises UsageError if none fits; it names up to three settings that the closest family cannot represent.
    """
    families = sorted(FAMILIES.values(), key=lambda family: family.name != preferred)
    differences: dict[str, list[str]] = {}
    for family in families:
        differences[family.name] = _differences(family, config)
        if not differences[family.name]:
            return family
    # Families with the right `experts` come first; otherwise a dense family would be the closest to every mixture.
    closest = min(families, key=lambda f: ("experts" in differences[f.name], len(differences[f.name])))
    settings = " and ".join(
        f"`{name}` {describe_value(getattr(config, name))}" for name in differences[closest.name][:3]
    )
    raise UsageError(
        f"No model family of Hugging Face has this model's {settings}; the closest is {closest.name}. Train a model "
        "without that to export it."
    )


# For a field that `resolve` fills in, the setting that determines its value.
_DECIDED_BY = {
    "qkv_bias": "bias",
    "output_bias": "bias",
    "ffn_bias": "bias",
    "attention_multiplier": "attention_scale",
    "embedding_scale": "scale_embedding",
    "norm_epsilon": "norm",
    "normalise_top_k": "experts_per_token",
}
# A message that names the value omits the key, which is part of the same setting.
_PARTS = {"experts_per_token": "experts", "normalise_top_k": "experts", "local_layers": "local_window"}


def _differences(family: Family, config: ModelConfig) -> list[str]:
    """The distinct settings of a model that are lost if its config is written as this family and read again.

    All settings, if the family rejects the written config.
    """
    wanted = resolve(config)
    try:
        found = resolve(family.config(family.fields(wanted)))
    except (ValueError, UsageError, ArithmeticError):  # for example, a combination of sizes that is not allowed
        found = None
    every = [field.name for field in dataclasses.fields(ModelConfig)]
    names = every if found is None else differing_fields(wanted, found)
    whole = [name for name in names if _PARTS.get(name) not in names]
    decided = (_DECIDED_BY.get(name, name) if getattr(config, name) is None else name for name in whole)
    return list(dict.fromkeys(decided))
