"""Reading GGUF files that the package gguf wrote: models as in transformers, tensors as in gguf."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.formats.gguf_files import CASES, peer_metadata, peer_tensors, save_peer, write_file
from tests.formats.peers import CONTEXT, ids, load, make_peer
from tests.formats.refusals import assert_refused
from tinylm.config.run import SpecialTokens
from tinylm.formats.gguf_model import read_gguf

TOLERANCE = 1e-4  # of logits whose standard deviation is about 1 to 10


@functools.cache
def parts(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata and the tensors of a case."""
    peer = make_peer(case)
    return peer_metadata(case, peer), dict(peer_tensors(CASES[case], peer))


def write(folder: Path, changes: Mapping[str, Any] | None = None, case: str = "llama") -> Path:
    """Write a case with other metadata and tensors; `...` removes a key of the metadata."""
    metadata, tensors = ({**values} for values in parts(case))
    for name, value in (changes or {}).items():
        (tensors if isinstance(value, torch.Tensor | tuple) else metadata)[name] = value
    architecture = metadata.pop("general.architecture", CASES[case])
    kept = {name: value for name, value in metadata.items() if value is not ...}
    write_file(folder / "model.gguf", architecture, kept, tensors)
    return folder / "model.gguf"


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    peer = save_peer(case, tmp_path / "model.gguf")
    tokens = ids(CONTEXT)
    decoder = load(read_gguf(tmp_path / "model.gguf"))
    expected = peer(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(decoder.logits(decoder(tokens).hidden), expected, atol=TOLERANCE, rtol=0)


def test_special_tokens_the_chat_template_and_llama_3_scaling_are_read(tmp_path: Path) -> None:
    model = read_gguf(write(tmp_path))
    assert model.special == SpecialTokens(
        end_of_text="<|end|>", bos="<|begin|>", eos=("<|end|>",), pad="<|pad|>", add_bos=False
    )
    assert model.chat_template == "{{ messages[0].content }}"
    save_peer("llama 3 scaling", tmp_path / "model.gguf")
    scaling = read_gguf(tmp_path / "model.gguf").config.rope_scaling
    assert scaling is not None
    found = dataclasses.astuple(scaling)[:5]
    assert found == ("llama3", pytest.approx(8.0), 32, pytest.approx(1.0), pytest.approx(4.0, abs=1e-3))


def test_quantized_tensors_become_the_numbers_of_gguf(tmp_path: Path) -> None:
    """gguf does not quantize to K types, so that their blocks are random bytes with finite scales."""
    matrix = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).numpy()
    wide = {"llama.feed_forward_length": 256}
    for layer in range(3):
        wide |= {f"blk.{layer}.ffn_{name}.weight": torch.zeros(256, 32) for name in ("gate", "up")}
        wide[f"blk.{layer}.ffn_down.weight"] = torch.zeros(32, 256)
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"):
        number = gguf.GGMLQuantizationType[kind]
        quantized = random_blocks(kind) if kind.endswith("K") else gguf.quants.quantize(matrix, number)
        path = write(tmp_path, {**wide, "blk.1.ffn_down.weight": (quantized, kind)})
        found = read_gguf(path).tensors["layers.1.feedforward.down_proj.weight"]
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found.numpy(), gguf.quants.dequantize(quantized, number), err_msg=kind)
    number = gguf.GGMLQuantizationType.Q8_0
    quantized = gguf.quants.quantize(matrix[:, :32], number)
    query = read_gguf(write(tmp_path, {"blk.0.attn_q.weight": (quantized, "Q8_0")})).tensors
    order = [h * 8 + half * 4 + i for h in range(4) for i in range(4) for half in range(2)]
    expected = gguf.quants.dequantize(quantized, number)
    np.testing.assert_array_equal(query["layers.0.attention.q_proj.weight"].numpy()[order], expected)


def random_blocks(kind: str) -> np.ndarray:
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (32, size), dtype=np.uint8)
    scales = rng.normal(size=(32, 2)).astype(np.float16)
    if kind == "Q6_K":
        blocks[:, -2:] = scales[:, :1].view(np.uint8)
    else:
        blocks[:, :4] = scales.view(np.uint8)
    return blocks


def test_tensors_of_floats_keep_their_dtype_and_changing_one_does_not_change_the_file(tmp_path: Path) -> None:
    _, tensors = parts("llama")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        path = write(tmp_path, {name: t.to(dtype) for name, t in tensors.items() if t.dim() > 1})
        before = path.read_bytes()
        model, name = read_gguf(path), "layers.1.feedforward.up_proj.weight"
        assert model.tensors[name].dtype == dtype
        assert torch.equal(model.tensors[name], tensors["blk.1.ffn_up.weight"].to(dtype))
        assert model.tensors[name].data_ptr() == model.tensors[name].data_ptr()
        model.tensors[name].zero_()
        assert path.read_bytes() == before


