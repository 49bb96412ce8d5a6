"""Hugging Face folders: reading their files, and reading exported folders with transformers."""

import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.formats.peers import BOS, EOS, PAD, TEMPLATE, edit_json, ids, load, save_peer
from tests.formats.refusals import assert_refused
from tests.published import published
from tests.shell import story
from tests.variants import small
from tinylm.config.run import SpecialTokens
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.family import ForeignModel
from tinylm.formats.huggingface import is_model_folder, read_folder, rebuilds_tokenizer, summarise_folder, write_folder
from tinylm.text.tokenizer import train_bpe, train_char
from tinylm.transformer.build import build_model

TEXTS = ("First a line.\n", "  two\tspaces ", "naïve, 你好 🙂", f"{EOS} in a text", "")
Changes = dict[str, Any]  # by file: new fields, new content in bytes, what is in its place, or None for nothing


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_peer("llama", folder)
    return folder


def changed(folder: Path, target: Path, changes: Changes) -> Path:
    """A copy of a folder with changed files."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    for name, change in changes.items():
        path = target / name
        if isinstance(change, dict):
            edit_json(path, **change)
            continue
        path.unlink(missing_ok=True)
        if isinstance(change, bytes):
            path.write_bytes(change)
        elif change == "FIFO":
            os.mkfifo(path)
        elif change == "folder":
            path.mkdir()
        elif change:
            path.symlink_to(name if change == "loop" else folder / name)
    return target


def test_token_ids_equal_those_of_transformers_and_padding_rows_are_kept(llama: Path) -> None:
    model = read_folder(llama)
    ours = tokenizers.Tokenizer.from_str(model.tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(llama)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text).input_ids
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False).input_ids
    assert (len(model.tensors["embedding.weight"]), ours.get_vocab_size()) == (300, 292)


ALL = SpecialTokens(end_of_text=EOS, bos=BOS, eos=(EOS,), pad=PAD, add_bos=True)
NAMES, GENERATION = "tokenizer_config.json", "generation_config.json"
SPECIAL: dict[str, tuple[Changes, SpecialTokens]] = {
    "as saved": ({}, ALL),
    "all EOS tokens of generation_config": (
        {GENERATION: {"eos_token_id": [1, 2, 5]}},
        replace(ALL, eos=(EOS, PAD, "#")),
    ),
    "no names: the ids of config.json, without 299, a padding row": (
        {
            NAMES: {"bos_token": ..., "eos_token": ..., "pad_token": ...},
            GENERATION: None,
            "config.json": {"eos_token_id": [1, 299]},
        },
        ALL,
    ),
    # As in Qwen2.5, whose chat template would otherwise begin with it.
    "no BOS token, although config.json has its id": (
        {NAMES: {"bos_token": None, "pad_token": ...}},
        SpecialTokens(end_of_text=EOS, eos=(EOS,)),
    ),
    "the EOS token of generation_config": ({NAMES: {"eos_token": None, "pad_token": ...}}, replace(ALL, pad=None)),
    "an object in special_tokens_map": (
        {NAMES: {"eos_token": ...}, "special_tokens_map.json": b'{"eos_token": {"content": "<pad>", "lstrip": false}}'},
        replace(ALL, end_of_text=PAD, eos=(PAD, EOS)),
    ),
    "add_bos_token before the post-processor": ({NAMES: {"add_bos_token": False}}, replace(ALL, add_bos=False)),
    "a template without a single text": (
        {"tokenizer.json": {"post_processor": {"type": "TemplateProcessing"}}},
        replace(ALL, add_bos=False),
    ),
}


def test_special_tokens_and_the_chat_template_come_from_the_tokenizers_files(llama: Path, tmp_path: Path) -> None:
    for name, (changes, expected) in SPECIAL.items():
        assert read_folder(changed(llama, tmp_path / "copy", changes)).special == expected, name
    assert read_folder(llama).chat_template == TEMPLATE
    templates = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    nameless = [{"name": [], "template": "two"}]
    for value, expected in (("one", "one"), (templates, "three"), (nameless, None), (..., None)):
        changes = {"chat_template.jinja": None, "tokenizer_config.json": {"chat_template": value}}
        assert read_folder(changed(llama, tmp_path / "copy", changes)).chat_template == expected


def test_the_bos_token_is_added_by_an_export_if_it_was_before(llama: Path, tmp_path: Path) -> None:
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    without = changed(llama, tmp_path / "without", {"tokenizer_config.json": {"add_bos_token": False}})
    adding = {"tokenizer.json": {"post_processor": step}, "tokenizer_config.json": {"add_bos_token": True}}
    for folder, adds in ((without, False), (changed(llama, tmp_path / "adding", adding), True)):
        write_folder(tmp_path, read_folder(folder))
        assert read_folder(tmp_path).special.add_bos is adds
        assert (transformers.AutoTokenizer.from_pretrained(tmp_path)("a").input_ids[0] == 0) is adds
    spec = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert spec.encode("a", "b").ids.count(0) == 2


def test_a_model_folder_is_distinguished_from_a_run(llama: Path, tmp_path: Path) -> None:
    assert is_model_folder(llama) and not is_model_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 4, "model": {}}')
    assert not is_model_folder(tmp_path)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "opt"}, "model_type is 'opt'; tinylm reads gemma"),
    ({"model_type": ["llama"]}, "model_type is a list"),
    ({"flux": 1}, "does not know: 'flux'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config of its config.json is an object"),
    ({"auto_map": {"AutoModel": "m.Evil"}}, r"Python code of its own \(auto_map\)"),
    ({"architectures": ["LlamaForTokenClassification"]}, "tinylm reads LlamaForCausalLM"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "it lacks the tensor score.weight"),
    ({"hidden_size": ...}, "lacks hidden_size"),
    ({"hidden_size": 33}, "multiple of num_attention_heads"),
    ({"hidden_size": "32"}, "hidden_size of its config.json is '32'"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers of its config.json is 1000000000000; tinylm supports"),
    ({"num_hidden_layers": 2}, "does not have: model.layers.2."),
    ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3."),
    ({"vocab_size": 301}, r"has the shape \[300, 32\]; its configuration requires \[301, 32\]"),
    ({"vocab_size": 200}, r"has the shape \[300, 32\]; its configuration requires \[200, 32\]"),
    ({"rms_norm_eps": True}, "rms_norm_eps of its config.json is True"),
    ({"hidden_act": "relu2"}, "hidden_act of its config.json is 'relu2'"),
    ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ({"attention_bias": True}, "lacks the tensor model.layers.0.self_attn.q_proj.bias"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "of the type 'dynamic'"),
    ({"rope_parameters": {"rope_type": "default", "wobble": 1}}, "unknown field 'wobble'"),
    ({"rope_parameters": [1]}, "rope_parameters of its config.json is not an object"),
    ({"rope_theta": 9.0}, "rope_theta of its config.json is 9.0, but its RoPE scaling has 10000.0"),
    ({"num_hidden_layers": 1000}, "it claims 1,000 layers and has"),
    ({"vocab_size": 10**9}, "vocab_size of its config.json is 1000000000; tinylm supports an integer"),
    ({"max_position_embeddings": 10**9}, "max_position_embeddings of its config.json is 1000000000"),
    ({"intermediate_size": 10**12}, "intermediate_size of its config.json is 1000000000000"),
    ({"hidden_size": 0}, "hidden_size of its config.json is 0; tinylm supports an integer from 1"),
    ({"hidden_act": "\ud800"}, "config.json .*half of a surrogate pair"),
    ({"\ud800": 1}, "config.json .*half of a surrogate pair"),
]
OTHERS: list[tuple[Changes, str]] = [
    ({"config.json": None}, r"it has no config\.json"),
    ({NAMES: {"eos_token": "<no>"}}, "eos_token '<no>' is not in its tokenizer.json"),
    ({NAMES: {"eos_token": 3}}, "eos_token is 3, which is not a token"),
    ({NAMES: {"add_bos_token": "no"}}, "add_bos_token of tokenizer_config.json is 'no'"),
    ({NAMES: {"chat_template": "\ud800{{ messages }}"}}, "tokenizer_config.json .*half of a surrogate pair"),
    ({GENERATION: {"eos_token_id": "x"}}, "eos_token_id is 'x'"),
    ({GENERATION: {"eos_token_id": "\ud800"}}, "generation_config.json .*half of a surrogate pair"),
    ({"tokenizer.json": None}, "no tokenizer.json.*AutoTokenizer"),
    ({"tokenizer.json": {"version": "9"}}, "tokenizer.json cannot be used"),
    ({"tokenizer.json": {"added_tokens": [{"id": 292, "content": "a\ud800"}]}}, "tokenizer.json .*half of a surrogate"),
    (
        {
            "tokenizer.json": {"added_tokens": [{"id": 299, "content": "<\0>", "special": True}]},
            NAMES: {"bos_token": ..., "eos_token": "<\0>", "pad_token": ...},
        },
        "its special tokens cannot be used: end_of_text contains a NUL character",
    ),
    ({"model.safetensors": None, "pytorch_model.bin": b"x"}, "never opened.*save_pretrained"),
]
DAMAGED = (b"", b"[]", b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000)
JSON_FILES = ("config.json", NAMES, GENERATION, "tokenizer.json")


def test_what_is_not_supported_damaged_or_no_file_is_named(llama: Path, tmp_path: Path) -> None:
    rows = [*OTHERS, *(({"config.json": fields}, message) for fields, message in CONFIGS)]
    rows += [({file: content}, re.escape(file)) for file in JSON_FILES for content in DAMAGED]
    for file in (*JSON_FILES, "model.safetensors", "chat_template.jinja"):
        rows += [({file: kind}, f"{file} is a link out of the folder") for kind in ("link", "loop")]
        rows += [({file: kind}, f"{file} .*(cannot be read|not a regular file)") for kind in ("FIFO", "folder")]
    assert_refused(rows, lambda changes: read_folder(changed(llama, tmp_path / "copy", changes)))


def test_a_model_that_does_not_fit_its_tokenizer_or_its_output_layer_is_refused(llama: Path, tmp_path: Path) -> None:
    few = changed(llama, tmp_path / "few", {"config.json": {"vocab_size": 291}})
    tied = changed(llama, tmp_path / "tied", {"config.json": {"tie_word_embeddings": True}})
    tensors = load_file(llama / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    ends = {"model.embed_tokens.weight": embedding[:291], "lm_head.weight": tensors["lm_head.weight"][:291]}
    save_file({**tensors, **ends}, few / "model.safetensors")
    save_file({**tensors, "lm_head.weight": embedding.to(torch.float8_e4m3fn)}, tied / "model.safetensors")
    rows = [
        (few, "has the id 291, and its model has 291 ids"),
        (tied, "lm_head.weight differs from model.embed_tokens.weight"),
    ]
    assert_refused(rows, read_folder)
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tied / "model.safetensors")
    assert "output.weight" not in read_folder(tied).tensors


def test_a_config_of_transformers_4_gives_the_same_model(tmp_path: Path) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    theta: dict[str, Any] = {"rope_parameters": ..., "rope_theta": 5000.0}
    gemma = {
        "rope_theta": 90_000.0,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    pattern = {"layer_types": ..., "sliding_window_pattern": 2, "cache_implementation": "hybrid"}
    older: list[tuple[str, dict[str, Any]]] = [
        ("llama 3 scaling", {**theta, "rope_scaling": {"rope_type": "llama3", **llama3}}),
        (
            "llama 3 scaling",
            {**theta, "rope_scaling": {"type": "llama3", **llama3}, "torch_dtype": "float32", "dtype": ...},
        ),
        ("gemma3_text with scaling, scalar, pattern", {"rope_parameters": ..., **gemma, **pattern}),
        (
            "gpt_neox without attention biases, half RoPE, tanh GELU, tied",
            {"rope_parameters": ..., "rotary_pct": 0.5, "rotary_emb_base": 700},
        ),
    ]
    for case, fields in older:
        save_peer(case, tmp_path)
        new = read_folder(tmp_path).config
        assert new.rope_theta != 10_000.0
        edit_json(tmp_path / "config.json", **fields)
        assert read_folder(tmp_path).config == new, case


def test_tensors_of_a_base_model_lack_its_prefix_and_may_have_buffers(tmp_path: Path) -> None:
    """As in the file of GPT-2 that OpenAI's conversion wrote."""
    peer = save_peer("gpt2", tmp_path)
    expected = read_folder(tmp_path).tensors
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.2.attn.masked_bias": torch.ones(1)}, file)
    found = read_folder(tmp_path).tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert summarise_folder(tmp_path)["parameters"] == peer.num_parameters(), "buffers are no parameters"
    save_file({**tensors, "h.0.attn.extra": torch.ones(1)}, file)
    with pytest.raises(TinyLMError, match=r"does not have: transformer\.h\.0\.attn\.extra"):
        read_folder(tmp_path)


