"""Llama, Mistral, Qwen2 and Qwen3: pre-norm decoders with RMSNorm, RoPE, grouped-query attention and SwiGLU.

Also Mixtral and Qwen3-MoE, whose feed-forward layers are a mixture of experts.
"""

from typing import Any

from tinylm.config.model import ModelConfig
from tinylm.formats.families.fields import (
    DEFAULT_THETA,
    GATED,
    read_optional_window,
    read_rope,
    read_sizes,
    read_window,
    read_windows_by_layer,
    require_divisible_width,
    window_of_all_layers,
    write_layer_types,
    write_sizes,
)
from tinylm.formats.family import Family, Rule
from tinylm.formats.foreign_config import ForeignConfig

ATTENTION_RULES = (
    Rule("model.embed_tokens", "embedding"),
    Rule("model.layers.{layer}.input_layernorm", "layers.{layer}.attention_norm"),
    *(
        Rule(f"model.layers.{{layer}}.self_attn.{name}", f"layers.{{layer}}.attention.{name}")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    ),
    Rule("model.norm", "norm"),
    Rule("lm_head", "output"),
)
PRE_NORM_RULE = Rule("model.layers.{layer}.post_attention_layernorm", "layers.{layer}.feedforward_norm")
FEEDFORWARD_RULES = tuple(
    Rule(f"model.layers.{{layer}}.mlp.{name}", f"layers.{{layer}}.feedforward.{name}")
    for name in ("gate_proj", "up_proj", "down_proj")
)
RULES = (*ATTENTION_RULES, PRE_NORM_RULE, *FEEDFORWARD_RULES)


def _read_shared(config: ForeignConfig, default_theta: float = DEFAULT_THETA, **sizes: int) -> dict[str, Any]:
    """The fields that all these families have, which `write_sizes` writes. sizes: arguments of `read_sizes`"""
    return {
        **read_sizes(config, **sizes),
        **read_rope(config, default_theta),
        "activation": config.choice("hidden_act", GATED, "silu"),
        "tie": config.flag("tie_word_embeddings", False),
    }


def _read_llama(config: ForeignConfig) -> dict[str, Any]:
    require_divisible_width(config)
    bias = config.flag("attention_bias", False)
    return {
        **_read_shared(config),
        "qkv_bias": bias,
        "output_bias": bias,
        "ffn_bias": config.flag("mlp_bias", False),
    }


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": config.local_window is not None,
        "sliding_window": config.local_window,
        "max_window_layers": config.layers - len(config.local_layers),
        "layer_types": write_layer_types(config),
    }


def _read_qwen3(config: ForeignConfig) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **_read_shared(config, kv_heads=32, head_dim=128),
        **read_windows_by_layer(config),
        "qk_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
    }


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    read_config=_read_llama,
    write_config=lambda config: {**write_sizes(config), "attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias},
    rules=RULES,
)
MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    read_config=lambda config: {**_read_shared(config, kv_heads=8), **read_window(config, 4096)},
    write_config=lambda config: {**write_sizes(config), "sliding_window": window_of_all_layers(config)},
    rules=RULES,
)
QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    read_config=lambda config: {**_read_shared(config, kv_heads=32), **read_windows_by_layer(config), "qkv_bias": True},
    write_config=lambda config: {**write_sizes(config), **_write_windows(config)},
    rules=RULES,
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    read_config=_read_qwen3,
    write_config=lambda config: {**write_sizes(config), **_write_windows(config), "attention_bias": config.qkv_bias},
    rules=RULES,
)


_EXPERT = "layers.{layer}.feedforward.experts.{expert}"
_MIXTRAL = "model.layers.{layer}.block_sparse_moe"
_QWEN = "model.layers.{layer}.mlp"


def _read_mixtral(config: ForeignConfig) -> dict[str, Any]:
    return {
        **_read_shared(config, 1_000_000.0, kv_heads=8),
        **read_window(config, None),
        "norm_epsilon": config.number("rms_norm_eps", 1e-5),
        "experts": config.integer("num_local_experts", 8, low=2),
        "experts_per_token": config.integer("num_experts_per_tok", 2),
        "normalise_top_k": True,
    }


def _read_qwen3_moe(config: ForeignConfig) -> dict[str, Any]:
    config.require("decoder_sparse_step", 1)  # every layer is a mixture of experts
    config.require("mlp_only_layers", None, [])
    experts = config.integer("num_experts", config.integer("num_local_experts", 128, low=2), low=2)
    config.require("num_local_experts", experts)  # name of num_experts in files of transformers 5
    bias = config.flag("attention_bias", False)
    return {
        **_read_shared(config, kv_heads=4),
        **read_optional_window(config),
        "ffn_width": config.integer("moe_intermediate_size", 768),
        "qk_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "experts": experts,
        "experts_per_token": config.integer("num_experts_per_tok", 8),
        "normalise_top_k": config.flag("norm_topk_prob", False),
    }


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_sizes(config),
        "attention_bias": config.qkv_bias,
        "use_sliding_window": config.local_window is not None,
        "sliding_window": window_of_all_layers(config),
        "moe_intermediate_size": config.ffn_width,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalise_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    read_config=_read_mixtral,
    write_config=lambda config: {
        **write_sizes(config),
        "sliding_window": window_of_all_layers(config),
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
    },
    rules=(
        *ATTENTION_RULES,
        PRE_NORM_RULE,
        Rule(f"{_MIXTRAL}.gate", "layers.{layer}.feedforward.router"),
        Rule(f"{_MIXTRAL}.experts.{{expert}}.w1", f"{_EXPERT}.gate_proj"),
        Rule(f"{_MIXTRAL}.experts.{{expert}}.w3", f"{_EXPERT}.up_proj"),
        Rule(f"{_MIXTRAL}.experts.{{expert}}.w2", f"{_EXPERT}.down_proj"),
    ),
    stacked=True,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read_config=_read_qwen3_moe,
    write_config=_write_qwen3_moe,
    rules=(
        *ATTENTION_RULES,
        PRE_NORM_RULE,
        Rule(f"{_QWEN}.gate", "layers.{layer}.feedforward.router"),
        *(
            Rule(f"{_QWEN}.experts.{{expert}}.{name}", f"{_EXPERT}.{name}")
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
    ),
    stacked=True,
)
