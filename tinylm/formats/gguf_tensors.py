"""The names and layouts of the tensors in GGUF files, and their correspondence to those of Hugging Face models.

Shape letters: see `tinylm.transformer`.
"""

from collections.abc import Callable, Iterable
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


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # (H, W/2, 2, D) -> (H, 2, W/2, D)


def _permute(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)  # (H, 2, W/2, D) -> (H, W/2, 2, D)


def _interleave(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)  # (3, H, W, D) -> (H, 3, W, D)


def _separate(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)  # (H, 3, W, D) -> (3, H, W, D)


SAME = Change(lambda tensor, _: tensor, lambda tensor, _: tensor)
TRANSPOSED = Change(lambda tensor, _: tensor.T, lambda tensor, _: tensor.T, transposes=True)
UNIT_OFFSET = Change(lambda tensor, _: tensor - 1, lambda tensor, _: tensor.float() + 1)
# In Llama files, RoPE rotates pairs of adjacent features; in Hugging Face's models, feature i and feature i + W/2.
QUERY = Change(_unpermute, _permute, "num_attention_heads")
KEY = Change(_unpermute, _permute, "num_key_value_heads")
INTERLEAVED = Change(_interleave, _separate, "num_attention_heads", fused=True)


class TensorRule(NamedTuple):
    """A tensor's names in GGUF files (stored) and Hugging Face models (foreign), and the conversion.

    The names may contain {layer}, and the foreign name {expert}: the stored tensor then holds the tensors of all
    experts, (E, rows, columns).
    """

    stored: str
    foreign: str
    change: Change = SAME


class TensorPlace(NamedTuple):
    """A tensor of Hugging Face's model, and its place in a GGUF file.

    stored, foreign, change: as in TensorRule, without placeholders.
    expert: index in a tensor of all experts; `None` for other tensors.
    """

    stored: str
    foreign: str
    change: Change
    expert: int | None


_Line = tuple[str, str] | tuple[str, str, Change]


def _rules(*lines: _Line, kinds: Iterable[str] = ("weight",)) -> list[TensorRule]:
    rules = [TensorRule(*line) for line in lines]
    return [
        TensorRule(f"{stored}.{kind}", f"{foreign}.{kind}", change)
        for stored, foreign, change in rules
        for kind in kinds
    ]


_STORED_LAYER = "blk.{layer}."
_FOREIGN_LAYER = "model.layers.{layer}."


def _layer_rules(*lines: _Line, biases: bool = False) -> list[TensorRule]:
    rules = (TensorRule(*line) for line in lines)
    named = [(_STORED_LAYER + rule.stored, _FOREIGN_LAYER + rule.foreign, rule.change) for rule in rules]
    return _rules(*named, kinds=("weight", "bias") if biases else ("weight",))


def _outside_of_layers(norm: Change = SAME) -> list[TensorRule]:
    return _rules(
        ("token_embd", "model.embed_tokens"), ("output_norm", "model.norm", norm), ("output", "lm_head")
    )  # fmt: skip


def _attention(query: Change = SAME, key: Change = SAME) -> list[TensorRule]:
    return _layer_rules(
        ("attn_q", "self_attn.q_proj", query),
        ("attn_k", "self_attn.k_proj", key),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        biases=True,
    )