CHARACTERS, BPE = train_char("".join(sorted(set(story(500)) | set("é你🙂")))), train_bpe([story(3000)], 300)


def own_model(tokenizer: str = CHARACTERS.to_str(), **choices: Any) -> ForeignModel:
    """A model with random parameters, including those that are initialised to zero or one."""
    config = small(**{**choices, "vocab_size": tokenizers.Tokenizer.from_str(tokenizer).get_vocab_size()})
    model = build_model(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return ForeignModel(None, config, model.state_dict(), tokenizer, SpecialTokens(), None)


OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "modern untied, dropout": ("qwen3", {"tie": False, "dropout": 0.1, "attention_dropout": 0.1}),
    "modern with windows": ("qwen3", {"local_window": 5, "local_layers": (0,)}),
    "modern with biases of attention": ("qwen3", {"qkv_bias": True, "output_bias": True, "head_dim": 6}),
    "without QK-norm, with all biases": ("llama", {"qk_norm": False, "bias": True, "rope_theta": 700.0}),
    "windows in all layers": ("mistral", {"qk_norm": False, "local_window": 5, "local_layers": (1, 0)}),
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
    model = own_model(**choices)
    assert write_folder(tmp_path, model) == family
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        peer_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        tokens = ids(24) % model.config.vocab_size
        prompt = {"input_ids": tokens[:1, :4], "attention_mask": torch.ones(1, 4, dtype=torch.long)}
        generated = peer.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert caplog.records == []
    assert type(peer).__name__ == json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    decoder = load(model)
    with torch.no_grad():
        expected = decoder.logits(decoder(tokens).hidden)
        torch.testing.assert_close(peer(tokens).logits, expected, atol=1e-4, rtol=0)
    assert generated.shape[1] > 4
    text = story(300) + "你é🙂"
    assert peer_tokenizer(text).input_ids == CHARACTERS.encode(text).tolist()
    assert peer_tokenizer.decode(peer_tokenizer(text).input_ids) == text
    assert peer_tokenizer.eos_token == "<|endoftext|>" and peer.config.eos_token_id == 0


def test_a_trained_bpe_tokenizer_is_exported_with_equal_ids(tmp_path: Path) -> None:
    write_folder(tmp_path, own_model(BPE.to_str()))
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, story(500)):
        assert peer(text).input_ids == BPE.encode(text).tolist()
        assert peer.decode(peer(text).input_ids) == text


