"""The tensors of models of transformers as llama.cpp's converters write them into GGUF files, by the package gguf.

Nothing here is tinylm's: names come from gguf's table, arrangements are index by index.
"""

from collections.abc import Iterator
from typing import Any

import gguf
import torch
from torch import Tensor


def peer_tensors(architecture: str, peer: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model of transformers by GGUF's names, arranged as llama.cpp needs them."""
    kind = peer.config.model_type
    table = gguf.get_tensor_name_map(_architecture(architecture), peer.config.num_hidden_layers)
    heads = peer.config.num_attention_heads
    kv_heads = getattr(peer.config, "num_key_value_heads", heads)
    tied = peer.config.tie_word_embeddings
    for name, tensor in peer.state_dict().items():
        if (tied and name in ("lm_head.weight", "embed_out.weight")) or name.endswith((".masked_bias", ".attn.bias")):
            continue
        for whole, part in _separate_experts(name, tensor):
            base, _, suffix = whole.rpartition(".")
            stored = table.get_name(base)
            assert stored is not None, whole
            yield f"{stored}.{suffix}", _arrange(kind, whole, part, heads, kv_heads)
    rope = getattr(peer.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(rope["rope_theta"], peer.model.rotary_emb.inv_freq)


def _architecture(name: str) -> Any:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _separate_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """transformers 5 has the gate and up projections of all experts in one tensor."""
    if name.endswith("experts.gate_up_proj"):
        half = tensor.shape[1] // 2
        yield name.replace("gate_up_proj", "gate_proj.weight"), tensor[:, :half]
        yield name.replace("gate_up_proj", "up_proj.weight"), tensor[:, half:]
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def _arrange(kind: str, name: str, tensor: Tensor, heads: int, kv_heads: int) -> Tensor:
    if kind in ("llama", "mistral", "mixtral") and "q_proj" in name:
        return tensor[_neighbours(len(tensor), heads)]
    if kind in ("llama", "mistral", "mixtral") and "k_proj" in name:
        return tensor[_neighbours(len(tensor), kv_heads)]
    if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T
    if kind == "gpt_neox" and "query_key_value" in name:
        size = len(tensor) // heads // 3
        order = [head * 3 * size + part * size + i for part in range(3) for head in range(heads) for i in range(size)]
        return tensor[order]
    if kind.startswith("gemma") and "norm" in name:
        return tensor + 1
    return tensor


def _neighbours(rows: int, heads: int) -> list[int]:
    """Rows in the order in which the two features that RoPE rotates together are neighbours."""
    size = rows // heads
    return [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in range(2)]


def _llama3_divisors(theta: float, scaled: Tensor) -> Tensor:
    """The quotient of the frequencies without and with scaling, the latter from transformers."""
    plain = theta ** -(torch.arange(len(scaled), dtype=torch.float64) / len(scaled))
    return (plain / scaled.double()).float()
