"""The tensors of transformers' models with the names and the layout of llama.cpp's GGUF files.

An independent reference: names come from the package gguf, and rows are reordered index by index, without tinylm.
"""

from collections.abc import Iterator
from typing import Any

import gguf
import torch
from torch import Tensor


def peer_tensors(architecture: str, peer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the GGUF names and tensors of a model of transformers. architecture: its name in GGUF."""
    kind = peer.config.model_type
    table = gguf.get_tensor_name_map(_architecture(architecture), peer.config.num_hidden_layers)
    heads = peer.config.num_attention_heads
    kv_heads = getattr(peer.config, "num_key_value_heads", heads)
    tied = peer.config.tie_word_embeddings
    for name, tensor in peer.state_dict().items():
        if (tied and name in ("lm_head.weight", "embed_out.weight")) or name.endswith((".masked_bias", ".attn.bias")):
            continue
        for full_name, part in _separate_experts(name, tensor):
            base, _, suffix = full_name.rpartition(".")
            gguf_name = table.get_name(base)
            assert gguf_name is not None, full_name
            yield f"{gguf_name}.{suffix}", _convert(kind, full_name, part, heads, kv_heads)
    rope = getattr(peer.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope["rope_theta"], peer.model.rotary_emb.inv_freq)


def _architecture(name: str) -> Any:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _separate_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split the gate and up projections of all experts, one tensor in transformers 5; append `.weight` to names."""
    if name.endswith("experts.gate_up_proj"):
        half = tensor.shape[1] // 2
        yield name.replace("gate_up_proj", "gate_proj.weight"), tensor[:, :half]
        yield name.replace("gate_up_proj", "up_proj.weight"), tensor[:, half:]
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def _convert(kind: str, name: str, tensor: Tensor, heads: int, kv_heads: int) -> Tensor:
    if kind in ("llama", "mistral", "mixtral") and "q_proj" in name:
        return tensor[_interleaved_rows(len(tensor), heads)]
    if kind in ("llama", "mistral", "mixtral") and "k_proj" in name:
        return tensor[_interleaved_rows(len(tensor), kv_heads)]
    if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T
    if kind == "gpt_neox" and "query_key_value" in name:
        size = len(tensor) // heads // 3
        order = [head * 3 * size + part * size + i for part in range(3) for head in range(heads) for i in range(size)]
        return tensor[order]
    if kind.startswith("gemma") and "norm" in name:
        return tensor + 1
    return tensor


def _interleaved_rows(rows: int, heads: int) -> list[int]:
    """The order of rows in which the two features of each RoPE rotation are adjacent."""
    size = rows // heads
    return [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in range(2)]


def _llama3_factors(theta: float, scaled: Tensor) -> Tensor:
    """The unscaled RoPE frequencies divided by the scaled ones of transformers."""
    plain = theta ** -(torch.arange(len(scaled), dtype=torch.float64) / len(scaled))
    return (plain / scaled.double()).float()