def test_a_tokenizer_that_transformers_5_replaces_by_that_of_qwen_is_found(tmp_path: Path) -> None:
    made = {"characters": CHARACTERS.to_str(), "bpe": BPE.to_str(), "qwen": json.dumps(published()["qwen2"])}
    for kind, tokenizer in made.items():
        assert write_folder(tmp_path, own_model(tokenizer, qk_norm=False, qkv_bias=True)) == "qwen2"
        texts = [story(20)] if kind == "characters" else [story(20), "cafe\u0301"]
        expected = [tokenizers.Tokenizer.from_str(tokenizer).encode(text).ids for text in texts]
        automatic = transformers.AutoTokenizer.from_pretrained(tmp_path)
        plain = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        assert [plain(text).input_ids for text in texts] == expected
        replaced = int(transformers.__version__.split(".")[0]) >= 5 and kind != "qwen"
        assert ([automatic(text).input_ids for text in texts] != expected) == replaced
        assert rebuilds_tokenizer("qwen2", tokenizer) == (kind != "qwen")
        assert not rebuilds_tokenizer("qwen3", tokenizer)


def test_an_export_is_loaded_in_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    model = own_model()
    for dtype in (torch.bfloat16, torch.float16):
        write_folder(tmp_path, model, dtype)
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == dtype
        found = read_folder(tmp_path).tensors
        assert all(torch.equal(found[name], model.tensors[name].to(dtype)) for name in found)


