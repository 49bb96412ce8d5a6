"""GPT-2 and GPT-NeoX: LayerNorm, biases, and fused query, key and value matrices.

GPT-2 has learned positions and linear layers stored as (in, out) (Radford et al. 2019), GPT-NeoX (Pythia) partial RoPE
and parallel residuals (Black et al. 2022).
"""

from typing import Any

from tinylm.config.model import ModelConfig
from tinylm.formats.families.fields import UNGATED, UNGATED_NAMES, read_head_dim, read_partial_rope, write_rope
from tinylm.formats.family import Family, Rule
from tinylm.formats.foreign_config import ForeignConfig

_GPT2, _OURS = "transformer.h.{layer}", "layers.{layer}"
_GPT2_RULES = (
    Rule("transformer.wte", "embedding"),
    Rule("transformer.wpe", "position"),
    Rule(f"{_GPT2}.ln_1", f"{_OURS}.attention_norm"),
    Rule(f"{_GPT2}.attn.c_attn", *(f"{_OURS}.attention.{name}_proj" for name in "qkv"), transposed=True),
    Rule(f"{_GPT2}.attn.c_proj", f"{_OURS}.attention.o_proj", transposed=True),
    Rule(f"{_GPT2}.ln_2", f"{_OURS}.feedforward_norm"),
    Rule(f"{_GPT2}.mlp.c_fc", f"{_OURS}.feedforward.up_proj", transposed=True),
    Rule(f"{_GPT2}.mlp.c_proj", f"{_OURS}.feedforward.down_proj", transposed=True),
    Rule("transformer.ln_f", "norm"),
    Rule("lm_head", "output"),
)


def _read_gpt2(config: ForeignConfig) -> dict[str, Any]:
    config.require("scale_attn_by_inverse_layer_idx", False)
    config.mark_read("reorder_and_upcast_attn")  # rounding only: order of operations, dtype of the scores
    heads, width = config.integer("n_head"), config.integer("n_embd")
    if width % heads:
        raise ValueError(f"n_embd of its {config.file} is {width}; it must be a multiple of n_head ({heads})")
    context = config.integer("n_positions")
    config.require("n_ctx", context)  # in older files
    return {
        "vocab_size": config.integer("vocab_size"),
        "context": context,
        "layers": config.layers("n_layer"),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": width // heads,
        "width": width,
        "ffn_width": config.integer("n_inner", 4 * width),
        "position": "learned",
        "norm": "layernorm",
        "norm_bias": True,
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "qk_norm": False,
        "bias": True,
        "activation": config.choice("activation_function", UNGATED, "gelu_new"),
        "tie": config.flag("tie_word_embeddings", True),
        "initialisation": "gpt2",
        "attention_scale": config.flag("scale_attn_weights", True),
    }


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "n_inner": config.ffn_width,
        "layer_norm_epsilon": config.norm_epsilon,
        "activation_function": UNGATED_NAMES.get(config.activation, "gelu_new"),
        "scale_attn_weights": config.attention_multiplier != 1.0,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": config.tie,
    }


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    read_config=_read_gpt2,
    write_config=_write_gpt2,
    rules=_GPT2_RULES,
    prefix="transformer.",
    without_effect=frozenset(
        {
            # Settings of output heads that GPT2LMHeadModel does not have, and fields of the first files.
            *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
            *("summary_use_proj", "n_special", "predict_special_tokens", "output_past"),
        }
    ),
    unused_tensors=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),  # the causal mask and its fill value
)


_NEOX = "gpt_neox.layers.{layer}"
_GPT_NEOX_RULES = (
    Rule("gpt_neox.embed_in", "embedding"),
    Rule(f"{_NEOX}.input_layernorm", f"{_OURS}.attention_norm"),
    Rule(f"{_NEOX}.attention.query_key_value", *(f"{_OURS}.attention.{name}_proj" for name in "qkv"), interleaved=True),
    Rule(f"{_NEOX}.attention.dense", f"{_OURS}.attention.o_proj"),
    Rule(f"{_NEOX}.post_attention_layernorm", f"{_OURS}.feedforward_norm"),
    Rule(f"{_NEOX}.mlp.dense_h_to_4h", f"{_OURS}.feedforward.up_proj"),
    Rule(f"{_NEOX}.mlp.dense_4h_to_h", f"{_OURS}.feedforward.down_proj"),
    Rule("gpt_neox.final_layer_norm", "norm"),
    Rule("embed_out", "output"),
)


def _read_gpt_neox(config: ForeignConfig) -> dict[str, Any]:
    heads, width = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = read_head_dim(config, width, heads)
    if head_dim * heads != width:
        raise ValueError(f"head_dim of its {config.file} must be hidden_size divided by num_attention_heads")
    bias = config.flag("attention_bias", True)
    return {
        "vocab_size": config.integer("vocab_size"),
        "context": config.integer("max_position_embeddings"),
        "layers": config.layers(),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim,
        "width": width,
        "ffn_width": config.integer("intermediate_size"),
        **read_partial_rope(config, head_dim, "rotary_emb_base", "rotary_pct"),
        "norm": "layernorm",
        "norm_bias": True,
        "norm_epsilon": config.number("layer_norm_eps", 1e-5),
        "qk_norm": False,
        "qkv_bias": bias,
        "output_bias": bias,
        "ffn_bias": True,
        "activation": config.choice("hidden_act", UNGATED, "gelu"),
        "tie": config.flag("tie_word_embeddings", False),
        "parallel_residual": config.flag("use_parallel_residual", True),
    }


def _write_gpt_neox(config: ModelConfig) -> dict[str, Any]:
    share = 1.0 if config.rotary_dim is None else config.rotary_dim / config.head_dim
    rope = write_rope(config)
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "layer_norm_eps": config.norm_epsilon,
        "hidden_act": UNGATED_NAMES.get(config.activation, "gelu"),
        "attention_bias": config.qkv_bias,
        "use_parallel_residual": config.parallel_residual,
        "tie_word_embeddings": config.tie,
        "rotary_emb_base": config.rope_theta,
        "rotary_pct": share,
        **rope,
        "rope_parameters": {**rope["rope_parameters"], "partial_rotary_factor": share},
    }


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    read_config=_read_gpt_neox,
    write_config=_write_gpt_neox,
    rules=_GPT_NEOX_RULES,
    prefix="gpt_neox.",
    renamed={"embed_out": "lm_head"},
    without_effect=frozenset({"rope_theta"}),  # GPT-NeoX has rotary_emb_base instead
    unused_tensors=(r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)",),
)
