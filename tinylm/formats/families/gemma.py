"""Gemma 1 and the text models of Gemma 3: norms with a gain of 1 + weight, scaled embeddings and GeGLU."""

import math
from typing import Any

from tinylm.config.model import ModelConfig
from tinylm.formats.families.fields import (
    FULL,
    GATED,
    SLIDING,
    read_layer_types,
    read_rope,
    read_rope_by_layer_type,
    read_sizes,
    require_divisible_width,
    windows,
    write_layer_types,
    write_rope_by_layer_type,
    write_sizes,
)
from tinylm.formats.families.llama import ATTENTION_RULES, FEEDFORWARD_RULES, PRE_NORM_RULE
from tinylm.formats.family import Family, Rule
from tinylm.formats.foreign_config import ForeignConfig

# In Gemma 1, "gelu" stands for the tanh approximation: its first files named the wrong activation.
_GEMMA_1_ACTIVATIONS = {**GATED, "gelu": "geglu"}
_LAYER, _OURS = "model.layers.{layer}", "layers.{layer}"
_SANDWICH_RULES = (
    Rule(f"{_LAYER}.post_attention_layernorm", f"{_OURS}.attention_post_norm"),
    Rule(f"{_LAYER}.pre_feedforward_layernorm", f"{_OURS}.feedforward_norm"),
    Rule(f"{_LAYER}.post_feedforward_layernorm", f"{_OURS}.feedforward_post_norm"),
)


def _read_shared(config: ForeignConfig, kv_heads: int) -> dict[str, Any]:
    config.require("use_bidirectional_attention", None, False)
    sizes = read_sizes(config, kv_heads=kv_heads, head_dim=256)
    bias = config.flag("attention_bias", False)
    return {
        **sizes,
        "tie": config.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_unit_offset": True,
        "embedding_scale": math.sqrt(sizes["width"]),
    }


def _read_gemma(config: ForeignConfig) -> dict[str, Any]:
    activation = config.choice("hidden_act", _GEMMA_1_ACTIVATIONS, "gelu_pytorch_tanh")
    config.require("hidden_activation", None, "gelu_pytorch_tanh")  # transformers 4 writes both fields; they must agree
    if config.has("hidden_activation") and activation != "geglu":
        raise ValueError(f"hidden_act and hidden_activation of its {config.file} differ")
    return {**_read_shared(config, kv_heads=16), **read_rope(config), "activation": activation}


def _write_gemma(config: ModelConfig) -> dict[str, Any]:
    return {**write_sizes(config), "attention_bias": config.qkv_bias}


def _read_gemma3(config: ForeignConfig) -> dict[str, Any]:
    require_divisible_width(config)
    config.require("attn_logit_softcapping", None)
    config.require("final_logit_softcapping", None)
    rope = read_rope_by_layer_type(config)
    # Without `layer_types`, every sixth layer or every `sliding_window_pattern`-th has full attention
    name = "sliding_window_pattern" if config.has("sliding_window_pattern") else "_sliding_window_pattern"
    every = config.integer(name, 6)
    config.mark_read("_sliding_window_pattern")
    types = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(config.layers())]
    local = windows(config.optional_integer("sliding_window", 4096), read_layer_types(config, types))
    if not local:
        rope["local_rope_theta"] = None
    return {
        **_read_shared(config, kv_heads=4),
        **rope,
        **local,
        "activation": config.choice("hidden_activation", GATED, "gelu_pytorch_tanh"),
        "qk_norm": True,
        "norm_placement": "sandwich",
        "attention_multiplier": config.integer("query_pre_attn_scalar", 256) ** -0.5,
    }


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    sizes = write_sizes(config)
    activation = sizes.pop("hidden_act")
    return {
        **sizes,
        **write_rope_by_layer_type(config),
        "hidden_activation": activation,
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": round((config.attention_multiplier or 1.0) ** -2),
        "sliding_window": config.local_window,
        "layer_types": write_layer_types(config),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


GEMMA = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    read_config=_read_gemma,
    write_config=_write_gemma,
    rules=(*ATTENTION_RULES, PRE_NORM_RULE, *FEEDFORWARD_RULES),
)
GEMMA3_TEXT = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    read_config=_read_gemma3,
    write_config=_write_gemma3,
    rules=(*ATTENTION_RULES, *_SANDWICH_RULES, *FEEDFORWARD_RULES),
)
