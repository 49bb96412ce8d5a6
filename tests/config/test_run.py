"""Configurations: invalid values are errors that name the setting, and JSON gives an equal configuration."""

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.variants import small
from tinylm.config import run as run_config
from tinylm.config.jobs import JOBS, data_kinds, objective_for
from tinylm.config.model import ARCHITECTURES, ROPE_SCALINGS, ModelConfig, RopeScaling
from tinylm.config.run import AdapterConfig, DataConfig, RunConfig, RuntimeConfig, SpecialTokens, TokenizerConfig
from tinylm.config.training import Budget, TrainingConfig
from tinylm.config.validation import Range, check_settings, from_json, limits_of, non_defaults
from tinylm.errors import TinyLMError, UsageError
from tinylm.transformer.build import build_empty_model, build_model

INFINITE, NAN = math.inf, math.nan


def training(**choices: Any) -> TrainingConfig:
    plain: dict[str, Any] = {"budget": Budget(steps=10), "batch_size": 4, "micro_batch": 2, "lr": 1e-3}
    plain |= {"min_lr": 1e-4, "warmup": 0.1}
    return TrainingConfig(**{**plain, **choices})


def runtime(**choices: Any) -> RuntimeConfig:
    return RuntimeConfig(**{"device": "cpu", "dtype": "fp32", "compile": False, "threads": 2, **choices})


