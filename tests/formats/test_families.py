"""Each family beside transformers, and the fields of its configuration."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.formats.peers import BASES, CASES, CONTEXT, ids, load, save_peer
from tests.formats.refusals import assert_refused
from tests.variants import small
from tinylm.config.model import ModelConfig, RopeScaling
from tinylm.errors import UsageError
from tinylm.formats import family
from tinylm.formats.families import FAMILIES, choose_family, convert, resolve
from tinylm.formats.family import ExportedTensors
from tinylm.formats.foreign_config import WITHOUT_EFFECT
from tinylm.formats.huggingface import read_folder, write_folder
from tinylm.transformer.build import build_model

TOLERANCE = 1e-4  # of logits whose standard deviation is about 1 to 10


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("peer")
    return save_peer(request.param, folder), folder


@torch.no_grad()
def test_logits_equal_those_of_transformers_with_and_without_a_cache(saved: tuple[Any, Path]) -> None:
    """The cached tokens go past the sliding windows, which have at most 9 tokens."""
    peer, folder = saved
    tokens = ids(CONTEXT)
    decoder = load(read_folder(folder))
    expected = peer(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(decoder.logits(decoder(tokens).hidden), expected, atol=TOLERANCE, rtol=0)
    cache = decoder.make_cache(len(tokens), CONTEXT)
    parts = [tokens[:, :13], *tokens[:, 13:24].split(1, dim=1)]
    logits = torch.cat([decoder.logits(decoder(part, cache).hidden) for part in parts], dim=1)
    torch.testing.assert_close(logits, expected[:, :24], atol=TOLERANCE, rtol=0)


def test_an_export_has_the_same_config_and_the_same_tensors_to_the_bit(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = saved
    model = read_folder(folder)
    assert write_folder(tmp_path, model) == model.family
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = read_folder(tmp_path)
    assert resolve(again.config) == resolve(model.config)
    assert (again.special, again.chat_template) == (model.special, model.chat_template)
    assert all(torch.equal(again.tensors[name], model.tensors[name]) for name in model.tensors)


@torch.no_grad()
def test_the_scaled_embedding_of_gemma_is_rounded_in_its_dtype(tmp_path: Path) -> None:
    """To the bit in bfloat16, where sqrt(width) is rounded before it is multiplied."""
    peer = save_peer("gemma", tmp_path).to(torch.bfloat16)
    peer.save_pretrained(tmp_path)
    decoder = load(read_folder(tmp_path))
    expected = peer.get_input_embeddings()(ids(8))
    assert expected.dtype == torch.bfloat16 and torch.equal(decoder.embed(ids(8)), expected)


SAVED = {kind: transformers.AutoConfig.for_model(kind, **BASES[kind]).to_dict() for kind in FAMILIES}


def config(kind: str, **fields: Any) -> dict[str, Any]:
    """The config.json that transformers writes for a small model, with fields replaced."""
    return {**SAVED[kind], "architectures": [FAMILIES[kind].architecture], **fields}


def read(kind: str, **fields: Any) -> ModelConfig:
    return FAMILIES[kind].config(config(kind, **fields))


def test_a_missing_optional_field_has_the_default_of_transformers() -> None:
    """Older files lack fields that their version had no use for. GELU of Gemma 1 means the approximation."""
    wrong = []
    for kind in FAMILIES:
        values, read_values = config(kind), FAMILIES[kind].config
        assert read_values(values).width == 32
        optional = values.keys() - BASES[kind].keys() - WITHOUT_EFFECT - {"architectures", "rope_parameters"}
        assert len(optional) > 5
        for name in optional:
            # Of some fields transformers derives the default from others, when it reads the file.
            fewer = {key: value for key, value in values.items() if key != name}
            filled = transformers.AutoConfig.for_model(**fewer).to_dict()
            if read_values(fewer) != read_values({**filled, "architectures": None}):
                wrong.append(f"{kind}: {name}")
    assert not wrong, "\n".join(wrong)
    peer = transformers.Gemma3TextConfig().rope_parameters
    found = read("gemma3_text", rope_parameters=None)
    assert found.rope_theta == peer["full_attention"]["rope_theta"]
    assert found.local_rope_theta == peer["sliding_attention"]["rope_theta"]
    assert read("gemma", hidden_act="gelu").activation == "geglu"
    assert read("gemma", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh").activation == "geglu"


UNSUPPORTED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"n_ctx": 9}, "n_ctx"),
    ("gpt2", {"n_head": 5}, "multiple of n_head"),
    ("gpt2", {"activation_function": "swish"}, "activation_function"),
    ("llama", {"pruned_heads": {"1": [0]}}, "pruned_heads"),
    ("llama", {"num_key_value_heads": 3}, "kv_heads"),
    ("llama", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1]}}, "longrope"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 1e300}}, "factor"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
        "mrope_section",
    ),
    ("mistral", {"sliding_window": -1}, "sliding_window"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ("qwen2", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    (
        "qwen3",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": None},
        "no sliding_window",
    ),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "differ in 'rope_type'"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
    ("qwen3_moe", {"num_experts": 5}, "num_local_experts"),
    ("mixtral", {"num_local_experts": 1}, "num_local_experts"),
    ("gpt_neox", {"rotary_pct": "x", "rope_parameters": None}, "rotary_pct"),
    ("gpt_neox", {"head_dim": 5}, "head_dim"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma", {"hidden_activation": "gelu"}, "hidden_activation"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "scales"),
    ("gemma3_text", {"rope_parameters": {"full_attention": [1]}}, "must contain the objects full_attention"),
    ("gemma3_text", {"rope_parameters": {"full_attention": 5}}, "must contain the objects full_attention"),
)


def test_what_changes_the_model_in_a_way_that_is_not_supported_is_named() -> None:
    rows = [((kind, fields), message) for kind, fields, message in UNSUPPORTED]
    assert_refused(rows, lambda row: read(row[0], **row[1]), (ValueError, UsageError))


ACCEPTED_FIELDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt2", {"n_ctx": 64, "task_specific_params": {"text-generation": {"max_length": 50}}}),
    ("llama", {"pretraining_tp": 2, "rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {}}),
    ("llama", {"quantization_config": None, "torch_dtype": "bfloat16", "_attn_implementation_autoset": True}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ("qwen2", {"use_mrope": False, "max_window_layers": 28}),
    ("gpt_neox", {"rope_theta": 9.0, "is_decoder": True}),
    ("gemma3_text", {"cache_implementation": "hybrid", "_sliding_window_pattern": 6}),
)


def test_fields_without_effect_are_accepted_and_do_not_prevent_an_export() -> None:
    for kind, fields in ACCEPTED_FIELDS:
        assert read(kind, **fields) == read(kind), fields
    yarn = RopeScaling(kind="yarn", factor=4.0, original_context=16)  # with the default factor of attention
    for choices in ({"rope_scaling": yarn}, {"experts_per_token": 1}, {"relative_clip": 3}, {"dropout": 0.1}):
        assert choose_family(small(**choices)).name == "qwen3", choices
    assert choose_family(small("gpt2", kv_heads=4, rope_theta=5.0)).name == "gpt2"


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


ABSURD = (0, -1, -2.5, 1e-320, 1e-5, 1e300, math.nan, math.inf, 10**30, "8", True, [4], {})
NAMES = {"original_max_position_embeddings": "original_context", "mscale": "attention_factor"}  # in errors
ACCEPTED: dict[str, tuple[float, ...]] = {
    "low_freq_factor": (1e-320, 1e-5),
    "beta_slow": (1e-5,),
    "attention_factor": (1e-320, 1e-5),
    "mscale": (0, 1e-320, 1e-5),
    "mscale_all_dim": (0, 1e-320, 1e-5),
}


def test_absurd_numbers_of_rope_are_refused_by_name_or_give_finite_frequencies() -> None:
    wrong = []
    for kind, fields in SCALINGS.items():
        for name, value in itertools.product((*fields, "rope_theta"), ABSURD):
            rope = {"rope_type": kind, "rope_theta": 5000.0, **fields, name: value}
            if name.startswith("mscale"):
                del rope["attention_factor"]
            by_layer = {"full_attention": rope, "sliding_attention": {"rope_theta": 9.0}}
            for model, parameters in (("llama", rope), ("gemma3_text", by_layer)):
                refused = ""
                try:
                    found = read(model, rope_parameters=parameters)
                    assert all(bool(torch.isfinite(table).all()) for table in build_model(found).buffers())
                except (ValueError, UsageError) as error:
                    refused = str(error)
                accepted = type(value) in (int, float) and value in ACCEPTED.get(name, ())
                named = name in refused or NAMES.get(name, name) in refused
                if (refused and accepted) or not (accepted or named):
                    wrong.append(f"{model}, {kind}, {name} = {value}: {refused}")
    assert not wrong, "\n".join(wrong)


def test_absurd_numbers_of_layers_are_refused_by_name_before_anything_is_made_of_them() -> None:
    names = {kind: "n_layer" if kind == "gpt2" else "num_hidden_layers" for kind in FAMILIES}
    rows = [(kind, f"{name} of its config.json is 1000000000000000") for kind, name in names.items()]
    assert_refused(rows, lambda kind: read(kind, **{names[kind]: 10**15, "layer_types": None}), ValueError)


def test_layers_and_experts_are_compared_with_the_tensors_before_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "build_empty_model", None)
    tensors = {"model.norm.weight": torch.ones(32)}
    with pytest.raises(ValueError, match="it claims 1,000 layers and has 1 tensors"):
        convert(config("llama", num_hidden_layers=1000), tensors)
    with pytest.raises(ValueError, match="it claims 3 layers of 900 experts and has 1 tensors"):
        convert(config("mixtral", num_local_experts=900), tensors)


def test_asking_for_a_name_loads_no_tensor() -> None:
    found = read("llama")
    shapes = {
        parameter.foreign: SimpleNamespace(
            dtype=torch.float32, shape=torch.Size(parameter.shape), load=lambda: pytest.fail("it was loaded")
        )
        for parameter in FAMILIES["llama"].parameters(found)
    }
    _, _, tensors = convert(config("llama"), shapes)
    assert "embedding.weight" in tensors and "nothing" not in tensors
    exported = ExportedTensors(FAMILIES["llama"], found, tensors)
    assert "model.embed_tokens.weight" in exported and "nothing" not in exported


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([10**30, -(10**400), 1e308, 2.5, 1e-9]),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(
        st.sampled_from(["rope_type", "factor", "rope_theta", "full_attention"]), st.integers(), max_size=2
    ),
)


@given(data=st.data(), kind=st.sampled_from(sorted(FAMILIES)))
def test_a_config_of_any_values_is_read_or_refused(data: st.DataObject, kind: str) -> None:
    values = config(kind)
    for name in data.draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=4)):
        values[name] = data.draw(VALUES)
    try:
        found = FAMILIES[kind].config(values)
    except (ValueError, UsageError):
        return
    assert isinstance(found, ModelConfig)