def test_a_shape_that_no_family_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"position": "learned"}, "`position` 'learned'"),
        ({"norm_gain": False}, "`norm_gain` False"),
        ({"residual": False}, "`residual` False"),
        ({"activation": "relu"}, "`activation` 'relu'"),
        ({"architecture": "encoder"}, "`architecture` 'encoder'"),
        ({"experts": 4, "expert_mode": "merge"}, "`expert_mode` 'merge'"),
        ({"preset": "gpt2"}, "`kv_heads` 2"),
        ({"preset": "gpt2", "kv_heads": 4, "bias": False}, "`bias` False"),
        ({"preset": "original", "kv_heads": 4}, "`norm_placement` 'post'"),
        ({"scale_embedding": True}, "`scale_embedding` True"),
        ({"experts": 2, "local_window": 4, "local_layers": (1,)}, "`local_window` 4"),
    ]
    assert_refused(rows, lambda choices: write_folder(tmp_path, own_model(**choices)), UsageError)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_family_that_tinylm_does_not_read_is_listed_with_its_stored_parameters(
    llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    stored = load_file(folder / "model.safetensors")
    found = summarise_folder(folder)
    assert found["kind"] == "hugging face"
    assert found["parameters"] == sum(tensor.numel() for tensor in stored.values())
