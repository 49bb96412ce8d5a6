"""Adapter folders of PEFT that are damaged, unusual or hostile: errors that name what is wrong."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch

from tests.formats.peers import edit_json, make_peer
from tests.formats.peft_adapters import make_adapter
from tests.formats.refusals import assert_refused
from tinylm.config.model import ModelConfig
from tinylm.errors import TinyLMError
from tinylm.formats import peft
from tinylm.formats.families import FAMILIES
from tinylm.formats.peft import Pattern

Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARSED: dict[str, ModelConfig] = {}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of a Llama and of a Mixtral."""
    folders = {}
    fields: dict[str, dict[str, Any]] = {
        "llama": {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["norm"]},
        "mixtral": {"target_modules": ["w1", "w2", "w3", "gate"]},
    }
    for case, choices in fields.items():
        folders[case] = tmp_path_factory.mktemp("adapter")
        peer = make_peer(case)
        PARSED[case] = FAMILIES[case].config(peer.config.to_diff_dict())
        make_adapter(peer, folders[case], **choices)
    return folders


@pytest.fixture
def folder(made: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the adapter of the Llama."""
    return shutil.copytree(made["llama"], tmp_path / "adapter")


def read(folder: Path, case: str = "llama") -> peft.ForeignAdapter:
    return peft.read_adapter(folder, FAMILIES[case], PARSED[case])


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Replace tensors by name; `None` removes one."""
    tensors = {**safetensors.torch.load_file(folder / WEIGHTS), **changes}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    safetensors.torch.save_file(kept, folder / WEIGHTS, {"format": "pt"})


def assert_forged_refused(folder: Path, rows: list[tuple[Any, str]], forge: Callable[[Any], object]) -> None:
    """For each row (argument of `forge`, message), the forged adapter is refused; the error names its folder."""
    copy = shutil.copytree(folder, folder.with_name("copy"))

    def attempt(change: Any) -> None:
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        forge(change)
        read(folder)

    assert_refused([(change, f"{folder}.*({message})") for change, message in rows], attempt)


def test_an_adapter_is_read_by_our_names(folder: Path) -> None:
    """A folder with a run of tinylm is not an adapter of PEFT."""
    adapter = read(folder)
    layers = {f"layers.{i}.attention.q_proj" for i in range(3)}
    assert adapter.updates.keys() == {*layers, "embedding"}
    assert adapter.updates["embedding"].A.shape == (3, 300) and adapter.updates["embedding"].scale == 5 / 3
    norms = {f"layers.{i}.{name}.weight" for i in range(3) for name in ("attention_norm", "feedforward_norm")}
    assert adapter.replaced.keys() == {*norms, "norm.weight"}
    assert adapter.stored.keys() == {"embedding.weight"}
    assert len(peft.adapter_digest(folder)) == 64
    assert peft.is_adapter_folder(folder)
    (folder / "config.json").write_text("{}")
    assert not peft.is_adapter_folder(folder) and not peft.is_adapter_folder(folder / "nothing")


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type of its adapter_config.json is 'IA3'; tinylm supports \"LORA\""),
    ({"peft_type": ...}, "lacks peft_type"),
    ({"task_type": "SEQ_CLS"}, "task_type .* 'SEQ_CLS'"),
    ({"use_dora": True}, "use_dora .* True; tinylm supports false"),
    ({"use_qalora": True}, "use_qalora"),
    ({"lora_bias": True}, "lora_bias"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ({"trainable_token_indices": [5]}, "trainable_token_indices"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"kasa_config": {}}, "kasa_config"),
    ({"megatron_config": {"a": 1}}, "megatron_config"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights .* 'pissa_niter_4'"),
    ({"init_lora_weights": "olora"}, "init_lora_weights"),
    ({"frequency": 3}, "fields that tinylm does not know: 'frequency'"),
    ({"frequency": 0, "off": False}, "fields that tinylm does not know: 'frequency'[.]"),
    ({"frequency": {}}, "fields that tinylm does not know: 'frequency'"),
    ({"r": "8"}, "r of its adapter_config.json is '8'"),
    ({"r": 0}, "r of its"),
    ({"r": 4}, "have the rank 3; its adapter_config.json has 4"),
    ({"r": True}, "r of its"),
    ({"lora_alpha": "16"}, "lora_alpha"),
    ({"lora_alpha": 10**400}, "lora_alpha"),
    ({"use_rslora": 1}, "use_rslora"),
    ({"bias": "some"}, "bias"),
    ({"bias": ["all"]}, "bias"),
    ({"modules_to_save": "norm"}, "modules_to_save"),
    ({"modules_to_save": [1]}, "modules_to_save"),
    ({"modules_to_save": ["norm", "lm_head"]}, r"lacks the tensor lm_head\.weight, which modules_to_save"),
    ({"modules_to_save": None}, r"tensor model\.layers\..*norm\.weight is unexpected"),
    ({"rank_pattern": [3]}, "rank_pattern"),
    ({"rank_pattern": {"q_proj": "3"}}, "q_proj of its adapter_config.json"),
    ({"rank_pattern": {"q_proj": 2}}, "have the rank 3; its adapter_config.json has 2"),
    ({"alpha_pattern": {"(?=q)": 3}}, "pattern of module names .* is not supported"),
    ({"alpha_pattern": {"(": 3}}, "pattern of module names .* is not supported"),
    ({"alpha_pattern": {"(a+)+b": 3}}, "pattern of module names '.a....' is not supported"),
    ({"alpha_pattern": {"x" * 5000: 3}}, "is not supported; a pattern is text of at most 200 characters"),
    ({"target_parameters": "experts"}, "target_parameters"),
    ({"auto_map": {"AutoModel": "code.Model"}}, "'auto_map'"),
]


