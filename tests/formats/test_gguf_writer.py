"""GGUF files written here: transformers reads the same models from them, and gguf the same tensors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from tests.formats.gguf_files import CASES, save_peer
from tests.formats.refusals import assert_refused
from tests.formats.test_gguf_tokenizer import EXAMPLES, byte_level_ids
from tinylm.config.presets import make_model_config
from tinylm.config.run import SpecialTokens
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.family import ForeignModel
from tinylm.formats.gguf_file import open_gguf
from tinylm.formats.gguf_model import make_modelfile, modelfile_path, read_gguf, write_gguf
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "ffn_width": 96, "context": 48}
CHARACTERS = train_char("".join(dict.fromkeys("aehlotw THEL'sd0123456789 \n.,!?中文👍é")))
BPE = train_bpe(["hello the world, don't 12345 中文字符 👍🏽 " * 20], 320)
# Models of tinylm that GGUF can represent.
OWN: dict[str, dict[str, Any]] = {
    "modern": {},
    "untied": {"tie": False},
    "experts": {"experts": 4, "experts_per_token": 2},
    "gpt2": {"preset": "gpt2", "kv_heads": 4, "ffn_width": 256},
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "another theta": {"rope_theta": 1234.5},
}
ARCHITECTURE = {"experts": "qwen3moe", "gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2"}

# transformers ignores these sizes in the file and uses its own.
DEFAULTS_OF_TRANSFORMERS: dict[str, dict[str, int]] = {
    "qwen3": {"width": 256, "heads": 2, "kv_heads": 1},  # heads of 128
    "qwen3moe": {"ffn_width": 768},
    "gpt2": {"context": 1024},
}


def own_model(case: str, tokenizer: Tokenizer = CHARACTERS, **changes: Any) -> tuple[Decoder, ForeignModel]:
    """A random model with biases and norms that are not constants."""
    choices = {**SIZES, "preset": "modern", **OWN.get(case, {}), **changes}
    config = make_model_config(vocab_size=tokenizer.vocab_size, size="nano", **choices)
    model = build_model(config)
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(mean + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval(), ForeignModel(None, config, model.state_dict(), tokenizer.to_str(), SpecialTokens(), None)


def tensors_of(path: Path) -> dict[str, Any]:
    """The tensors of a file by name, read by gguf."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


# Models.


