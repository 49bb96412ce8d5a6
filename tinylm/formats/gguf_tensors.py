"""The names and layouts of the tensors in GGUF files, and their correspondence to those of Hugging Face models.

Shape letters: see `tinylm.transformer`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor


class Change(NamedTuple):
    """The conversion between the layouts of a tensor in a GGUF file and in Hugging Face's model.

    read, write: convert from and to the layout of the file, given the number of heads.
    heads: the config field with that number; empty if `read` and `write` do not use it.
    transposes: whether rows and columns are exchanged. fused: whether the tensor holds queries, keys and values.
    """

    read: Callable[[Tensor, int], Tensor]
    write: Callable[[Tensor, int], Tensor]
    heads: str = ""
    transposes: bool = False
    fused: bool = False


SAME = Change(lambda tensor, _: tensor, lambda tensor, _: tensor)
TRANSPOSED = Change(
    lambda tensor, _: tensor.t(), lambda tensor, _: tensor.t(), transposes=True
)  # a bias stays as it is
UNIT_OFFSET = Change(lambda tensor, _: tensor - 1, lambda tensor, _: tensor.float() + 1)
# In Llama files, RoPE rotates pairs of adjacent features; in Hugging Face's models, feature i and feature i + W/2.
QUERY = Change(
    lambda tensor, heads: _exchange(tensor, heads, -1, 2),  # (H, W/2, 2, D) -> (H, 2, W/2, D)
    lambda tensor, heads: _exchange(tensor, heads, 2, -1),
    "num_attention_heads",
)
KEY = QUERY._replace(heads="num_key_value_heads")
INTERLEAVED = Change(
    lambda tensor, heads: tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2),  # -> (H, 3, W, D)
    lambda tensor, heads: tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2),  # -> (3, H, W, D)
    "num_attention_heads",
    fused=True,
)


def _exchange(tensor: Tensor, heads: int, rows: int, columns: int) -> Tensor:
    return tensor.unflatten(0, (heads, rows, columns)).transpose(1, 2).flatten(0, 2)


class TensorRule(NamedTuple):
    """A module's names in GGUF files (stored) and Hugging Face models (foreign), and the conversion of its tensors.

    The names may contain {layer}, and the foreign name {expert}: the stored tensor then holds the tensors of all
    experts, (E, rows, columns).
    """

    stored: str
    foreign: str
    change: Change


class TensorPlace(NamedTuple):
    """A tensor of Hugging Face's model, and its place in a GGUF file.

    stored, foreign: the names of the tensor, without placeholders.
    expert: index in a tensor of all experts; `None` for other tensors.
    """

    stored: str
    foreign: str
    change: Change
    expert: int | None


def _rules(
    outside: Mapping[str, str],
    layer: Mapping[str, str],
    changes: Mapping[str, Change] | None = None,
    layers: str = "model.layers",
) -> tuple[TensorRule, ...]:
    """The rules for modules outside of the layers and in each layer, whose names in GGUF are the keys.

    changes: by the last part of the name in GGUF. layers: the name of the list of layers in Hugging Face's model.
    """
    in_layers = {f"blk.{{layer}}.{stored}": f"{layers}.{{layer}}.{foreign}" for stored, foreign in layer.items()}
    return tuple(
        TensorRule(stored, foreign, (changes or {}).get(stored.rpartition(".")[2], SAME))
        for stored, foreign in {**outside, **in_layers}.items()
    )


_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
}
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
}
_GEMMA3_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **_QK_NORMS,
}
_GEMMA_CHANGES = dict.fromkeys(("output_norm", *_NORMS, *_GEMMA3_NORMS), UNIT_OFFSET)

# By GGUF architecture (general.architecture).
TENSOR_RULES: dict[str, tuple[TensorRule, ...]] = {
    "llama": _rules(_OUTSIDE, _NORMS | _ATTENTION | _DENSE | _MIXTRAL, {"attn_q": QUERY, "attn_k": KEY}),
    "qwen2": _rules(_OUTSIDE, _NORMS | _ATTENTION | _DENSE),
    "qwen3": _rules(_OUTSIDE, _NORMS | _ATTENTION | _QK_NORMS | _DENSE),
    "qwen3moe": _rules(_OUTSIDE, _NORMS | _ATTENTION | _QK_NORMS | _QWEN_EXPERTS),
    "gpt2": _rules(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output": "lm_head",
            "output_norm": "transformer.ln_f",
        },
        {
            "attn_norm": "ln_1",
            "ffn_norm": "ln_2",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), TRANSPOSED),
        layers="transformer.h",
    ),
    "gptneox": _rules(
        {"token_embd": "gpt_neox.embed_in", "output": "embed_out", "output_norm": "gpt_neox.final_layer_norm"},
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        {"attn_qkv": INTERLEAVED},
        layers="gpt_neox.layers",
    ),
    "gemma": _rules(_OUTSIDE, _NORMS | _ATTENTION | _DENSE, _GEMMA_CHANGES),
    "gemma3": _rules(_OUTSIDE, _GEMMA3_NORMS | _ATTENTION | _DENSE, _GEMMA_CHANGES),
}