def test_a_config_that_is_not_that_of_a_plain_lora_no_object_or_too_large_is_refused(folder: Path) -> None:
    def forge(change: dict[str, Any] | str) -> None:
        if isinstance(change, str):
            (folder / CONFIG).write_bytes(change.encode("latin-1"))
        else:
            edit_json(folder / CONFIG, **change)

    contents = ("", "[1]", "null", "{", "NaN", '{"r": NaN}', "[" * 100_000, '"x"', "\xff", '{"r": "\\ud800"}')
    rows = [(content, CONFIG) for content in contents] + [(json.dumps({"x": "y" * (1 << 23)}), "larger than")]
    assert_forged_refused(folder, [*CONFIGS, *rows], forge)


def test_fields_without_effect_and_missing_fields_are_accepted(folder: Path) -> None:
    expected = read(folder)
    edit_json(
        folder / CONFIG,
        base_model_name_or_path="../../elsewhere",
        auto_mapping={"base_model_class": "X", "parent_library": "os"},
        target_modules="(a+)+$",
        exclude_modules="(b+)+$",
        lora_dropout=0.5,
        fan_in_fan_out=True,
        rank_pattern=...,
        alpha_pattern=None,
        megatron_core=None,
        runtime_config=...,
        feature_of_a_newer_version=None,
        use_feature_of_a_newer_version=False,
    )
    assert read(folder).updates.keys() == expected.updates.keys()
    assert peft.read_base_name(folder) == "../../elsewhere"


TENSORS: list[tuple[dict[str, Any], str]] = [
    ({f"{Q}.lora_A.weight": None}, "the tensors of .*q_proj are not"),
    ({f"{Q}.lora_A.weight": torch.zeros(3, 31)}, r"lora_A has the shape \[3, 31\]; .* \[3, 32\]"),
    ({f"{Q}.lora_B.weight": torch.zeros(32, 4)}, r"lora_B has the shape \[32, 4\]"),
    ({f"{Q}.lora_A.weight": torch.zeros(0, 32), f"{Q}.lora_B.weight": torch.zeros(32, 0)}, "is empty"),
    ({f"{Q}.lora_A.weight": torch.zeros(())}, "has the shape"),
    ({f"{Q}.lora_A.weight": torch.zeros(3, 32).long()}, "is not of the type"),
    ({f"{Q}.lora_A.weight": torch.full((3, 32), float("nan"))}, "not finite"),
    ({f"{Q}.lora_B.bias": torch.zeros(32)}, "a variant of LoRA"),
    ({f"{Q}.lora_magnitude_vector": torch.zeros(32)}, "a variant of LoRA"),
    ({f"{Q}.lora_embedding_A": torch.zeros(3, 32)}, "the tensors of .* are not lora_A"),
    ({"lm_head.lora_A.weight": torch.zeros(3, 32)}, "does not begin with base_model"),
    ({"base_model.model.x.lora_A.weight": torch.zeros(3, 32)}, "adapts x, which is not a matrix"),
    ({"base_model.model.model.norm.lora_A.weight": torch.zeros(3, 32)}, "which is not a matrix"),
    ({"base_model.model.score.weight": torch.zeros(2, 32)}, r"tensor score\.weight is unexpected"),
    ({f"{Q}.base_layer.bias": torch.zeros(32)}, "is unexpected"),
    ({"base_model.model.model.norm.weight": torch.zeros(31)}, r"norm\.weight has the shape"),
    ({"base_model.model.model.norm.weight": None}, r"lacks the tensor model\.norm\.weight"),
    ({"base_model.model.model.embed_tokens.base_layer.weight": torch.zeros(301, 32)}, r"has the shape \[301, 32\]"),
]


def test_tensors_that_do_not_fit_are_refused(folder: Path) -> None:
    assert_forged_refused(folder, TENSORS, lambda changes: edit_tensors(folder, **changes))


