"""Hugging Face folders: reading their files, and reading exported folders with transformers."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from torch import Tensor

from tests.formats.peers import BOS, EOS, PAD, TEMPLATE, edit_json, ids, save_peer, save_tokenizer
from tests.shell import story
from tests.variants import small
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.huggingface import is_model_folder, read_folder, rebuilds_tokenizer, write_folder
from tinylm.formats.imported import ForeignModel
from tinylm.model.build import build_model
from tinylm.model_config import ModelConfig
from tinylm.run_config import SpecialTokens
from tinylm.text.tokenizer import train_bpe, train_char

TEXTS = ("First a line.\n", "  two\tspaces ", "naïve, 你好 🙂", f"{EOS} in a text", "")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_peer("llama", folder)
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of the Llama folder, to change."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in llama.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def reason(folder: Path) -> str:
    """Why a folder cannot be imported."""
    with pytest.raises(TinyLMError) as error:
        read_folder(folder)
    return str(error.value)


# Tokenizers and special tokens.


def test_token_ids_equal_those_of_transformers(llama: Path) -> None:
    ours = tokenizers.Tokenizer.from_str(read_folder(llama).tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(llama)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text).input_ids
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False).input_ids


def test_special_tokens_and_template_come_from_the_tokenizers_files(llama: Path) -> None:
    model = read_folder(llama)
    assert model.special == SpecialTokens(end_of_text=EOS, bos=BOS, eos=(EOS,), pad=PAD, add_bos=True)
    assert model.chat_template == TEMPLATE


def test_generation_stops_at_every_eos_token_of_generation_config(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[1, 2, 5])
    tokens = tokenizers.Tokenizer.from_str(read_folder(folder).tokenizer)
    assert read_folder(folder).special.eos == (EOS, PAD, tokens.id_to_token(5))


def test_without_names_special_tokens_are_the_ids_of_config_json(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", bos_token=..., eos_token=..., pad_token=...)
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=[1, 299])  # 299 is a padding row
    assert read_folder(folder).special == SpecialTokens(end_of_text=EOS, bos=BOS, eos=(EOS,), pad=PAD, add_bos=True)


def test_a_tokenizer_without_bos_has_none_although_config_json_gives_its_id(folder: Path) -> None:
    """As in Qwen2.5, whose chat template would otherwise begin with it."""
    edit_json(folder / "tokenizer_config.json", bos_token=None, pad_token=...)
    assert read_folder(folder).special == SpecialTokens(end_of_text=EOS, eos=(EOS,))
    edit_json(folder / "tokenizer_config.json", bos_token=BOS, eos_token=None)
    assert read_folder(folder).special == SpecialTokens(end_of_text=EOS, eos=(EOS,), bos=BOS, add_bos=True)


def test_special_tokens_may_be_objects_in_special_tokens_map(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token=...)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": PAD, "lstrip": False}}))
    assert read_folder(folder).special.end_of_text == PAD


def test_add_bos_token_decides_over_the_post_processor(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "tokenizer_config.json", add_bos_token=False)
    model = read_folder(folder)
    assert not model.special.add_bos
    write_folder(tmp_path, model)
    assert not read_folder(tmp_path).special.add_bos
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("a").input_ids[:1] != [0]


def test_an_added_bos_token_is_exported_as_a_post_processor(folder: Path, tmp_path: Path) -> None:
    edit_json(
        folder / "tokenizer.json",
        post_processor={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    )
    edit_json(folder / "tokenizer_config.json", add_bos_token=True)
    write_folder(tmp_path, read_folder(folder))
    spec = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert spec.encode("ab").ids[0] == 0 and spec.encode("a", "b").ids.count(0) == 2
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("a").input_ids[0] == 0


def test_a_chat_template_may_be_in_tokenizer_config_also_as_a_list(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template="one")
    assert read_folder(folder).chat_template == "one"
    templates = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    edit_json(folder / "tokenizer_config.json", chat_template=templates)
    assert read_folder(folder).chat_template == "three"
    edit_json(folder / "tokenizer_config.json", chat_template=...)
    assert read_folder(folder).chat_template is None


def test_a_template_without_a_single_text_adds_no_bos_token(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", post_processor={"type": "TemplateProcessing"})
    edit_json(folder / "tokenizer_config.json", add_bos_token=...)
    assert not read_folder(folder).special.add_bos


def test_a_list_of_chat_templates_may_have_names_of_any_type(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=[{"name": [], "template": "two"}])
    assert read_folder(folder).chat_template is None


def test_a_special_token_with_a_nul_character_is_an_error_that_names_the_folder(folder: Path) -> None:
    token = {"id": 299, "content": "<\0>", "special": True}
    edit_json(folder / "tokenizer.json", added_tokens=[token])
    edit_json(folder / "tokenizer_config.json", bos_token=..., eos_token="<\0>", pad_token=...)
    assert "its special tokens cannot be used: end_of_text contains a NUL character" in reason(folder)


def test_a_tied_output_layer_of_an_unsupported_dtype_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight differs from model.embed_tokens.weight" in reason(folder)


def test_padding_rows_of_the_embedding_are_kept(llama: Path) -> None:
    model = read_folder(llama)
    assert len(model.tensors["embedding.weight"]) == 300
    assert tokenizers.Tokenizer.from_str(model.tokenizer).get_vocab_size() == 292


# Errors for folders that cannot be imported, with their advice.


def test_a_folder_without_config_is_not_a_model_folder(tmp_path: Path) -> None:
    assert not is_model_folder(tmp_path)
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_folder(tmp_path)


def test_a_model_folder_is_distinguished_from_a_run(llama: Path, tmp_path: Path) -> None:
    assert is_model_folder(llama)
    (tmp_path / "config.json").write_text('{"format": 4, "model": {}}')
    assert not is_model_folder(tmp_path)


def test_a_pickle_is_refused_with_the_command_that_converts_it(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "never opened" in reason(folder) and "save_pretrained" in reason(folder)


def test_a_tokenizer_of_another_kind_is_refused_with_the_command_that_writes_one(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json" in reason(folder) and "AutoTokenizer" in reason(folder)


@pytest.mark.parametrize(
    ("file", "fields", "expected"),
    [
        ("config.json", {"model_type": "opt"}, "model_type is 'opt'; tinylm reads gemma"),
        ("config.json", {"model_type": ["llama"]}, "model_type is a list"),
        ("config.json", {"flux": 1}, "does not know: 'flux'"),
        ("config.json", {"quantization_config": {"bits": 4}}, "quantization_config of its config.json is an object"),
        ("config.json", {"auto_map": {"AutoModel": "m.Evil"}}, "Python code of its own (auto_map)"),
        ("config.json", {"architectures": ["LlamaForSequenceClassification"]}, "tinylm reads LlamaForCausalLM"),
        ("config.json", {"hidden_size": ...}, "lacks hidden_size"),
        ("config.json", {"hidden_size": 33}, "multiple of num_attention_heads"),
        ("config.json", {"hidden_size": "32"}, "hidden_size of its config.json is '32'"),
        (
            "config.json",
            {"num_hidden_layers": 10**12},
            "num_hidden_layers of its config.json is 1000000000000; tinylm supports an integer",
        ),
        ("config.json", {"num_hidden_layers": 2}, "does not have: model.layers.2."),
        ("config.json", {"num_hidden_layers": 4}, "lacks the tensor model.layers.3."),
        ("config.json", {"vocab_size": 301}, "has the shape [300, 32]; its configuration requires [301, 32]"),
        ("config.json", {"vocab_size": 200}, "has the shape [300, 32]; its configuration requires [200, 32]"),
        ("config.json", {"rms_norm_eps": True}, "rms_norm_eps of its config.json is True"),
        ("config.json", {"hidden_act": "relu2"}, "hidden_act of its config.json is 'relu2'"),
        ("config.json", {"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        ("config.json", {"attention_bias": True}, "lacks the tensor model.layers.0.self_attn.q_proj.bias"),
        ("config.json", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "of the type 'dynamic'"),
        ("config.json", {"rope_parameters": {"rope_type": "default", "wobble": 1}}, "unknown field 'wobble'"),
        ("config.json", {"rope_parameters": [1]}, "rope_parameters of its config.json is not an object"),
        ("config.json", {"rope_theta": 9.0}, "rope_theta of its config.json is 9.0, but its RoPE scaling has 10000.0"),
        ("tokenizer_config.json", {"eos_token": "<no>"}, "eos_token '<no>' is not in its tokenizer.json"),
        ("tokenizer_config.json", {"eos_token": 3}, "eos_token is 3, which is not a token"),
        ("tokenizer_config.json", {"add_bos_token": "no"}, "add_bos_token of tokenizer_config.json is 'no'"),
        ("tokenizer_config.json", {"chat_template": 3}, None),  # chat_template.jinja decides
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ("tokenizer.json", {"version": "9"}, "tokenizer.json cannot be used"),
    ],
)
def test_what_is_not_supported_is_named(folder: Path, file: str, fields: dict[str, Any], expected: str | None) -> None:
    edit_json(folder / file, **fields)
    if expected is None:
        read_folder(folder)
    else:
        assert expected in reason(folder)


def test_a_model_with_fewer_rows_than_its_tokenizer_has_ids_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=291, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert "has the id 291, and its model has 291 ids" in reason(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_a_damaged_file_is_an_error_that_names_it(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    assert file in reason(folder)


# Older files.


def test_a_config_of_transformers_4_gives_the_same_model(llama: Path, folder: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 16
    edit_json(folder / "config.json", rope_parameters={**scaling, "rope_theta": 5000.0})
    new = read_folder(folder).config
    edit_json(folder / "config.json", rope_parameters=..., rope_theta=5000.0, rope_scaling=scaling)
    assert read_folder(folder).config == new
    scaling["type"] = scaling.pop("rope_type")
    edit_json(folder / "config.json", rope_scaling=scaling, torch_dtype="float32", dtype=...)
    assert read_folder(folder).config == new != read_folder(llama).config


def test_a_gemma_3_config_of_transformers_4_gives_the_same_model(tmp_path: Path) -> None:
    save_peer("gemma3_text with scaling, scalar, pattern", tmp_path)
    new = read_folder(tmp_path).config
    edit_json(
        tmp_path / "config.json",
        rope_parameters=...,
        layer_types=...,
        rope_theta=90_000.0,
        rope_local_base_freq=300.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
        cache_implementation="hybrid",
    )
    assert read_folder(tmp_path).config == new


def test_a_neox_config_of_transformers_4_gives_the_same_model(tmp_path: Path) -> None:
    save_peer("gpt_neox without attention biases, half RoPE, tanh GELU, tied", tmp_path)
    new = read_folder(tmp_path).config
    edit_json(tmp_path / "config.json", rope_parameters=..., rotary_pct=0.5, rotary_emb_base=700)
    assert read_folder(tmp_path).config == new


def test_tensors_of_a_base_model_lack_its_prefix_and_may_have_buffers(tmp_path: Path) -> None:
    """As in the file of GPT-2 that OpenAI's conversion wrote."""
    from safetensors.torch import load_file, save_file

    save_peer("gpt2", tmp_path)
    expected = read_folder(tmp_path).tensors
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.2.attn.masked_bias": torch.ones(1)}, file)
    found = read_folder(tmp_path).tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    save_file({**tensors, "h.0.attn.extra": torch.ones(1)}, file)
    assert "does not have: transformer.h.0.attn.extra" in reason(tmp_path)


