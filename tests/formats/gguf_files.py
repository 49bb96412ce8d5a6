"""GGUF files for tests: models of transformers converted as llama.cpp's converters do it, by the package gguf.

Nothing here is tinylm's: names come from gguf's table, arrangements are index by index.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.formats.gguf_peers import peer_tensors
from tests.formats.peers import CONTEXT, VOCABULARY, make_peer

EOS, BOS, PAD = 256, 257, 258  # ids of special tokens, after the 256 bytes
LETTERS = bytes_to_unicode()  # the letter that stands for each byte
# Cases of peers.py that GGUF can represent, with the names of their architectures there.
CASES = {
    "llama": "llama",
    "llama tied, theta, epsilon": "llama",
    "llama 3 scaling": "llama",
    "llama linear scaling, multi-head, biases": "llama",
    "llama yarn scaling": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "gpt_neox sequential, full RoPE": "gptneox",
    "gemma": "gemma",
    "gemma3_text as published": "gemma3",
}


def save_peer(case: str, path: Path) -> Any:
    """Write the model of a case as a GGUF file, and return the model."""
    peer = make_peer(case)
    write_file(path, CASES[case], peer_metadata(case, peer), dict(peer_tensors(CASES[case], peer)))
    return peer


def peer_metadata(case: str, peer: Any) -> dict[str, Any]:
    """The metadata of a case, by keys without the architecture's prefix; that of the tokenizer with its own."""
    config, kind = peer.config, peer.config.model_type
    width = config.n_inner or 4 * config.n_embd if kind == "gpt2" else config.intermediate_size
    values: dict[str, Any] = {
        "context_length": CONTEXT,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": width,
        "attention.head_count": config.num_attention_heads,
    }
    if kind in ("gpt2", "gpt_neox"):
        values["attention.layer_norm_epsilon"] = 1e-5
    else:
        values["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
        values["attention.head_count_kv"] = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind == "gpt_neox":
        share = config.rope_parameters["partial_rotary_factor"]
        values["rope.dimension_count"] = int(share * config.hidden_size // config.num_attention_heads)
        values["use_parallel_residual"] = config.use_parallel_residual
    if kind != "gpt2":
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        values["rope.freq_base"] = float(rope["rope_theta"])
        if rope["rope_type"] in ("linear", "yarn"):
            values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        if rope["rope_type"] == "yarn":
            values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "mixtral":
        values |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if kind == "qwen3_moe":
        values |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    if kind == "gemma3_text":
        values["attention.sliding_window"] = config.sliding_window
    return {f"{CASES[case]}.{key}": value for key, value in values.items()} | tokenizer_metadata()


def tokenizer_metadata() -> dict[str, Any]:
    """A byte-level tokenizer of 256 bytes, 3 special tokens and 6 words, and padding up to VOCABULARY."""
    letters = list(LETTERS.values())
    words = ["he", "hel", "Ġt", "Ġth", "Ġthe", "lo"]
    tokens = [*letters, "<|end|>", "<|begin|>", "<|pad|>", *words]
    types = [1] * 256 + [3] * 3 + [1] * len(words)
    padding = VOCABULARY - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{i}]" for i in range(padding))],
        "tokenizer.ggml.token_type": [*types, *[5] * padding],
        "tokenizer.ggml.merges": ["h e", "he l", "Ġ t", "Ġt h", "Ġth e", "l o"],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def write_file(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor | tuple[np.ndarray, str]]
) -> None:
    """Write a GGUF file by the package gguf. A tensor is torch's, or the bytes of rows and the name of their type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_value(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=gguf.GGMLQuantizationType[tensor[1]])
        elif tensor.dtype == torch.bfloat16:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: Any, key: str, value: Any) -> None:
    """Add metadata of the type that llama.cpp's converters use."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