_DENSE = _layer_rules(
    ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj"), biases=True
)
_NORMS = _layer_rules(("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))
_QK_NORMS = _layer_rules(("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm"))
_MIXTRAL = _layer_rules(
    ("ffn_gate_inp", "block_sparse_moe.gate"),
    ("ffn_gate_exps", "block_sparse_moe.experts.{expert}.w1"),
    ("ffn_down_exps", "block_sparse_moe.experts.{expert}.w2"),
    ("ffn_up_exps", "block_sparse_moe.experts.{expert}.w3"),
)
_QWEN_EXPERTS = _layer_rules(
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.{expert}.gate_proj"),
    ("ffn_down_exps", "mlp.experts.{expert}.down_proj"),
    ("ffn_up_exps", "mlp.experts.{expert}.up_proj"),
)
_GEMMA_NORMS = _layer_rules(
    ("attn_norm", "input_layernorm", UNIT_OFFSET), ("ffn_norm", "post_attention_layernorm", UNIT_OFFSET)
)
_GEMMA3_NORMS = _layer_rules(
    ("attn_norm", "input_layernorm", UNIT_OFFSET),
    ("post_attention_norm", "post_attention_layernorm", UNIT_OFFSET),
    ("ffn_norm", "pre_feedforward_layernorm", UNIT_OFFSET),
    ("post_ffw_norm", "post_feedforward_layernorm", UNIT_OFFSET),
    ("attn_q_norm", "self_attn.q_norm", UNIT_OFFSET),
    ("attn_k_norm", "self_attn.k_norm", UNIT_OFFSET),
)
_BOTH = ("weight", "bias")
_GPT2 = [
    *_rules(("token_embd", "transformer.wte"), ("position_embd", "transformer.wpe"), ("output", "lm_head")),
    *_rules(
        ("output_norm", "transformer.ln_f"),
        ("blk.{layer}.attn_norm", "transformer.h.{layer}.ln_1"),
        ("blk.{layer}.ffn_norm", "transformer.h.{layer}.ln_2"),
        kinds=_BOTH,
    ),
    *_rules(
        ("blk.{layer}.attn_qkv", "transformer.h.{layer}.attn.c_attn", TRANSPOSED),
        ("blk.{layer}.attn_output", "transformer.h.{layer}.attn.c_proj", TRANSPOSED),
        ("blk.{layer}.ffn_up", "transformer.h.{layer}.mlp.c_fc", TRANSPOSED),
        ("blk.{layer}.ffn_down", "transformer.h.{layer}.mlp.c_proj", TRANSPOSED),
    ),
    *_rules(
        ("blk.{layer}.attn_qkv", "transformer.h.{layer}.attn.c_attn"),
        ("blk.{layer}.attn_output", "transformer.h.{layer}.attn.c_proj"),
        ("blk.{layer}.ffn_up", "transformer.h.{layer}.mlp.c_fc"),
        ("blk.{layer}.ffn_down", "transformer.h.{layer}.mlp.c_proj"),
        kinds=("bias",),
    ),
]
_GPTNEOX = [
    *_rules(("token_embd", "gpt_neox.embed_in"), ("output", "embed_out")),
    *_rules(
        ("output_norm", "gpt_neox.final_layer_norm"),
        ("blk.{layer}.attn_norm", "gpt_neox.layers.{layer}.input_layernorm"),
        ("blk.{layer}.ffn_norm", "gpt_neox.layers.{layer}.post_attention_layernorm"),
        ("blk.{layer}.attn_qkv", "gpt_neox.layers.{layer}.attention.query_key_value", INTERLEAVED),
        ("blk.{layer}.attn_output", "gpt_neox.layers.{layer}.attention.dense"),
        ("blk.{layer}.ffn_up", "gpt_neox.layers.{layer}.mlp.dense_h_to_4h"),
        ("blk.{layer}.ffn_down", "gpt_neox.layers.{layer}.mlp.dense_4h_to_h"),
        kinds=_BOTH,
    ),
]

# By GGUF architecture (general.architecture).
TENSOR_RULES: dict[str, tuple[TensorRule, ...]] = {
    "llama": (*_outside_of_layers(), *_NORMS, *_attention(QUERY, KEY), *_DENSE, *_MIXTRAL),
    "qwen2": (*_outside_of_layers(), *_NORMS, *_attention(), *_DENSE),
    "qwen3": (*_outside_of_layers(), *_NORMS, *_attention(), *_QK_NORMS, *_DENSE),
    "qwen3moe": (*_outside_of_layers(), *_NORMS, *_attention(), *_QK_NORMS, *_QWEN_EXPERTS),
    "gpt2": tuple(_GPT2),
    "gptneox": tuple(_GPTNEOX),
    "gemma": (*_outside_of_layers(UNIT_OFFSET), *_GEMMA_NORMS, *_attention(), *_DENSE),
    "gemma3": (*_outside_of_layers(UNIT_OFFSET), *_GEMMA3_NORMS, *_attention(), *_DENSE),
}