def test_an_output_layer_that_is_stored_although_it_is_tied_must_equal_the_embedding(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_peer("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert "output.weight" not in read_folder(tmp_path).tensors


# Exports of models of tinylm.


def own_model(config: ModelConfig, tokenizer: str) -> ForeignModel:
    """A model with random parameters, including those that are initialised to zero or one."""
    model = build_model(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return ForeignModel(None, config, model.state_dict(), tokenizer, SpecialTokens(), None)


def own_logits(model: ForeignModel, tokens: Tensor) -> Tensor:
    decoder: Any = build_model(model.config)
    decoder.load_state_dict(dict(model.tensors))
    with torch.no_grad():
        logits: Tensor = decoder.eval().logits(decoder(tokens).hidden)
    return logits


def characters() -> str:
    return train_char("".join(sorted(set(story(500)) | set("é你🙂")))).to_str()


OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "modern": ("qwen3", {}),
    "modern untied, dropout": ("qwen3", {"tie": False, "dropout": 0.1, "attention_dropout": 0.1}),
    "modern with windows": ("qwen3", {"local_window": 5, "local_layers": (0,)}),
    "modern with biases of attention": ("qwen3", {"qkv_bias": True, "output_bias": True, "head_dim": 6}),
    "without QK-norm": ("llama", {"qk_norm": False, "rope_theta": 700.0}),
    "without QK-norm, with all biases": ("llama", {"qk_norm": False, "bias": True}),
    "without QK-norm, windows in all layers": (
        "mistral",
        {"qk_norm": False, "local_window": 5, "local_layers": (1, 0)},
    ),
    "mixture of experts": ("qwen3_moe", {"experts": 4, "experts_per_token": 2}),
    "one expert per token": ("qwen3_moe", {"experts": 3, "experts_per_token": 1}),
    "mixture without QK-norm": ("mixtral", {"experts": 3, "qk_norm": False}),
    "gpt2": ("gpt2", {"preset": "gpt2", "kv_heads": 4}),
    "gpt2 untied, unscaled": ("gpt2", {"preset": "gpt2", "kv_heads": 4, "tie": False, "attention_scale": False}),
}


@pytest.mark.parametrize("case", OWN)
def test_an_export_opens_in_transformers_without_a_warning(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, choices = OWN[case]
    tokenizer = characters()
    size = tokenizers.Tokenizer.from_str(tokenizer).get_vocab_size()
    model = own_model(small(**{"preset": "modern", **choices, "vocab_size": size}), tokenizer)
    assert write_folder(tmp_path, model) == family
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        peer_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        tokens = ids(24) % size
        prompt = {"input_ids": tokens[:1, :4], "attention_mask": torch.ones(1, 4, dtype=torch.long)}
        generated = peer.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert caplog.records == []
    assert type(peer).__name__ == json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    with torch.no_grad():
        torch.testing.assert_close(peer(tokens).logits, own_logits(model, tokens), atol=1e-4, rtol=0)
    assert generated.shape[1] > 4
    text = story(300) + "你é🙂"
    assert peer_tokenizer(text).input_ids == tokenizers.Tokenizer.from_str(tokenizer).encode(text).ids
    assert peer_tokenizer.decode(peer_tokenizer(text).input_ids) == text
    assert peer_tokenizer.eos_token == "<|endoftext|>" and peer.config.eos_token_id == 0


def test_a_trained_bpe_tokenizer_is_exported_with_equal_ids(tmp_path: Path) -> None:
    tokenizer = train_bpe([story(3000)], 300).to_str()
    ours = tokenizers.Tokenizer.from_str(tokenizer)
    write_folder(tmp_path, own_model(small(vocab_size=ours.get_vocab_size()), tokenizer))
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, story(500)):
        assert peer(text).input_ids == ours.encode(text).ids
        assert peer.decode(peer(text).input_ids) == text


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_tokenizer() -> str:
    spec = json.loads(train_bpe([story(3000)], 300).to_str())
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    steps = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return json.dumps({**spec, "normalizer": {"type": "NFC"}, "pre_tokenizer": steps})


@pytest.mark.parametrize("kind", ["characters", "bpe", "qwen"])
def test_a_tokenizer_that_transformers_5_replaces_by_that_of_qwen_is_found(kind: str, tmp_path: Path) -> None:
    made = {"characters": characters, "qwen": qwen_tokenizer, "bpe": lambda: train_bpe([story(3000)], 300).to_str()}
    tokenizer = made[kind]()
    ours = tokenizers.Tokenizer.from_str(tokenizer)
    shape = {"qk_norm": False, "qkv_bias": True, "vocab_size": ours.get_vocab_size()}
    model = own_model(small(preset="modern", **shape), tokenizer)
    assert write_folder(tmp_path, model) == "qwen2"
    texts = [story(20)] if kind == "characters" else [story(20), "cafe\u0301"]
    expected = [ours.encode(text).ids for text in texts]
    automatic = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert [plain(text).input_ids for text in texts] == expected
    replaced = int(transformers.__version__.split(".")[0]) >= 5 and kind != "qwen"
    assert ([automatic(text).input_ids for text in texts] != expected) == replaced
    assert rebuilds_tokenizer("qwen2", tokenizer) == (kind != "qwen")
    assert not rebuilds_tokenizer("qwen3", tokenizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_export_is_loaded_in_the_dtype_that_was_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    tokenizer = characters()
    size = tokenizers.Tokenizer.from_str(tokenizer).get_vocab_size()
    model = own_model(small(vocab_size=size), tokenizer)
    write_folder(tmp_path, model, dtype)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == dtype
    found = read_folder(tmp_path).tensors
    assert all(torch.equal(found[name], model.tensors[name].to(dtype)) for name in found)


@pytest.mark.parametrize(
    ("choices", "settings"),
    [
        ({"position": "learned"}, ["`position` 'learned'"]),
        ({"norm_gain": False}, ["`norm_gain` False"]),
        ({"residual": False}, ["`residual` False"]),
        ({"activation": "relu"}, ["`activation` 'relu'"]),
        ({"architecture": "encoder"}, ["`architecture` 'encoder'"]),
        ({"experts": 4, "expert_mode": "merge"}, ["`expert_mode` 'merge'"]),
        ({"preset": "gpt2"}, ["`kv_heads` 2"]),
        ({"preset": "gpt2", "kv_heads": 4, "bias": False}, ["`bias` False"]),
        ({"preset": "original", "kv_heads": 4}, ["`norm_placement` 'post'"]),
        ({"scale_embedding": True}, ["`scale_embedding` True"]),
        ({"experts": 2, "local_window": 4, "local_layers": (1,)}, ["`local_window` 4"]),
    ],
)
def test_a_shape_that_no_family_has_is_refused_before_anything_is_written(
    choices: dict[str, Any], settings: list[str], tmp_path: Path
) -> None:
    tokenizer = characters()
    size = tokenizers.Tokenizer.from_str(tokenizer).get_vocab_size()
    model = own_model(small(**{"preset": "modern", **choices, "vocab_size": size}), tokenizer)
    with pytest.raises(UsageError) as error:
        write_folder(tmp_path, model)
    for setting in settings:
        assert setting in str(error.value)
    assert list(tmp_path.iterdir()) == []
