"""Reading GGUF files that the package gguf wrote: models as in transformers, tensors as in gguf."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.formats.gguf_files import (
    CASES,
    CONTEXT,
    VOCABULARY,
    make_peer,
    peer_metadata,
    peer_tensors,
    save_peer,
    write_file,
)
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.gguf_reader import read_gguf
from tinylm.formats.imported import ForeignModel
from tinylm.model.build import build_empty_model
from tinylm.model.decoder import Decoder
from tinylm.run_config import SpecialTokens

TOLERANCE = 1e-4  # of logits whose standard deviation is about 1 to 10


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return save_peer(request.param, path), path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata and tensors of a small llama model, to be changed and written."""
    peer = make_peer("llama")
    return peer_metadata("llama", peer), dict(peer_tensors("llama", peer))


def load(model: ForeignModel) -> Decoder:
    decoder = build_empty_model(model.config)
    decoder.load_state_dict(dict(model.tensors), assign=True)
    assert isinstance(decoder, Decoder)
    return decoder.eval()


@torch.no_grad()
def test_logits_equal_those_of_transformers(saved: tuple[Any, Path]) -> None:
    peer, path = saved
    tokens = torch.randint(VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(5))
    decoder = load(read_gguf(path))
    expected = peer(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(decoder.logits(decoder(tokens).hidden), expected, atol=TOLERANCE, rtol=0)


def test_special_tokens_and_the_chat_template_are_read(llama: Any, tmp_path: Path) -> None:
    model = read_gguf(write(tmp_path, *llama))
    assert model.special == SpecialTokens(
        end_of_text="<|end|>", bos="<|begin|>", eos=("<|end|>",), pad="<|pad|>", add_bos=False
    )
    assert model.chat_template == "{{ messages[0].content }}"


# Types of tensors.


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_tensors_become_the_numbers_of_gguf(kind: str, tmp_path: Path) -> None:
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).numpy()
    quantized = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType[kind])
    check_numbers(tmp_path, quantized, kind)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_tensors_of_k_types_become_the_numbers_of_gguf(kind: str, tmp_path: Path) -> None:
    """gguf does not quantize to these types, so that the blocks are random bytes with finite scales."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (64, 2, size), dtype=np.uint8)
    scales = rng.normal(size=(64, 2, 2)).astype(np.float16)
    if kind == "Q6_K":
        blocks[..., -2:] = scales[..., :1].view(np.uint8)
    else:
        blocks[..., :4] = scales.view(np.uint8)
    check_numbers(tmp_path, blocks.reshape(64, 2 * size), kind)


def check_numbers(folder: Path, quantized: np.ndarray, kind: str) -> None:
    expected = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType[kind])
    rows, columns = expected.shape
    metadata, tensors = sized_llama(columns)
    tensors["blk.0.ffn_gate.weight"] = (quantized, kind)
    tensors["blk.0.attn_q.weight"] = (quantized, kind)
    path = folder / "model.gguf"
    write_file(path, "llama", {**metadata, "llama.feed_forward_length": rows, **heads(rows)}, tensors)
    model = read_gguf(path)
    found = model.tensors["layers.0.feedforward.gate_proj.weight"]
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), expected)
    order = [h * 16 + half * 8 + i for h in range(4) for i in range(8) for half in range(2)]
    np.testing.assert_array_equal(model.tensors["layers.0.attention.q_proj.weight"].numpy()[order], expected)


def heads(rows: int) -> dict[str, int]:
    return {
        "llama.attention.head_count": 4,
        "llama.attention.key_length": rows // 4,
        "llama.attention.value_length": 16,
    }


def sized_llama(width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a llama model of one layer with 64 rows in its matrices."""
    metadata = peer_metadata("llama", make_peer("llama"))
    metadata |= {"llama.embedding_length": width, "llama.block_count": 1, "llama.attention.head_count_kv": 4}
    shapes = {
        "token_embd": (VOCABULARY, width),
        "output": (VOCABULARY, width),
        "output_norm": (width,),
        "blk.0.attn_norm": (width,),
        "blk.0.ffn_norm": (width,),
        **dict.fromkeys(("blk.0.attn_k", "blk.0.attn_v", "blk.0.ffn_up"), (64, width)),
        **dict.fromkeys(("blk.0.attn_output", "blk.0.ffn_down"), (width, 64)),
    }
    return metadata, {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_floats_are_mapped_in_their_own_dtype(dtype: torch.dtype, llama: Any, tmp_path: Path) -> None:
    metadata, tensors = llama
    path = write(tmp_path, metadata, {name: t.to(dtype) if t.dim() > 1 else t for name, t in tensors.items()})
    model = read_gguf(path)
    name = "layers.1.feedforward.up_proj.weight"
    assert model.tensors[name].dtype == dtype
    assert torch.equal(model.tensors[name], tensors["blk.1.ffn_up.weight"].to(dtype))
    assert model.tensors[name].data_ptr() == model.tensors[name].data_ptr()


def test_changing_a_tensor_does_not_change_the_file(llama: Any, tmp_path: Path) -> None:
    path = write(tmp_path, *llama)
    before = path.read_bytes()
    read_gguf(path).tensors["layers.0.feedforward.up_proj.weight"].zero_()
    assert path.read_bytes() == before


def test_a_type_that_is_not_supported_is_an_error_with_the_tensor_and_the_type(llama: Any, tmp_path: Path) -> None:
    metadata, tensors = llama
    blocks = np.zeros((300, 84), dtype=np.uint8)
    path = write(tmp_path, metadata, {**tensors, "output.weight": (blocks, "Q2_K")})
    with pytest.raises(TinyLMError, match=r"tensor 'output.weight' has the type Q2_K; tinylm reads F32"):
        read_gguf(path)


def test_without_the_package_a_quantized_file_is_an_error_with_the_extra_and_others_are_read(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, tensors = sized_llama(32)
    quantized = gguf.quants.quantize(np.zeros((64, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    shapes = {"llama.feed_forward_length": 64, **heads(64)}
    tensors |= {"blk.0.ffn_gate.weight": (quantized, "Q8_0"), "blk.0.attn_q.weight": torch.zeros(64, 32)}
    write_file(tmp_path / "quantized.gguf", "llama", metadata | shapes, tensors)
    plain = write(tmp_path, *llama)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"install gguf .* in tinylm's extra gguf"):
        read_gguf(tmp_path / "quantized.gguf")
    assert len(read_gguf(plain).tensors) == len(llama[1])


# Metadata.


def write(folder: Path, metadata: dict[str, Any], tensors: dict[str, Any], architecture: str = "llama") -> Path:
    path = folder / "model.gguf"
    write_file(path, architecture, metadata, tensors)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
        ({"llama.block_count": 3}, "lacks the tensor model.layers.2"),
        ({"llama.block_count": 1}, "has the tensor 'blk.1."),
        ({"llama.block_count": 4_000_000_000}, "block_count"),
        ({"llama.expert_count": 1 << 31, "llama.expert_used_count": 2}, "experts"),
        ({"llama.attention.head_count": 3}, "3 heads cannot share"),
        ({"llama.attention.head_count": 64, "llama.attention.key_length": 8}, "head_count is 64"),
        ({"llama.attention.head_count_kv": 3}, "3 heads cannot share"),
        ({"llama.attention.head_count": 0}, "head_count = 0"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0},
            "factor of the RoPE scaling of its meta",
        ),
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
    ],
)
def test_metadata_that_would_change_the_model_is_an_error_with_the_key(
    changes: dict[str, Any], message: str, llama: Any, tmp_path: Path
) -> None:
    metadata, tensors = llama
    with pytest.raises(TinyLMError, match=message):
        read_gguf(write(tmp_path, metadata | changes, tensors))


def test_keys_without_effect_are_accepted(llama: Any, tmp_path: Path) -> None:
    metadata, tensors = llama
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
    model = read_gguf(write(tmp_path, metadata | extra, tensors))
    assert model.config == read_gguf(write(tmp_path, *llama)).config


def test_an_unknown_architecture_is_an_error_that_lists_the_known_ones(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(TinyLMError, match=r"architecture is 'mamba'; tinylm reads gemma, gemma3, gpt2"):
        read_gguf(write(tmp_path, *llama, architecture="mamba"))


def test_an_unknown_tensor_is_an_error_with_its_name(llama: Any, tmp_path: Path) -> None:
    metadata, tensors = llama
    with pytest.raises(TinyLMError, match=r"tensor 'blk.0.attn_sinks.weight', which its architecture does not have"):
        read_gguf(write(tmp_path, metadata, {**tensors, "blk.0.attn_sinks.weight": torch.zeros(4)}))


def test_rope_divisors_that_are_not_those_of_llama_3_are_an_error(llama: Any, tmp_path: Path) -> None:
    metadata, tensors = llama
    with pytest.raises(TinyLMError, match=r"rope_freqs.weight has other RoPE divisors"):
        read_gguf(write(tmp_path, metadata, {**tensors, "rope_freqs.weight": torch.tensor([1.0, 3.0, 2.0, 7.0])}))


def test_rope_divisors_of_an_odd_head_dimension_are_an_error(llama: Any, tmp_path: Path) -> None:
    metadata, tensors = llama
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    odd = metadata | {f"llama.{key}": 5 for key in keys}
    with pytest.raises(TinyLMError, match=r"rope_freqs.weight does not have"):
        read_gguf(write(tmp_path, odd, {**tensors, "rope_freqs.weight": torch.tensor([1.0, 3.0])}))


@pytest.mark.parametrize("divisors", [[1.0, 0.5, 0.5, 0.5], [1.0, 3e38, 3e38, 3e38], [1.0, 0.0, 1.0, 1.0]])
def test_rope_divisors_out_of_range_are_an_error_that_names_the_file(
    divisors: list[float], llama: Any, tmp_path: Path
) -> None:
    metadata, tensors = llama
    with pytest.raises(TinyLMError, match=r"model\.gguf as GGUF: its tensor rope_freqs.weight has other RoPE divisors"):
        read_gguf(write(tmp_path, metadata, {**tensors, "rope_freqs.weight": torch.tensor(divisors)}))


def test_more_heads_than_features_of_neox_are_an_error(tmp_path: Path) -> None:
    peer = make_peer("gptneox")
    metadata = peer_metadata("gptneox", peer)
    del metadata["gptneox.rope.dimension_count"]
    many = {"gptneox.attention.head_count": 64, "gptneox.attention.key_length": 0}
    with pytest.raises(TinyLMError, match=r"gptneox\.attention\.head_count is 64"):
        read_gguf(write(tmp_path, metadata | many, dict(peer_tensors("gptneox", peer)), "gptneox"))


def test_a_pattern_of_windows_that_is_not_of_booleans_is_an_error(tmp_path: Path) -> None:
    peer = make_peer("gemma3")
    metadata = peer_metadata("gemma3", peer) | {"gemma3.attention.sliding_window_pattern": [float("nan")] * 7}
    with pytest.raises(TinyLMError, match="sliding_window_pattern does not have a boolean for each of 7 layers"):
        read_gguf(write(tmp_path, metadata, dict(peer_tensors("gemma3", peer)), "gemma3"))


def test_llama_3_scaling_is_found_again_from_its_divisors(tmp_path: Path) -> None:
    save_peer("llama 3", tmp_path / "model.gguf")
    scaling = read_gguf(tmp_path / "model.gguf").config.rope_scaling
    assert scaling is not None
    found = dataclasses.astuple(scaling)[:5]
    assert found == ("llama3", pytest.approx(8.0), 32, pytest.approx(1.0), pytest.approx(4.0, abs=1e-3))


def test_a_sliding_window_of_llama_is_that_of_mistral(llama: Any, tmp_path: Path) -> None:
    metadata, tensors = llama
    model = read_gguf(write(tmp_path, {**metadata, "llama.attention.sliding_window": 7}, tensors))
    assert (model.family, model.config.local_window, model.config.local_layers) == ("mistral", 7, (0, 1))


# Files that are not GGUF.


def test_what_is_not_a_regular_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to("fifo.gguf")
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    for name in ("link.gguf", "loop.gguf", "fifo.gguf", "empty.gguf", "missing.gguf", "."):
        with pytest.raises(TinyLMError, match="Cannot read"):
            read_gguf(tmp_path / name)
