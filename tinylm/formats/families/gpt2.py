"""GPT-2: learned positions, LayerNorm, biases, and linear layers stored as (in, out) (Radford et al. 2019)."""

from typing import Any

from tinylm.config.model import ModelConfig
from tinylm.formats.families.fields import UNGATED, UNGATED_NAMES
from tinylm.formats.family import Family, Rule
from tinylm.formats.foreign_config import ForeignConfig

_LAYER, _OURS = "transformer.h.{layer}", "layers.{layer}"
RULES = (
    Rule("transformer.wte", "embedding"),
    Rule("transformer.wpe", "position"),
    Rule(f"{_LAYER}.ln_1", f"{_OURS}.attention_norm"),
    Rule(f"{_LAYER}.attn.c_attn", *(f"{_OURS}.attention.{name}_proj" for name in "qkv"), transposed=True),
    Rule(f"{_LAYER}.attn.c_proj", f"{_OURS}.attention.o_proj", transposed=True),
    Rule(f"{_LAYER}.ln_2", f"{_OURS}.feedforward_norm"),
    Rule(f"{_LAYER}.mlp.c_fc", f"{_OURS}.feedforward.up_proj", transposed=True),
    Rule(f"{_LAYER}.mlp.c_proj", f"{_OURS}.feedforward.down_proj", transposed=True),
    Rule("transformer.ln_f", "norm"),
    Rule("lm_head", "output"),
)


def _read(config: ForeignConfig) -> dict[str, Any]:
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


def _write(config: ModelConfig) -> dict[str, Any]:
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
    read_config=_read,
    write_config=_write,
    rules=RULES,
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
