"""The tensors in GGUF files, read, and how their names and layouts correspond to those of Hugging Face models.

Shape letters: see `tinylm.transformer`.
"""

import mmap
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinylm.formats.gguf_file import TensorInfo
from tinylm.run_directory.tensor_file import DTYPES
from tinylm.text.tokenizer_file import short_repr

CHUNK = 1 << 22  # numbers that are dequantized or quantized at a time


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
# A bias stays as it is.
TRANSPOSED = Change(lambda tensor, _: tensor.t(), lambda tensor, _: tensor.t(), transposes=True)
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
    """The names of a module or a tensor in GGUF files (stored) and Hugging Face models (foreign), and its conversion.

    The names of modules may contain {layer}, and the foreign name {expert}: the stored tensor then holds the tensors of
    all experts, (E, rows, columns). expert: the index of a tensor in such a one.
    """

    stored: str
    foreign: str
    change: Change
    expert: int | None = None


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


class GGUFTensor:
    """A LazyTensor in a mapped file, with Hugging Face's layout.

    heads: argument of `change`; 0 if it needs none. expert: index in a tensor of all experts; `None` for other tensors.
    """

    def __init__(
        self, data: mmap.mmap | bytes, info: TensorInfo, change: Change, heads: int, expert: int | None
    ) -> None:
        self._data, self._info, self._change, self._heads, self._expert = data, info, change, heads, expert
        shape = info.shape if expert is None else info.shape[1:]
        self.shape = shape[::-1] if change.transposes else shape
        self.dtype = DTYPES.get(info.type.name, torch.float32)

    def check(self, experts: int) -> None:
        """Raise ValueError for a shape that `change` cannot convert, or that does not hold this number of experts."""
        name, shape = short_repr(self._info.name), self._info.shape
        if self._expert is not None and (len(shape) != 3 or shape[0] != experts):
            raise ValueError(f"its tensor {name} has the shape {list(shape)}; it must hold {experts} matrices")
        multiple = 3 * self._heads if self._change.fused else 2 * self._heads
        if self._heads and shape[0] % multiple:
            raise ValueError(f"its tensor {name} has {shape[0]} rows, which {self._heads} heads cannot share")

    def load(self) -> Tensor:
        """The tensor: a view of the mapped file if it is not quantized and its layout needs no copy."""
        return self._change.read(load_tensor(self._data, self._info, self._expert), self._heads)


def load_tensor(data: mmap.mmap | bytes, info: TensorInfo, index: int | None = None) -> Tensor:
    """A tensor in the layout of the file; with `index`, only that entry of its first dimension.

    Floating-point tensors are views of `data`; quantized tensors become float32.
    """
    shape, offset, size = info.shape, info.offset, info.size
    if index is not None:
        size //= shape[0]
        shape, offset = shape[1:], offset + index * size
    if info.type.name in DTYPES:
        dtype = DTYPES[info.type.name]
        return torch.frombuffer(data, dtype=dtype, count=size // dtype.itemsize, offset=offset).view(shape)
    row_size = shape[-1] // info.type.elements * info.type.size
    rows = np.frombuffer(data, dtype=np.uint8, count=size, offset=offset).reshape(-1, row_size)
    return _dequantize(rows, info).view(shape)


def _dequantize(rows: np.ndarray, info: TensorInfo) -> Tensor:
    """Dequantize rows (rows, bytes per row) to a float32 matrix (rows, numbers per row)."""
    import gguf  # takes a tenth of a second

    kind = gguf.GGMLQuantizationType[info.type.name]
    numbers = torch.empty(len(rows), info.shape[-1])
    step = max(1, CHUNK // info.shape[-1])
    with np.errstate(all="ignore"):  # a forged scale may be infinite; the weights are checked where they are used
        for start in range(0, len(rows), step):
            part = gguf.quants.dequantize(rows[start : start + step], kind)
            numbers[start : start + step] = torch.from_numpy(part)
    return numbers