def test_stacked_experts_of_other_shapes_or_parameters_are_refused(made: dict[str, Path], tmp_path: Path) -> None:
    assert len(read(made["mixtral"], "mixtral").updates) == 3 * (4 * 3 + 1)
    assert peft.summarise_adapter(made["mixtral"]).modules == ("experts", "gate")
    experts = "base_model.model.model.layers.0.mlp.experts"
    for rows, message in ((13, "lora_A has the shape"), (3, "lora_A has the shape|is empty")):
        folder = shutil.copytree(made["mixtral"], tmp_path / str(rows))
        edit_tensors(folder, **{f"{experts}.lora_A.weight": torch.zeros(rows, 48)})
        with pytest.raises(TinyLMError, match=message):
            read(folder, "mixtral")
    folder = shutil.copytree(made["mixtral"], tmp_path / "other")
    edit_json(folder / CONFIG, target_parameters=["down_proj"])
    with pytest.raises(TinyLMError, match="which is not a matrix of the base model"):
        read(folder, "mixtral")


def test_pickles_links_special_files_and_damaged_files_are_not_opened(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes((folder / WEIGHTS).read_bytes())

    def forge(change: tuple[str, str | int]) -> None:
        name, kind = change
        path = folder / name
        if isinstance(kind, int):
            path.write_bytes(path.read_bytes()[:kind])
            return
        path.unlink()
        if kind == "pickle":
            (folder / "adapter_model.bin").touch()
        elif kind == "link":
            path.symlink_to(outside)
        elif kind == "FIFO":
            os.mkfifo(path)
        elif kind == "empty":
            edit_json(folder / CONFIG, modules_to_save=None)
            safetensors.torch.save_file({}, path, {"format": "pt"})

    rows: list[tuple[tuple[str, str | int], str]] = [
        *(((name, "link"), "is a link out of the folder, which is not followed") for name in (CONFIG, WEIGHTS)),
        *(((name, "FIFO"), "cannot be read") for name in (CONFIG, WEIGHTS)),
        *(((WEIGHTS, length), "damaged or not a safetensors file") for length in (0, 4, 100, 1000)),
        ((WEIGHTS, "pickle"), "adapter_model.bin is a pickle, which can run code and is never opened"),
        ((WEIGHTS, "nothing"), "adapter_model.safetensors cannot be read"),
        ((WEIGHTS, "empty"), "no tensors of an adapter"),
    ]
    assert_forged_refused(folder, rows, forge)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40, deadline=None)
def test_any_value_of_any_field_is_read_or_refused_with_an_error(
    data: st.DataObject, made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = data.draw(st.sampled_from(["llama", "mixtral"]))
    folder = shutil.copytree(made[case], tmp_path_factory.mktemp("fuzz") / "adapter")
    field = data.draw(st.sampled_from(sorted(json.loads((folder / CONFIG).read_text()))))
    edit_json(folder / CONFIG, **{field: data.draw(JSON)})
    try:
        read(folder, case)
    except TinyLMError as error:
        assert "\n" not in str(error)


NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.layers.11.mlp.experts.3.down_proj",
    "transformer.h.10.attn.c_attn",
    "lm_head",
]
PATTERNS = [
    *("q_proj", "proj", "c.attn", r"mlp\.experts", "^model.layers.0.self_attn.q_proj", r".*\.gate_up_proj", ""),
    *(
        "(q_proj|lm_head)",
        "(?:0|11).*down_proj",
        ".*attn.*",
        r"layers\.(0|1)\..*",
        r"h\.[01][0-9]\.",
        r"layers\.\d+\.mlp.*",
        "self_attn.q_proj$",
        "^lm_head$",
    ),
]


def test_patterns_match_the_names_that_peft_matches_with_them_and_the_first_of_several_counts() -> None:
    for pattern in PATTERNS:
        found = [name for name in NAMES if Pattern({pattern: 3.0}).value(name, 8.0) == 3.0]
        assert found == [name for name in NAMES if re.match(rf"(.*\.)?({pattern})$", name)], pattern
    several = Pattern({"k_proj": 1.0, r".*attn\..*": 2.0, "q_proj": 3.0})
    assert [several.value(name, 8.0) for name in NAMES[:2]] == [2.0, 8.0]


def test_patterns_that_may_take_exponential_time_are_refused_and_all_matches_together_are_limited() -> None:
    for pattern in (
        "(a+)+b",
        "(((a*)*)*)*b",
        "(a|a)(a|a)",
        "(a|a)*",
        ".*.*.*",
        "a{99}",
        r"(a)\1",
        "[^a]",
        "[z-a]",
        r"\d+",
        "[a]+",
        "(",
        "a)",
        "*",
    ):
        with pytest.raises(ValueError, match="is not supported"):
            Pattern({pattern: 3.0})
    slowest = {f".*({'|'.join(['.'] * 80)}).*b{number}": 3.0 for number in range(1000)}
    with pytest.raises(ValueError, match="take too long to match"):
        Pattern(slowest).value("." * 200, 8.0)
    names = [f"model.layers.{layer}.mlp.{part}_proj" for layer in range(100) for part in ("up", "gate", "down")]
    every = Pattern({name: float(number) for number, name in enumerate(names)})
    assert [every.value(name, 8.0) for name in names] == list(range(300))
    with pytest.raises(ValueError, match="201 characters"):
        every.value("a" * 201, 8.0)