@pytest.mark.parametrize("case", OWN)
@torch.no_grad()
def test_transformers_reads_the_same_model_and_tinylm_the_same_tensors_to_the_bit(case: str, tmp_path: Path) -> None:
    path, architecture = tmp_path / "model.gguf", ARCHITECTURE.get(case, "qwen3")
    model, exported = own_model(case, **DEFAULTS_OF_TRANSFORMERS.get(architecture, {}))
    assert write_gguf(path, exported, "f32") == architecture
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.randint(exported.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = model.logits(model(ids).hidden)
    assert expected.std() > 0.1
    torch.testing.assert_close(peer.eval()(ids).logits, expected, atol=1e-4, rtol=0)
    again = read_gguf(path)
    assert again.tensors.keys() == exported.tensors.keys()
    assert all(torch.equal(again.tensors[name], exported.tensors[name]) for name in exported.tensors)
    assert json.loads(again.tokenizer)["model"]["vocab"] == json.loads(exported.tokenizer)["model"]["vocab"]


@pytest.mark.parametrize("case", CASES)
def test_an_imported_model_is_written_with_the_same_tensors_to_the_bit(case: str, tmp_path: Path) -> None:
    """Except for norms with a unit offset and the divisors of Llama 3's frequencies, which are rounded."""
    save_peer(case, tmp_path / "before.gguf")
    model = read_gguf(tmp_path / "before.gguf")
    assert write_gguf(tmp_path / "after.gguf", model, "f32") == CASES[case]
    before, after = (tensors_of(tmp_path / name) for name in ("before.gguf", "after.gguf"))
    assert before.keys() == after.keys()
    for name in before:
        rounded = name == "rope_freqs.weight" or (case.startswith("gemma") and "norm" in name)
        np.testing.assert_allclose(after[name].data, before[name].data, rtol=0, atol=2e-6 if rounded else 0)
    again = read_gguf(tmp_path / "after.gguf")
    assert (again.special, again.chat_template) == (model.special, model.chat_template)
    assert json.loads(again.tokenizer) == json.loads(model.tokenizer)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("gemma")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norms_of_a_fine_tuned_gemma_are_stored_as_one_plus_their_weights(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Their sums with 1 are rounded to 32 bits, so the weights are read again with an error of that rounding."""
    save_peer(case, tmp_path / "before.gguf")
    model = read_gguf(tmp_path / "before.gguf")
    generator = torch.Generator().manual_seed(0)
    tuned = {
        name: (tensor + 0.01 * torch.randn(tensor.shape, generator=generator)).to(dtype) if "norm" in name else tensor
        for name, tensor in model.tensors.items()
    }
    write_gguf(tmp_path / "after.gguf", replace(model, tensors=tuned), "f32")
    again = read_gguf(tmp_path / "after.gguf").tensors
    for name in (name for name in tuned if "norm" in name):
        torch.testing.assert_close(again[name].double(), tuned[name].double(), rtol=0, atol=2**-23)
    stored = tensors_of(tmp_path / "after.gguf")["output_norm.weight"].data
    np.testing.assert_array_equal(stored, (1 + tuned["norm.weight"].double()).float().numpy())


def test_matrices_have_the_type_that_was_asked_for_and_norms_32_bits(tmp_path: Path) -> None:
    _, exported = own_model("modern")
    matrix, norm = "layers.1.feedforward.up_proj.weight", "layers.0.attention.q_norm.weight"
    for dtype in ("f32", "f16", "bf16", "q8_0", "q5_1", "q4_0"):
        write_gguf(tmp_path / f"{dtype}.gguf", exported, dtype)
        tensors = tensors_of(tmp_path / f"{dtype}.gguf")
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        found = tensors["blk.1.ffn_up.weight"]
        assert found.tensor_type == kind
        expected = gguf.quants.dequantize(gguf.quants.quantize(exported.tensors[matrix].numpy(), kind), kind)
        np.testing.assert_array_equal(gguf.quants.dequantize(found.data, kind), expected)
        assert tensors["blk.0.attn_q_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(tensors["blk.0.attn_q_norm.weight"].data, exported.tensors[norm].numpy())


def test_matrices_that_q8_0_cannot_store_have_16_bits(tmp_path: Path) -> None:
    _, exported = own_model("modern", width=48, heads=4, ffn_width=96)
    write_gguf(tmp_path / "model.gguf", exported, "q8_0")
    types = {name: tensor.tensor_type.name for name, tensor in tensors_of(tmp_path / "model.gguf").items()}
    assert (types["blk.0.ffn_up.weight"], types["blk.0.ffn_down.weight"]) == ("F16", "Q8_0")


def test_what_gguf_cannot_represent_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    _, modern = own_model("modern")
    large = dict(modern.tensors)
    large["layers.0.attention.v_proj.weight"] = large["layers.0.attention.v_proj.weight"] * 1e6
    spec = json.dumps({**json.loads(modern.tokenizer), "normalizer": {"type": "Lowercase"}})
    # llama.cpp cannot load these, although the format has a place for each tensor.
    biased = {"norm": "layernorm", "norm_bias": True, "bias": True, "activation": "gelu-exact", "kv_heads": 4}
    gemma = {"norm_unit_offset": True, "scale_embedding": True, "activation": "geglu", "qk_norm": False}
    rows = [
        (own_model("modern", qk_norm=False, tie=True, **biased)[1], "gptneox cannot represent this model's `tie` True"),
        (own_model("modern", tie=False, **gemma)[1], "gemma cannot represent this model's `tie` False"),
        (
            own_model("modern", qkv_bias=True, output_bias=True)[1],
            "qwen3 cannot represent this model's `qkv_bias` True",
        ),
        (own_model("qwen2", head_dim=8)[1], "qwen2.attention.key_length = 8; tinylm supports 16"),
        (own_model("modern", norm_placement="post")[1], "`norm_placement` 'post'"),
        (own_model("modern", position="none")[1], "`position`"),
        (own_model("modern", experts=4, experts_per_token=1)[1], "`normalise_top_k`"),
        (own_model("modern", local_window=8, local_layers=(0,))[1], "sliding_window|`local_window`"),
        (own_model("modern", activation="geglu")[1], "`activation`"),
        (own_model("gpt2", activation="relu")[1], "`activation` relu"),
        (own_model("gpt2", preset="original")[1], "`position`"),
        (replace(modern, tokenizer=spec), "The tokenizer cannot be written as GGUF: "),
        (replace(modern, tensors=large), "blk.0.attn_v.weight has numbers that f16 cannot represent"),
    ]
    assert_refused(rows, lambda model: write_gguf(tmp_path / "model.gguf", model, "f16"), UsageError)
    assert list(tmp_path.iterdir()) == []


def test_a_window_that_llama_cpp_ignores_is_refused_unless_it_is_as_long_as_the_context(tmp_path: Path) -> None:
    """llama.cpp reads no attention.sliding_window for the architecture llama (its src/models/llama.cpp)."""
    context, path = SIZES["context"], tmp_path / "model.gguf"
    for experts in ({}, {"experts": 4, "experts_per_token": 2}):  # Mistral and Mixtral
        _, exported = own_model("llama", local_window=7, local_layers=(0, 1), **experts)
        shorter, whole = (
            replace(exported, config=replace(exported.config, local_window=window)) for window in (context - 1, context)
        )
        with pytest.raises(UsageError, match=f"llama.cpp ignores the `local_window` of {context - 1} tokens"):
            write_gguf(path, shorter)
        assert not path.exists()
        assert write_gguf(path, whole) == "llama"
        assert read_gguf(path).config.local_window == context
        path.unlink()


DAMAGES: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("qwen3.rope.freq_base", lambda value: 2 * value, "its .*rope_theta"),
    ("tokenizer.ggml.merges", lambda merges: merges[:1], "its tokenizer gives other ids for"),
    ("tensors", lambda data: data ^ 64, r"its tensor model\.embed_tokens\.weight differs"),
)


@pytest.mark.parametrize(("name", "damage", "what"), DAMAGES)
def test_a_file_that_is_not_the_same_model_when_read_again_does_not_appear(
    name: str, damage: Callable[[Any], Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, exported = own_model("modern", BPE)
    (tmp_path / "model.gguf").write_bytes(b"old")
    writer = gguf.GGUFWriter
    add, write = writer.add_key_value, writer.write_tensor_data

    def add_damaged(self: Any, key: str, value: Any, *types: Any) -> None:
        add(self, key, damage(value) if key == name else value, *types)

    def write_damaged(self: Any, data: Any) -> None:
        write(self, damage(data) if name == "tensors" else data)

    monkeypatch.setattr(writer, "add_key_value", add_damaged)
    monkeypatch.setattr(writer, "write_tensor_data", write_damaged)
    with pytest.raises(TinyLMError, match=f"not the same model when read again: {what}"):
        write_gguf(tmp_path / "model.gguf", exported, "f32")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert (tmp_path / "model.gguf").read_bytes() == b"old"


# Metadata.


def test_llama_cpp_finds_what_it_needs(tmp_path: Path) -> None:
    _, exported = own_model("modern", BPE)
    write_gguf(tmp_path / "story.gguf", exported)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "story.gguf").fields.items()}
    expected = {
        "general.architecture": "qwen3",
        "general.name": "story",
        "general.file_type": 1,
        "qwen3.block_count": 2,
        "qwen3.context_length": 48,
        "qwen3.embedding_length": 64,
        "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 16,
        "qwen3.attention.value_length": 16,
        "qwen3.rope.dimension_count": 16,
        "qwen3.rope.freq_base": 10_000.0,
        "qwen3.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "qwen3.vocab_size": BPE.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": BPE.end_of_text_id,
        "tokenizer.ggml.bos_token_id": BPE.end_of_text_id,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {name: fields[name] for name in expected} == expected
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.token_type"]) == BPE.vocab_size
    for text in EXAMPLES:
        assert byte_level_ids(text, fields) == BPE.encode(text).tolist()


def test_quantized_tensors_of_the_same_model_are_copied_as_they_are(tmp_path: Path) -> None:
    _, exported = own_model("untied")
    first, copy = tmp_path / "q8.gguf", tmp_path / "copy.gguf"
    write_gguf(first, exported, "q8_0")
    write_gguf(copy, read_gguf(first), "f32", quantized=open_gguf(first))
    original, copied = (
        {name: (tensor.tensor_type.name, bytes(tensor.data)) for name, tensor in tensors_of(path).items()}
        for path in (first, copy)
    )
    assert {kind for kind, _ in original.values()} == {"Q8_0", "F32"}
    assert copied == original


def test_tensors_of_another_shape_are_not_copied(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", own_model("untied", ffn_width=128)[1], "q8_0")
    _, exported = own_model("untied")
    with pytest.raises(TinyLMError, match="is not the same model"):  # those of the same shape have other numbers
        write_gguf(tmp_path / "copy.gguf", exported, "f32", quantized=open_gguf(tmp_path / "other.gguf"))
    assert not (tmp_path / "copy.gguf").exists()


# The Modelfile of ollama.


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_for_a_base_model_the_modelfile_hands_the_prompt_over_as_it_is() -> None:
    _, model = own_model("modern")
    assert modelfile_path(Path("models/story.gguf")) == Path("models/story.Modelfile")
    assert make_modelfile(Path("models/story.gguf"), model) == (
        'FROM ./story.gguf\nPARAMETER num_ctx 48\nTEMPLATE """{{ .Prompt }}"""\nPARAMETER stop "<|endoftext|>"\n'
    )


def test_a_chat_model_with_chatml_has_its_template_and_any_other_is_left_to_ollama() -> None:
    _, model = own_model("modern")
    text = make_modelfile(Path("chat.gguf"), replace(model, chat_template=CHATML))
    turns = "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    assert turns + "<|im_start|>assistant\n" in text
    text = make_modelfile(Path("chat.gguf"), replace(model, chat_template="{{ x }}"))
    assert "TEMPLATE " not in text.replace("# Without TEMPLATE,", "")