def adapter(**choices: Any) -> AdapterConfig:
    plain = {"base": "b", "base_digest": "d", "rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ("q_proj",)}
    return AdapterConfig(**{**plain, **choices})


def scaling(**choices: Any) -> RopeScaling:
    return RopeScaling(**{"kind": "yarn", "factor": 4.0, "original_context": 8, **choices})


def type_of(kind: Any, name: str) -> tuple[str, bool]:
    """The name of a field's type without None, and whether it can be None."""
    hint = typing.get_type_hints(kind)[name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return kinds[0].__name__ if isinstance(kinds[0], type) else str(kinds[0]), types.NoneType in kinds


def dataset(**choices: Any) -> DataConfig:
    """A DataConfig with an arbitrary value of the right type in each field except `kind`."""
    by_type: dict[str, Any] = {"str": "a", "int": 1, "float": 0.5, "tuple[str, ...]": ("a",), "bool": True}
    plain = {field.name: by_type[type_of(DataConfig, field.name)[0]] for field in dataclasses.fields(DataConfig)}
    return DataConfig(**{**plain, "kind": "text", "train_on": "last", **choices})


Invalid = tuple[Callable[..., object], dict[str, Any], str, tuple[str, ...]]


def each(make: Callable[..., object], names: str, values: tuple[Any, ...], *words: str) -> list[Invalid]:
    return [(make, {name: value}, f"`{name}`", words) for name in names.split() for value in values]


def outside(bounds: Range) -> tuple[Any, ...]:
    """Numbers outside of the range: next to its ends, and far beyond."""
    below = bounds.low if bounds.open_low else math.nextafter(bounds.low, -INFINITE)
    above = bounds.high if bounds.open_high else math.nextafter(bounds.high, INFINITE)
    return below, above, -1, 10**400, -(10**400), INFINITE, -INFINITE, NAN


LOCAL: dict[str, Any] = {"local_window": 3, "local_layers": (0,)}
PAIRS: dict[str, Any] = {"architecture": "encoder-decoder", "encoder_layers": 1}
MULTIPLIER: dict[str, Any] = {"attention_multiplier": 0.1, "attention_scale": False}

# A call that raises an error, its arguments, the setting that the message names, and other words of the message.
INVALID: list[Invalid] = [
    (small, {"head_dim": 5}, "`position`", ("even `head_dim`", "5 is odd")),
    *each(small, "rotary_dim", (3, 6), "even", "at most the head dimension (4)"),
    (small, {"position": "learned", "rotary_dim": 2}, "`rotary_dim`", ('`position="rope"`',)),
    (small, {"position": "none", "rope_scaling": scaling()}, "`rope_scaling`", ('`position="rope"`',)),
    (small, {"position": "learned", **LOCAL, "local_rope_theta": 9.0}, "`local_rope_theta`", ('`position="rope"`',)),
    (small, {"local_rope_theta": 9.0}, "`local_rope_theta`", ("needs `local_window`",)),
    (small, {**LOCAL, **PAIRS, "local_rope_theta": 9.0}, "`local_rope_theta`", ("decoders",)),
    (small, {"rope_theta": 1.0, "rope_scaling": scaling()}, "`rope_scaling`", ("yarn", "`rope_theta`", "above 1")),
    (small, {"norm": "none", "norm_epsilon": 1e-5}, "`norm_epsilon`", ('`norm="none"`',)),
    (small, {"norm": "layernorm", "norm_unit_offset": True}, "`norm_unit_offset`", ('`norm="rmsnorm"`',)),
    (small, {"norm_gain": False, "norm_unit_offset": True}, "`norm_unit_offset`", ("`norm_gain`",)),
    (small, {"norm_placement": "sandwich", "residual": False}, "`norm_placement`", ("`residual`",)),
    (small, {"parallel_residual": True, "residual": False}, "`parallel_residual`", ("`residual`",)),
    (small, {"parallel_residual": True, "norm_placement": "post"}, "`parallel_residual`", ('`norm_placement="pre"`',)),
    (small, {**PAIRS, "parallel_residual": True}, "`parallel_residual`", ("cross-attention",)),
    (small, MULTIPLIER, "`attention_multiplier`", ("`attention_scale=False`",)),
    *each(small, "normalise_top_k", (True, False), "`experts`"),
    (scaling, {"original_context": None}, "`original_context`", ("yarn",)),
    (scaling, {"kind": "llama3", "original_context": None}, "`original_context`", ("llama3",)),
    (scaling, {"low_freq_factor": 4.0}, "`low_freq_factor`", ("below `high_freq_factor` (4.0)",)),
    (scaling, {"beta_slow": 32.0}, "`beta_slow`", ("below `beta_fast` (32.0)",)),
    (scaling, {"kind": "llama3", "attention_factor": 1.5}, "`attention_factor`", ("yarn", "llama3")),
    (SpecialTokens, {"add_bos": True}, "`add_bos`", ("`bos`",)),
    (small, {"width": 18}, "`heads`", ("`width` (18)", "multiple of 4", "one of 1, 2, 3, 6, 9, 18,")),
    (small, {"kv_heads": 3}, "`kv_heads`", ("`heads` (4)", "one of 1, 2, 4")),
    (small, {"kv_heads": 8}, "`kv_heads`", ("`heads` (4)", "one of 1, 2, 4")),
    (small, {"width": 12}, "`position`", ("`width` 12", "`heads` 4", "is 3", "even", '`position="learned"`')),
    (small, {"width": 15, "heads": 1, "kv_heads": 1, "position": "sinusoidal"}, "`position`", ("even `width`", "15")),
    (small, {"experts": 3, "experts_per_token": 4}, "`experts_per_token`", ("at most `experts` (3)",)),
    (small, {"experts": 3, "experts_per_token": 1, "expert_mode": "merge"}, "`expert_mode`", ("2 or more",)),
    (small, {"local_window": 4}, "`local_window`", ("needs `local_layers`",)),
    (small, {"local_layers": (0,)}, "`local_layers`", ("needs `local_window`",)),
    (small, {"local_window": 0, "local_layers": (0,)}, "`local_window`", ("from 1 to",)),
    (small, {"local_window": 4, "local_layers": (0, 2)}, "`local_layers`", ("layer 2", "from 0 to 1")),
    (small, {"local_window": 4, "local_layers": (1, 1)}, "`local_layers`", ("twice",)),
    (small, {"architecture": "encoder", **LOCAL}, "`local_window`", ("bidirectional",)),
    (small, {"encoder_layers": 2}, "`encoder_layers`", ('`architecture="encoder-decoder"`', "`architecture` is dec")),
    (small, {"architecture": "encoder-decoder"}, "`architecture`", ("needs `encoder_layers`",)),
    *each(training, "average", (1e-320,), "from 1e-06 to 0.5"),
    (small, {"layers": 1024, "experts": 17}, "`layers`", ("`experts`", "17408", "at most 16384")),
    (small, {"context": 1 << 20, "width": 1024}, "`position`", ("`context` 1048576", "at most 33554432")),
    (small, {"context": 1 << 20, "width": 64, "position": "sinusoidal"}, "`position`", ("`context` 1048576",)),
    (small, {"layers": 1024, "width": 1 << 16, "ffn_width": 1 << 18}, "`width`", ("too large", "at most 1.1e+12")),
    (Budget, {}, "`steps`", ("`epochs`", "`time`")),
    (Budget, {"steps": 5, "time": 6.0}, "`steps`", ("`time`", "set one")),
    (Budget, {"steps": 5, "epochs": 1.0, "time": 6.0}, "`steps`", ("`epochs`", "`time`", "set one")),
    (training, {"min_lr": 0.1}, "`min_lr`", ("at most `lr` (0.001)",)),
    (training, {"warmup": 1.5}, "`warmup_steps`", ("fewer", "longer budget")),
    *((training, {"warmup": warmup}, "`warmup", ()) for warmup in (-0.1, INFINITE, NAN)),
    (training, {"micro_batch": 5}, "`micro_batch`", ("at most `batch_size` (4)",)),
    (adapter, {"targets": ()}, "`target`", ()),
]


def test_the_error_names_the_setting_and_the_allowed_values() -> None:
    wrong = []
    for make, choices, setting, words in INVALID:
        try:
            wrong.append(f"{choices} was accepted: {make(**choices)}")
        except UsageError as error:
            message = str(error)
            named = setting in message or f"{setting[:-1]}=" in message
            if not named or error.exit_code != 2 or not all(word in message for word in words):
                wrong.append(f"{choices}: {message}")
    assert not wrong, "\n".join(wrong)


MAKERS: dict[Any, Callable[..., object]] = {ModelConfig: small, RopeScaling: scaling, TrainingConfig: training}
MAKERS |= {RuntimeConfig: runtime, DataConfig: dataset, AdapterConfig: adapter}
MAKERS |= {kind: kind for kind in (SpecialTokens, Budget)}
NUMBERS = [
    (kind, field.name)
    for kind in (*MAKERS, TokenizerConfig, RunConfig)
    for field in dataclasses.fields(kind)
    if type_of(kind, field.name)[0] in ("int", "float")
]


def test_the_error_for_another_word_lists_the_allowed_ones() -> None:
    chosen = [(kind, name, words) for kind in MAKERS for name, words in limits_of(kind).items() if type(words) is tuple]
    assert {name for _, name, _ in chosen} >= {"position", "activation", "objective", "keep", "device", "dtype", "kind"}
    for kind, name, words in chosen:
        for value in ("x", "", None, 3):
            message = f"`{name}` is {value!r}; it must be one of: {', '.join(words)}."
            with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
                MAKERS[kind](**{name: value})


def test_every_number_of_a_configuration_has_a_range() -> None:
    for kind, name in NUMBERS:
        bounds = limits_of(kind)[name]
        assert isinstance(bounds, Range) and math.isfinite(bounds.low) and math.isfinite(bounds.high), name


def test_the_error_for_a_number_out_of_range_is_a_sentence() -> None:
    wrong = []
    for kind, name in [(kind, name) for kind, name in NUMBERS if kind in MAKERS and name != "warmup"]:
        for value in outside(limits_of(kind)[name]):
            try:
                wrong.append(f"{MAKERS[kind](**{name: value})} was accepted")
            except UsageError as error:
                if not re.search(rf"^`{name}` (is|can) .*; it must be .*\d\.$", str(error)) or len(str(error)) >= 200:
                    wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_texts_and_lists_that_are_too_long_and_truth_values_for_numbers_are_errors() -> None:
    for kind, make in MAKERS.items():
        for name in [field.name for field in dataclasses.fields(kind) if type_of(kind, field.name)[0] == "str"]:
            for value in ("x" * 5000, "a\0b", "\ud800"):
                with pytest.raises(UsageError, match=f"`{name}`"):
                    make(**{name: value})
    for make, name in ((adapter, "targets"), (small, "local_layers"), (dataset, "corpus")):
        with pytest.raises(UsageError, match=f"`{name}` has .* entries; it can have at most"):
            make(**{name: ("0",) * ((1 << 20) + 1)})
    for values in ({"lr": True}, {"average": False}, {"seed": True}):
        with pytest.raises(UsageError, match="it must be a number"):
            check_settings(TrainingConfig, values)
    for value in ("a" * 10**6, 10**5000, [[[]]] * 1000, {"a": 1}, b"x" * 1000):
        with pytest.raises(TypeError) as caught:
            from_json(float if isinstance(value, str) else str, value)
        assert len(str(caught.value)) < 120
    check_settings(TrainingConfig, {"out": "a" * 4096})


def test_approximate_parameters_are_those_of_the_model_without_norms_and_routers() -> None:
    for choices in (
        {"head_dim": 80, "tie": False},
        {"experts": 3},
        {"position": "relative", "activation": "geglu"},
        {"architecture": "encoder-decoder", "encoder_layers": 3, "position": "learned", "activation": "gelu"},
    ):
        config = small(**{"vocab_size": 300, "width": 64, "ffn_width": 128, **choices})
        parameters = build_empty_model(config).named_parameters()
        counted = sum(p.numel() for name, p in parameters if "norm" not in name and "router" not in name)
        assert 0.8 * config.approximate_parameters <= counted <= config.approximate_parameters * 1.001, choices


def test_values_at_the_bounds_are_valid() -> None:
    for make, choices in (
        (small, {"dropout": 0.0, "rope_theta": 1.0, "vocab_size": 1}),
        (small, {"layers": 94, "experts": 128, "experts_per_token": 8}),
        (small, {"context": 262_144, "heads": 32, "kv_heads": 8, "width": 4096}),
        (small, {"width": 15, "heads": 1, "kv_heads": 1, "position": "learned"}),
        (small, {"width": 12, "position": "sinusoidal"}),
        (small, {"width": 18, "head_dim": 6}),
        (small, {"head_dim": 5, "rotary_dim": 4}),
        (SpecialTokens, {"add_bos": True, "bos": "<s>", "eos": ("</s>", "<end>")}),
        (training, {"min_lr": 1e-3, "warmup": 0.0, "weight_decay": 0.0, "grad_clip": 0.0, "seed": 0, "beta1": 0.0}),
        (training, {"micro_batch": 4, "warmup": 1.0, "patience": 1, "eval_tokens": 1}),
        (Budget, {"epochs": 0.01}),
    ):
        made: Any = make(**choices)
        assert {name: getattr(made, name) for name in choices} == choices


def test_a_budget_has_a_kind_and_a_number_of_steps() -> None:
    """Three epochs of 100 tokens at 32 tokens per step are 9.4 steps, rounded up."""
    assert [Budget(**{kind: 3}).kind for kind in ("steps", "epochs", "time")] == ["steps", "epochs", "time"]
    assert Budget(steps=7).total_steps(100 / 32) == 7
    assert Budget(epochs=3).total_steps(100 / 32) == 10
    assert Budget(epochs=3).total_steps(3) == 9
    assert Budget(epochs=0.01).total_steps(100 / 32) == 1
    assert Budget(time=60).total_steps(100 / 32) is None


# To JSON and back

SECTIONS: dict[str, Any] = {"data": dataset(), "training": training(), "runtime": runtime(), "adapter": adapter()}
TOKENIZER = TokenizerConfig(kind="bpe", sha256="0")
VALID = RunConfig(version="1", created="now", model=small(), tokenizer=TOKENIZER, **SECTIONS)


def document(*path: str, value: object = None) -> Any:
    """A valid configuration as JSON values, with the value at a path replaced, or removed where it is `...`."""
    values = inner = json.loads(json.dumps(VALID.to_json()))
    for name in path[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[path[-1]]
    elif path:
        inner[path[-1]] = value
    return values


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def values_of(owner: Any, field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    """Values of the type and range of a field."""
    kind, optional = type_of(owner, field.name)
    found: st.SearchStrategy[Any]
    if isinstance(words := limits_of(owner).get(field.name), tuple):
        found = st.sampled_from(words)
    elif kind == "RopeScaling":
        found = st.builds(scaling, kind=st.sampled_from(ROPE_SCALINGS), factor=st.floats(1.5, 100))
    elif kind in ("int", "float"):
        bounds = limits_of(owner)[field.name]
        ends: dict[str, Any] = {"min_value": bounds.low, "max_value": min(bounds.high, 1 << 60)}
        whole = st.integers(**{name: int(value) for name, value in ends.items()})
        found = whole if kind == "int" else st.floats(**ends, exclude_min=bounds.open_low, exclude_max=bounds.open_high)
    else:
        found = {"str": TEXT, "bool": st.booleans()}.get(kind, st.lists(TEXT, max_size=3).map(tuple))
    return st.none() | found if optional else found


PARTS = {
    "model": ModelConfig, "data": DataConfig, "training": TrainingConfig, "runtime": RuntimeConfig,
    "adapter": AdapterConfig, "": RunConfig,
}  # fmt: skip
DRAWN = [
    st.tuples(st.just(part), st.just(field.name), values_of(PARTS[part], field))
    for part, kind in PARTS.items()
    for field in dataclasses.fields(kind)
    if field.name != "format"
    and type_of(kind, field.name)[0] in ("int", "float", "str", "bool", "tuple[str, ...]", "RopeScaling")
]


@given(changes=st.lists(st.one_of(DRAWN), min_size=3, max_size=8))
@settings(deadline=None, max_examples=150)
def test_every_valid_run_configuration_is_equal_after_json(changes: list[tuple[str, str, Any]]) -> None:
    run = VALID
    for part, name, value in changes:
        try:
            inner = {part: dataclasses.replace(getattr(run, part), **{name: value})} if part else {name: value}
            run = dataclasses.replace(run, **inner)
        except UsageError:
            continue
    assert RunConfig.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_the_preferred_objective_is_chosen_if_it_fits_and_parts_that_do_not_fit_are_an_error() -> None:
    for architecture in ARCHITECTURES:
        assert data_kinds(architecture)[0] == ("pairs" if architecture == "encoder-decoder" else "text")
        for kind in data_kinds(architecture):
            chosen = JOBS[objective_for(architecture, kind)]
            assert chosen.data == kind and architecture in chosen.architectures
        assert data_kinds(architecture, has_labels=True) == (("labels",) if "-" not in architecture else ())
    assert objective_for("decoder", "chat", "chat") == "chat"
    assert objective_for("decoder", "text", "chat") == "next-token"
    with pytest.raises(UsageError, match='`architecture="encoder"` cannot be trained on pairs'):
        objective_for("encoder", "pairs", "masked-token")
    for objective in ("masked-token", "sequence-to-sequence"):
        with pytest.raises(UsageError, match=f"objective {objective} does not fit"):
            dataclasses.replace(VALID, training=training(objective=objective))
    for growth, kind, length, message in (
        (3, "text", None, "must be 1, 2 or 4"),
        (2, "chat", None, "is for plain text"),
        (4, "text", 6, "must divide"),
    ):
        chosen = {"objective": objective_for("decoder", kind), "sequence_growth": growth, "sequence_length": length}
        with pytest.raises(UsageError, match=f"`sequence_growth` .*{message}"):
            dataclasses.replace(VALID, data=dataset(kind=kind), training=training(**chosen))


def test_an_integer_is_read_as_a_float() -> None:
    for former, value in (("r_drop", 0.0), ("log_gradients", True)):
        assert RunConfig.from_json(document("training", former, value=value)) == VALID, "as written by an older version"
    run = RunConfig.from_json(document("training", "budget", value={"steps": None, "epochs": 3, "time": None}))
    assert isinstance(run.training.budget.epochs, float)


WRONG: dict[tuple[str, ...], tuple[object, ...]] = {
    ("surprise",): (1,),
    ("model", "surprise"): (1,),
    ("training", "budget", "surprise"): (1,),
    ("model",): (..., None, [], "modern"),
    ("version",): (...,),
    ("data", "fingerprint"): (...,),
    ("model", "width"): (..., "16", 16.0, True, None, 10**400),
    ("model", "tie"): (1,),
    ("model", "position"): (3, "fourier"),
    ("model", "rope_theta"): ("10000", 10**400),
    ("model", "dropout"): (False,),
    ("model", "kv_heads"): (3,),
    ("model", "layers"): (1 << 20,),
    ("model", "experts"): (1 << 20,),
    ("model", "local_layers"): (list(range(1 << 12)),),
    ("training", "patience"): (1.5,),
    ("training", "budget"): (10,),
    ("training", "lr"): (-1.0,),
    ("data", "corpus"): (5, None, "a.txt", {"a.txt": 1}, [1, None], ["a\0b"]),
    ("data", "kind"): ("pairs",),
    ("data", "train_tokens"): (-1,),
    ("runtime", "threads"): (0, -1),
    ("runtime", "device"): ("/dev/null",),
    ("adapter", "targets"): ([],),
    ("adapter", "base"): ("x" * 10_000,),
    ("merged",): (["0"] * 2000,),
    ("format",): (..., None, 0, True, 1.5, "1"),
}


def test_a_document_with_unknown_keys_or_wrong_values_is_an_error() -> None:
    assert RunConfig.from_json(document()) == VALID
    forged = [document(*path, value=value) for path, values in WRONG.items() for value in values]
    values = [None, [], "text", 3, {}, *forged]
    for value in values:
        with pytest.raises(TinyLMError, match="it is not a tinylm run configuration"):
            RunConfig.from_json(value)


def test_the_error_says_what_is_wrong_in_the_document() -> None:
    """Of a newer format it says nothing else; numbers of many digits are not in it."""
    newer = run_config.FORMAT + 1
    message = f"format {newer}, this one reads {run_config.FORMAT}.*upgrade tinylm"
    for values, words in (
        (document("format", value=newer), message),
        ({"format": newer, "surprise": 1}, message),
        ({"format": 10**4000}, "format a number of more than 40 digits, this one reads"),
        ({**document(), "surprise": 1, "oddity": 2}, "unknown: oddity, surprise"),
        (document("model", "width", value="16"), "expected int, found '16'"),
    ):
        with pytest.raises(TinyLMError, match=words) as caught:
            RunConfig.from_json(values)
        assert caught.value.exit_code == 1
    with pytest.raises(UsageError, match="`local_layers` names layer a number of more than 40 digits; layers are"):
        small(local_window=4, local_layers=(10**4000,))


def test_non_defaults_are_the_same_in_a_later_version_with_more_fields() -> None:
    """The digest of the weights includes them, and must stay valid."""
    later = dataclasses.make_dataclass("Later", [("more", int, 7)], bases=(ModelConfig,), frozen=True, kw_only=True)
    values = {"vocab_size": 9, "context": 8, "layers": 1, "heads": 2, "kv_heads": 2, "width": 8, "ffn_width": 8}
    for changes in ({}, {"position": "learned"}, {"dropout": 0.5, "local_window": 3, "local_layers": (0,)}):
        for kind in (later, ModelConfig):
            assert non_defaults(kind(**values, **changes)) == values | changes
    assert non_defaults(later(**values, more=8)) == values | {"more": 8}


def test_the_head_dimension_is_filled_in_and_is_not_a_default_only_where_it_is_independent() -> None:
    """The digest of the weights of older runs, which had no such field, stays valid."""
    assert small().head_dim == small(head_dim=4).head_dim == 4
    assert small() == small(head_dim=4) == small(head_dim=None)
    assert "head_dim" not in non_defaults(small(head_dim=4))
    assert non_defaults(small(head_dim=6))["head_dim"] == 6
    assert small(width=18, head_dim=4).head_dim == 4
    values = RunConfig.from_json(document("model", "head_dim", value=...))
    assert values.model == small()
    config = small(rope_scaling=RopeScaling(kind="yarn", factor=2.0, original_context=64))
    assert non_defaults(config)["rope_scaling"] == {"kind": "yarn", "factor": 2.0, "original_context": 64}


ODD: tuple[Any, ...] = (None, True, False, 0, 1, 2, 3, 6, 7, 1 << 20, -1, 0.0, 1e-9, 0.5, 1.0, 1e9, NAN, INFINITE, "")
ODD += ("yarn", "llama3", "sandwich", "post", "none", "rmsnorm", "layernorm", "learned", "geglu", (), (0,), (0, 1), {})
ODD += ({"kind": "yarn", "factor": 2.0}, {"kind": "yarn", "factor": 2.0, "original_context": 1}, {"kind": "linear"})
ODD += ({"kind": "llama3", "factor": 1e6, "original_context": 3}, {"kind": "linear", "factor": 1.5})


@given(
    forged=st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(ModelConfig)]), st.sampled_from(ODD), max_size=6
    )
)
@settings(deadline=None, max_examples=400)
def test_a_forged_model_is_refused_or_can_be_built_and_computes(forged: dict[str, Any]) -> None:
    """Refused with a sentence, as a run's config.json is; a model of a few thousand weights also runs."""
    values = document()
    values["model"] |= json.loads(json.dumps(forged))
    try:
        config = RunConfig.from_json(values).model
    except TinyLMError as error:
        assert str(error).startswith("it is not a tinylm run configuration")
        return
    if config.approximate_parameters < 50_000 and config.context < 10_000 and config.experts < 10:
        model = build_model(config)
        assert model.probe(torch.tensor([[0, config.vocab_size - 1]])[:, : config.context]).hidden.shape[0] == 1
    elif config.context < 10_000:
        build_empty_model(config)
