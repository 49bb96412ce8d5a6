"""GPT-NeoX (Pythia): LayerNorm, biases, partial RoPE and parallel residuals (Black et al. 2022)."""

from typing import Any

from tinylm.config.model import ModelConfig
from tinylm.formats.families.fields import UNGATED, UNGATED_NAMES, read_head_dim, read_partial_rope, write_rope
from tinylm.formats.family import Family, Rule
from tinylm.formats.foreign_config import ForeignConfig

_LAYER, _OURS = "gpt_neox.layers.{layer}", "layers.{layer}"
RULES = (
    Rule("gpt_neox.embed_in", "embedding"),
    Rule(f"{_LAYER}.input_layernorm", f"{_OURS}.attention_norm"),
    Rule(
        f"{_LAYER}.attention.query_key_value", *(f"{_OURS}.attention.{name}_proj" for name in "qkv"), interleaved=True
    ),
    Rule(f"{_LAYER}.attention.dense", f"{_OURS}.attention.o_proj"),
    Rule(f"{_LAYER}.post_attention_layernorm", f"{_OURS}.feedforward_norm"),
    Rule(f"{_LAYER}.mlp.dense_h_to_4h", f"{_OURS}.feedforward.up_proj"),
    Rule(f"{_LAYER}.mlp.dense_4h_to_h", f"{_OURS}.feedforward.down_proj"),
    Rule("gpt_neox.final_layer_norm", "norm"),
    Rule("embed_out", "output"),
)


def _read(config: ForeignConfig) -> dict[str, Any]:
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


def _write(config: ModelConfig) -> dict[str, Any]:
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
    read_config=_read,
    write_config=_write,
    rules=RULES,
    prefix="gpt_neox.",
    renamed={"embed_out": "lm_head"},
    without_effect=frozenset({"rope_theta"}),  # GPT-NeoX has rotary_emb_base instead
    unused_tensors=(r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)",),
)