ROPE_FREQS = r"model\.gguf as GGUF: its tensor rope_freqs.weight has other RoPE divisors"
ODD_HEADS = dict.fromkeys(
    ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count"), 5
)
# Changed keys of the metadata and changed tensors, of a Llama unless a row ends with another case.
REFUSED: tuple[tuple[Any, ...], ...] = (
    ({"llama.attn_logit_softcapping": 50.0}, r"llama.attn_logit_softcapping = 50.0; tinylm supports 0.0"),
    ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping"),
    ({"llama.rope.scaling.type": "longrope"}, r"llama.rope.scaling.type is 'longrope'"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor"),
    ({"llama.rope.dimension_count": 4}, r"llama.rope.dimension_count = 4; tinylm supports 8"),
    ({"llama.attention.value_length": 16}, "llama.attention.value_length"),
    ({"llama.attention.causal": False}, "llama.attention.causal"),
    ({"llama.attention.scale": 0.5}, "llama.attention.scale"),
    ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
    ({"llama.new_kind_of_layer": 1}, "the key 'llama.new_kind_of_layer', which tinylm does not know"),
    ({"llama.feed_forward_length": [48, 40]}, "feed_forward_length differs from layer to layer"),
    ({"llama.context_length": float("nan")}, r"llama.context_length = nan; it must be an integer"),
    ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "it must be a finite number"),
    ({"llama.block_count": 4}, "lacks the tensor model.layers.3"),
    ({"llama.block_count": 1}, "has the tensor 'blk.1."),
    ({"llama.block_count": 4_000_000_000}, "block_count"),
    ({"llama.expert_count": 1 << 31, "llama.expert_used_count": 2}, "experts"),
    ({"llama.attention.head_count": 3}, "3 heads cannot share"),
    ({"llama.attention.head_count": 64, "llama.attention.key_length": 8}, "head_count is 64"),
    ({"llama.attention.head_count": 0}, "head_count = 0"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0}, "factor of the RoPE scaling"),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -2.0}, "factor is -2.0"),
    ({"llama.rope.freq_base": 0.0}, "rope_theta is 0.0"),
    ({"llama.context_length": (1 << 32) - 1}, "max_position_embeddings of its metadata is 4294967295"),
    ({"llama.embedding_length": 1 << 31}, "hidden_size of its metadata"),
    ({"general.type": "adapter"}, "general.type = 'adapter'"),
    ({"general.alignment": 12}, "general.alignment"),
    ({"split.count": 3}, "a part of a model"),
    ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre is 'unheard-of'; tinylm knows codeshell"),
    ({"tokenizer.ggml.model": "t5"}, "of the kind 't5'"),
    ({"tokenizer.ggml.suppress_tokens": [3]}, "tokenizer.ggml.suppress_tokens"),
    ({"tokenizer.ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token"),
    ({"tokenizer.ggml.eos_token_id": 300}, "tokenizer.ggml.eos_token_id = 300"),
    ({"general.architecture": "mamba"}, "architecture is 'mamba'; tinylm reads gemma, gemma3, gpt2"),
    (
        {"output.weight": (np.zeros((300, 84), np.uint8), "Q2_K")},
        "tensor 'output.weight' has the type Q2_K; tinylm reads",
    ),
    ({"blk.0.sinks.weight": torch.zeros(4)}, "tensor 'blk.0.sinks.weight', which its architecture does not"),
    *(
        ({"rope_freqs.weight": torch.tensor(divisors)}, ROPE_FREQS)
        for divisors in ([1.0, 3.0, 2.0, 7.0], [1.0, 0.5, 0.5, 0.5], [1.0, 3e38, 3e38, 3e38], [1.0, 0.0, 1.0, 1.0])
    ),
    ({"rope_freqs.weight": torch.tensor([1.0, 3.0]), **ODD_HEADS}, "rope_freqs.weight does not have"),
    (
        {"gptneox.rope.dimension_count": ..., "gptneox.attention.head_count": 64, "gptneox.attention.key_length": 0},
        r"gptneox\.attention\.head_count is 64",
        "gpt_neox",
    ),
    (
        {"gemma3.attention.sliding_window_pattern": [float("nan")] * 7},
        "sliding_window_pattern does not have a boolean for each of 7 layers",
        "gemma3_text as published",
    ),
)


def test_a_factor_without_a_type_scales_rope_linearly_as_in_llama_cpp(tmp_path: Path) -> None:
    for changes, factor in (
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.factor": 1.0}, None),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"}, None),
        ({}, None),
    ):
        scaling = read_gguf(write(tmp_path, changes)).config.rope_scaling
        assert (None if scaling is None else (scaling.kind, scaling.factor)) == (factor and ("linear", factor))


def test_metadata_tensors_and_special_files_that_would_change_the_model_are_errors(tmp_path: Path) -> None:
    rows = [((changes, *case), message) for changes, message, *case in REFUSED]
    assert_refused(rows, lambda row: read_gguf(write(tmp_path, *row)))
    (tmp_path / "link.gguf").symlink_to("fifo.gguf")
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    names = ("link.gguf", "loop.gguf", "fifo.gguf", "empty.gguf", "missing.gguf", ".")
    assert_refused([(name, "Cannot read") for name in names], lambda name: read_gguf(tmp_path / name))


def test_keys_without_effect_are_accepted_and_a_sliding_window_of_llama_is_that_of_mistral(tmp_path: Path) -> None:
    extra = {
        "llama.vocab_size": 300,
        "llama.expert_count": 0,
        "llama.pooling_type": 0,
        "llama.logit_scale": 1.0,
        "general.name": "x",
        "general.license": "mit",
        "quantize.imatrix.file": "y",
        "llama.attention.causal": True,
        "tokenizer.ggml.fim_pre_token_id": 3,
    }
    assert read_gguf(write(tmp_path, extra)).config == read_gguf(write(tmp_path)).config
    model = read_gguf(write(tmp_path, {"llama.attention.sliding_window": 7}))
    assert (model.family, model.config.local_window, model.config.local_layers) == ("mistral", 7, (0, 1, 2))
