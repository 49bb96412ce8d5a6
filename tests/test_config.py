import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.variants import small
from tinylm import config as c
from tinylm import presets
from tinylm.checks import RANGES, Range, check_values, flag
from tinylm.errors import TinyLMError, UsageError
from tinylm.model.build import build_empty_model
from tinylm.records import chosen, from_json

INFINITE, NAN = math.inf, math.nan


def training(**choices: Any) -> c.TrainingConfig:
    plain: dict[str, Any] = {
        "budget": c.Budget(steps=10),
        "batch_size": 4,
        "micro_batch": 2,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "warmup": 0.1,
    }
    return c.TrainingConfig(**{**plain, **choices})


def runtime(**choices: Any) -> c.RuntimeConfig:
    return c.RuntimeConfig(**{"device": "cpu", "dtype": "fp32", "compile": False, "threads": 2, **choices})


def adapter(**choices: Any) -> c.AdapterConfig:
    plain = {"base": "b", "base_digest": "d", "rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ("q_proj",)}
    return c.AdapterConfig(**{**plain, **choices})


def dataset(**choices: Any) -> c.DataConfig:
    """Any value of the right type will do, but for the kind."""
    by_type: dict[str, Any] = {
        "str": "a",
        "int": 1,
        "float": 0.5,
        "tuple[str, ...]": ("a",),
        "bool": True,
        "str | None": "a",
    }
    plain = {field.name: by_type[str(field.type)] for field in dataclasses.fields(c.DataConfig)}
    return c.DataConfig(**{**plain, "kind": "text", **choices})


def made(**choices: Any) -> c.ModelConfig:
    return presets.make_model_config(**{"vocab_size": 50, "preset": "modern", "size": "nano", **choices})


Refusal = tuple[Callable[..., object], dict[str, Any], str, tuple[str, ...]]


def each(make: Callable[..., object], names: str, values: tuple[Any, ...], *words: str) -> list[Refusal]:
    return [(make, {name: value}, flag(name), words) for name in names.split() for value in values]


def outside(bounds: Range) -> tuple[Any, ...]:
    """Numbers that are not in the range: next to its ends, and far away."""
    below = bounds.least if bounds.open_start else math.nextafter(bounds.least, -INFINITE)
    above = bounds.most if bounds.open_end else math.nextafter(bounds.most, INFINITE)
    return below, above, -1, 10**400, -(10**400), INFINITE, -INFINITE, NAN


# Who refuses, what it is given, the flag that the message opens the way to, and the words that say what is allowed.
REFUSALS: list[Refusal] = [
    *each(small, "position", ("alibi", ""), "rope, learned, sinusoidal"),
    *each(small, "norm", ("batchnorm",), "rmsnorm, layernorm"),
    *each(small, "norm_placement", ("middle",), "pre, post"),
    *each(small, "activation", ("tanh",), "swiglu, gelu, relu"),
    *each(small, "initialisation", ("zero",), "modern, gpt2, original"),
    (small, {"width": 18}, "--heads", ("--width 18", "multiple of 4", "1, 2, 3, 6, 9, 18 heads")),
    (small, {"kv_heads": 3}, "--kv-heads", ("--heads 4", "one of 1, 2, 4")),
    (small, {"kv_heads": 8}, "--kv-heads", ("--heads 4", "one of 1, 2, 4")),
    (small, {"width": 12}, "--position", ("--width 12", "--heads 4", "3 a head", "even", "--position learned")),
    (small, {"width": 15, "heads": 1, "kv_heads": 1, "position": "sinusoidal"}, "--position", ("even --width", "15")),
    *each(small, "architecture", ("rnn",), "decoder, encoder, encoder-decoder"),
    *each(small, "expert_mode", ("sum",), "route, merge"),
    (small, {"experts": 3, "experts_per_token": 4}, "--experts-per-token", ("--experts 3",)),
    (small, {"experts": 3, "experts_per_token": 1, "expert_mode": "merge"}, "--expert-mode", ("2 or more",)),
    (small, {"local_window": 4}, "--local-window", ("needs --local-layers",)),
    (small, {"local_layers": (0,)}, "--local-layers", ("needs --local-window",)),
    (small, {"local_window": 0, "local_layers": (0,)}, "--local-window", ("from 1 to",)),
    (small, {"local_window": 4, "local_layers": (0, 2)}, "--local-layers", ("layer 2", "from 0 to 1")),
    (small, {"local_window": 4, "local_layers": (1, 1)}, "--local-layers", ("twice",)),
    (small, {"architecture": "encoder", "local_window": 4, "local_layers": (0,)}, "--local-window", ("look back",)),
    (small, {"encoder_layers": 2}, "--encoder-layers", ("--architecture encoder-decoder", "--architecture is decoder")),
    (small, {"architecture": "encoder-decoder"}, "--architecture", ("needs --encoder-layers",)),
    (made, {"preset": "huge"}, "--preset", ("modern, gpt2, original",)),
    (made, {"size": "huge"}, "--size", ("nano, micro, tiny, mini, small, medium, base",)),
    *each(made, "width heads kv_heads layers context ffn_width", (0, -2), "from 1 to"),
    *each(training, "average", (1e-320,), "from 1e-06 to 0.5"),
    *each(runtime, "device", ("tpu", ""), "cuda, mps, cpu"),
    *each(dataset, "kind", ("image",), "text, pairs"),
    (small, {"layers": 1024, "experts": 17}, "--layers", ("--experts", "17408", "at most 16384")),
    (small, {"context": 1 << 20, "width": 1024}, "--position", ("--context 1048576", "at most 33554432")),
    (small, {"context": 1 << 20, "width": 64, "position": "sinusoidal"}, "--position", ("--context 1048576",)),
    (small, {"layers": 1024, "width": 1 << 16, "ffn_width": 1 << 18}, "--width", ("too large", "at most 1.1e+12")),
    (made, {"heads": 5}, "--heads", ("--width 96", "1, 2, 3, 4, 6")),
    (made, {"width": 33}, "--position", ("--width 33", "even", "--position learned")),
    *each(made, "relative_clip", (16, 3), "--position relative", "leave it out"),
    (made, {"rope_theta": 1e4, "position": "learned"}, "--rope-theta", ("--position rope", "leave it out")),
    (made, {"local_window": 64, "context": 64}, "--local-window", ("a --context above 64", "leave it out")),
    (made, {"experts_per_token": 2}, "--experts-per-token", ("--experts", "leave it out")),
    (made, {"expert_mode": "merge", "experts": 1}, "--expert-mode", ("--experts", "leave it out")),
    (made, {"expert_balance": 0.1}, "--expert-balance", ("--experts", "leave it out")),
    (made, {"expert_balance": 0.1, "experts": 2}, "--expert-balance", ("more --experts than --experts-per-token",)),
    (made, {"relative_clip": 99, "position": "relative"}, "--relative-clip", ("a --context of at least 99",)),
    (made, {"norm": "none", "norm_bias": True}, "--norm-bias", ("a --norm", "leave it out")),
    (c.Budget, {}, "--steps", ("--epochs", "--time")),
    (c.Budget, {"steps": 5, "time": 6.0}, "--steps", ("--time", "give one")),
    (c.Budget, {"steps": 5, "epochs": 1.0, "time": 6.0}, "--steps", ("--epochs", "--time", "give one")),
    (training, {"min_lr": 0.1}, "--min-lr", ("--lr 0.001",)),
    (training, {"warmup": 1.5}, "--warmup-steps", ("fewer", "longer budget")),
    *each(training, "schedule", ("sudden",), "trapezoid, cosine, linear, inverse-sqrt, constant"),
    *each(training, "optimizer", ("sgd",), "adamw, adam"),
    (training, {"micro_batch": 5}, "--micro-batch", ("--batch-size 4",)),
    *each(runtime, "dtype", ("int8",), "fp32, bf16, fp16"),
    (adapter, {"targets": ()}, "--target", ()),
]


@pytest.mark.parametrize(
    ("make", "choices", "flag", "words"),
    REFUSALS,
    ids=[f"{make.__name__}-{'-'.join(f'{k}={v}' for k, v in choices.items())}" for make, choices, *_ in REFUSALS],
)
def test_a_refusal_names_the_flag_and_what_is_allowed(
    make: Callable[..., object], choices: dict[str, Any], flag: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        make(**choices)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert f"{flag} " in message or f"{flag}:" in message or f"{flag}," in message
    for word in words:
        assert word in message


CONFIGURATIONS = (
    c.ModelConfig,
    c.Budget,
    c.TrainingConfig,
    c.RuntimeConfig,
    c.DataConfig,
    c.TokenizerConfig,
    c.AdapterConfig,
    c.RunConfig,
)
MAKERS: dict[type, Callable[..., object]] = {
    c.ModelConfig: small,
    c.Budget: c.Budget,
    c.TrainingConfig: training,
    c.RuntimeConfig: runtime,
    c.DataConfig: dataset,
    c.AdapterConfig: adapter,
}
NUMBERS = [
    (kind, field.name)
    for kind in CONFIGURATIONS
    for field in dataclasses.fields(kind)
    if str(field.type).split(" | ")[0] in ("int", "float")
]


def test_every_number_of_a_configuration_has_a_range() -> None:
    assert {name for _, name in NUMBERS} <= set(RANGES)
    assert all(math.isfinite(bounds.least) and math.isfinite(bounds.most) for bounds in RANGES.values())


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, name in NUMBERS if kind in MAKERS and name != "warmup"],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_number_outside_of_its_range_is_refused_in_a_sentence(kind: type, name: str) -> None:
    for value in outside(RANGES[name]):
        with pytest.raises(UsageError, match=rf"^{flag(name)} (is|can) .*; it must be .*\d\.$") as caught:
            MAKERS[kind](**{name: value})
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("warmup", [-0.1, 1.5, INFINITE, NAN])
def test_a_share_of_warmup_that_is_none_is_refused(warmup: float) -> None:
    with pytest.raises(UsageError, match="--warmup"):
        training(warmup=warmup)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGURATIONS if kind not in (c.Budget, c.RunConfig)])
def test_a_string_that_is_too_long_or_no_text_is_refused(kind: type) -> None:
    fields = [field.name for field in dataclasses.fields(kind) if str(field.type) == "str"]
    make = MAKERS.get(kind, lambda **values: c.TokenizerConfig(**{"kind": "char", "sha256": "0", **values}))
    for name in fields:
        for value in ("x" * 5000, "a\0b", "\ud800"):
            with pytest.raises(UsageError, match=flag(name)):
                make(**{name: value})


def test_a_list_that_is_too_long_is_refused() -> None:
    for make, name in ((adapter, "targets"), (small, "local_layers"), (dataset, "corpus")):
        with pytest.raises(UsageError, match=f"{flag(name)} has .* entries; it can have at most"):
            make(**{name: ("0",) * ((1 << 20) + 1)})


def test_values_of_any_length_and_kind_make_a_short_message() -> None:
    for value in ("a" * 10**6, 10**5000, [[[]]] * 1000, {"a": 1}, b"x" * 1000):
        with pytest.raises(TypeError) as caught:
            from_json(float if isinstance(value, str) else str, value)
        assert len(str(caught.value)) < 120
    check_values({"out": "a" * 4096})


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"tie": False},
        {"experts": 3},
        {"position": "learned", "activation": "gelu"},
        {"position": "relative"},
        {"architecture": "encoder-decoder", "encoder_layers": 3},
        {"architecture": "encoder-decoder", "encoder_layers": 1, "position": "learned", "experts": 2},
    ],
    ids=str,
)
def test_the_parameters_that_bound_a_model_are_those_of_the_model_itself_within_norms_and_routers(
    choices: dict[str, Any],
) -> None:
    config = small(**{"vocab_size": 300, "width": 64, "ffn_width": 128, **choices})
    parameters = build_empty_model(config).named_parameters()
    counted = sum(p.numel() for name, p in parameters if "norm" not in name and "router" not in name)
    assert counted <= config.approximate_parameters * 1.001
    assert counted >= config.approximate_parameters * 0.8


@pytest.mark.parametrize("make", [small, training, runtime, adapter, dataset, made])
def test_what_the_refusals_start_from_is_accepted(make: Callable[..., object]) -> None:
    make()


@pytest.mark.parametrize(
    ("make", "choices"),
    [
        (small, {"dropout": 0.0, "rope_theta": 1.0, "vocab_size": 1}),
        (small, {"layers": 94, "experts": 128, "experts_per_token": 8}),
        (small, {"context": 262_144, "heads": 32, "kv_heads": 8, "width": 4096}),
        (small, {"width": 15, "heads": 1, "kv_heads": 1, "position": "learned"}),
        (small, {"width": 12, "position": "sinusoidal"}),
        (training, {"min_lr": 1e-3, "warmup": 0.0, "weight_decay": 0.0, "grad_clip": 0.0, "seed": 0, "beta1": 0.0}),
        (training, {"micro_batch": 4, "warmup": 1.0, "patience": 1, "eval_tokens": 1}),
        (c.Budget, {"epochs": 0.01}),
    ],
)
def test_the_edge_of_what_is_allowed_is_allowed(make: Callable[..., object], choices: dict[str, Any]) -> None:
    made_config = make(**choices)
    assert {name: getattr(made_config, name) for name in choices} == choices


def test_a_budget_knows_its_kind_and_its_steps() -> None:
    """Three epochs of 100 tokens at 32 a step are 9.4 steps; the last one is taken too."""
    assert [c.Budget(**{kind: 3}).kind for kind in ("steps", "epochs", "time")] == ["steps", "epochs", "time"]
    assert c.Budget(steps=7).total_steps(100 / 32) == 7
    assert c.Budget(epochs=3).total_steps(100 / 32) == 10
    assert c.Budget(epochs=3).total_steps(3) == 9
    assert c.Budget(epochs=0.01).total_steps(100 / 32) == 1
    assert c.Budget(time=60).total_steps(100 / 32) is None


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        small().width = 32


# A preset, a size and choices make a model.


def test_the_presets_are_the_models_they_are_named_after() -> None:
    modern, gpt2, original = (made(preset=preset, size="micro") for preset in ("modern", "gpt2", "original"))
    for model in (modern, gpt2, original):
        assert (model.layers, model.heads, model.width, model.context) == (4, 4, 128, 128)
        assert model.tie and model.norm_gain and model.dropout == 0
    assert (modern.position, modern.norm, modern.norm_placement, modern.activation) == (
        "rope",
        "rmsnorm",
        "pre",
        "swiglu",
    )
    assert modern.qk_norm and not modern.bias and not modern.norm_bias and modern.kv_heads == 2
    assert (gpt2.position, gpt2.norm, gpt2.norm_placement, gpt2.activation) == ("learned", "layernorm", "pre", "gelu")
    assert not gpt2.qk_norm and gpt2.bias and gpt2.norm_bias and gpt2.kv_heads == 4 and not gpt2.scale_embedding
    assert (original.position, original.norm, original.norm_placement) == ("sinusoidal", "layernorm", "post")
    assert original.activation == "relu" and original.bias and original.norm_bias and original.scale_embedding
    assert not original.qk_norm and original.kv_heads == 4


@pytest.mark.parametrize(
    ("width", "activation", "expected"), [(96, "swiglu", 256), (128, "swiglu", 352), (96, "gelu", 384)]
)
def test_the_feed_forward_is_four_widths_or_two_thirds_of_it_for_swiglu(
    width: int, activation: str, expected: int
) -> None:
    """8/3 of 96 is 256, and of 128 is 341.3, rounded up to a multiple of 32."""
    assert made(width=width, activation=activation).ffn_width == expected


def test_a_choice_wins_over_size_and_preset_and_none_is_no_choice() -> None:
    chosen = made(preset="gpt2", layers=7, norm_bias=False, tie=False, ffn_width=50, width=None, dropout=None)
    assert (chosen.layers, chosen.norm_bias, chosen.tie, chosen.ffn_width) == (7, False, False, 50)
    assert (chosen.width, chosen.dropout, chosen.vocab_size) == (96, 0.0, 50)


@given(
    width=st.integers(1, 400),
    preset=st.sampled_from(sorted(presets.PRESETS)),
    size=st.sampled_from(sorted(presets.SIZES)),
    kv_heads=st.none() | st.integers(1, 4),
)
@settings(deadline=None, max_examples=300)
def test_heads_fit_any_width_that_can_be_fitted(width: int, preset: str, size: str, kv_heads: int | None) -> None:
    """Heads divide the width, leave pairs to rotate, suit the kv heads, and are as near to the size's own as can be."""
    wanted = presets.SIZES[size]["heads"]
    dividing = [heads for heads in range(1, width + 1) if width % heads == 0 and heads % (kv_heads or 1) == 0]
    paired = [heads for heads in dividing if width // heads % 2 == 0]
    if preset == "modern":
        fitting = paired  # what rotates does so in pairs of a head's features
    else:
        fitting = dividing
        assume(preset == "gpt2" or width % 2 == 0)  # sinusoids pair the features of the whole width

    if not fitting:
        with pytest.raises(UsageError):
            made(width=width, preset=preset, size=size, kv_heads=kv_heads)
        return
    model = made(width=width, preset=preset, size=size, kv_heads=kv_heads)
    assert model.width == width
    assert model.heads in fitting
    assert abs(model.heads - wanted) == min(abs(heads - wanted) for heads in fitting)
    assert model.kv_heads == (
        kv_heads or (model.heads // 2 if preset == "modern" and model.heads % 2 == 0 else model.heads)
    )


def test_heads_of_an_odd_width_serve_where_nothing_is_rotated() -> None:
    assert made(preset="gpt2", width=12, kv_heads=4).heads == 4


def test_an_odd_width_gets_fitting_heads_where_positions_need_no_pairs() -> None:
    assert (made(preset="gpt2", size="mini", width=255).heads, made(preset="gpt2", size="mini", width=251).heads) == (
        3,
        1,
    )


def test_heads_that_were_chosen_are_never_replaced() -> None:
    assert made(width=100, heads=10).heads == 10
    with pytest.raises(UsageError, match="--heads 7 does not divide --width 100"):
        made(width=100, heads=7)


# To JSON and back.


def within(name: str) -> st.SearchStrategy[float]:
    bounds = RANGES[name]
    return st.floats(bounds.least, bounds.most, exclude_min=bounds.open_start, exclude_max=bounds.open_end)


def counted(name: str, most: float = math.inf) -> st.SearchStrategy[int]:
    return st.integers(int(RANGES[name].least), int(min(RANGES[name].most, most)))


text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
words = st.lists(text).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> c.ModelConfig:
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    return c.ModelConfig(
        vocab_size=draw(counted("vocab_size")),
        context=draw(counted("context", 1 << 17)),
        layers=draw(counted("layers")),
        heads=heads,
        kv_heads=kv_heads,
        width=heads * 2 * draw(st.integers(1, 20)),
        ffn_width=draw(counted("ffn_width")),
        position=draw(st.sampled_from(c.POSITIONS)),
        rope_theta=draw(within("rope_theta")),
        norm=draw(st.sampled_from(c.NORMS)),
        norm_placement=draw(st.sampled_from(c.NORM_PLACEMENTS)),
        activation=draw(st.sampled_from(c.ACTIVATIONS)),
        dropout=draw(within("dropout")),
        attention_dropout=draw(within("dropout")),
        initialisation=draw(st.sampled_from(c.INITIALISATIONS)),
        **{n: draw(st.booleans()) for n in ("norm_gain", "norm_bias", "qk_norm", "bias", "tie", "scale_embedding")},
    )


@st.composite
def trainings(draw: st.DrawFn) -> c.TrainingConfig:
    batch_size = draw(counted("batch_size"))
    lr = draw(within("lr"))
    budget = draw(
        st.builds(c.Budget, steps=counted("steps"))
        | st.builds(c.Budget, epochs=within("epochs"))
        | st.builds(c.Budget, time=within("time"))
    )
    return c.TrainingConfig(
        budget=budget,
        batch_size=batch_size,
        micro_batch=draw(st.integers(1, batch_size)),
        lr=lr,
        min_lr=draw(st.floats(0, lr)),
        warmup=draw(st.floats(0, 1)),
        schedule=draw(st.sampled_from(c.SCHEDULES)),
        optimizer=draw(st.sampled_from(c.OPTIMIZERS)),
        weight_decay=draw(within("weight_decay")),
        beta1=draw(within("beta1")),
        beta2=draw(within("beta2")),
        epsilon=draw(within("epsilon")),
        grad_clip=draw(within("grad_clip")),
        patience=draw(st.none() | counted("patience")),
        eval_every=draw(counted("eval_every")),
        eval_tokens=draw(counted("eval_tokens")),
        save_every=draw(counted("save_every")),
        log_every=draw(counted("log_every")),
        seed=draw(st.integers(0, 2**60)),
    )


datasets = st.builds(
    c.DataConfig,
    kind=st.just("text"),
    corpus=words,
    val_corpus=words,
    **dict.fromkeys(("text_key", "encoding", "format", "unknown", "fingerprint", "val_fingerprint", "encoder"), text),
    **{n: counted(n) for n in ("train_characters", "characters", "bytes", "documents", "train_tokens", "val_tokens")},
)
runtimes = st.builds(
    c.RuntimeConfig,
    device=st.sampled_from(c.DEVICES),
    dtype=st.sampled_from(c.DTYPES),
    compile=st.booleans(),
    threads=counted("threads"),
    product_rate=st.none() | within("product_rate"),
)
adapters = st.builds(
    c.AdapterConfig,
    base=text,
    base_digest=text,
    rank=counted("rank"),
    alpha=within("alpha"),
    dropout=within("dropout"),
    targets=st.lists(text, min_size=1).map(tuple),
)
runs = st.builds(
    c.RunConfig,
    version=text,
    created=text,
    model=models(),
    tokenizer=st.builds(c.TokenizerConfig, kind=text, sha256=text),
    data=st.none() | datasets,
    training=st.none() | trainings(),
    runtime=st.none() | runtimes,
    adapter=st.none() | adapters,
    merged=words,
    unmerged_digest=st.none() | text,
    merged_steps=st.lists(counted("merged_steps"), max_size=3).map(tuple),
)


@given(run=runs)
@settings(deadline=None, max_examples=150)
def test_every_accepted_run_survives_json(run: c.RunConfig) -> None:
    assert c.RunConfig.from_json(json.loads(json.dumps(run.to_json()))) == run


def document(*path: str, value: object = None) -> Any:
    """A good run as JSON gives it, with the value at a path replaced, or taken away where the value is `...`."""
    run = c.RunConfig(
        version="1",
        created="now",
        model=small(),
        tokenizer=c.TokenizerConfig(kind="bpe", sha256="0"),
        data=dataset(),
        training=training(),
        runtime=runtime(),
        adapter=adapter(),
    )
    values = json.loads(json.dumps(run.to_json()))
    if path:
        inner = values
        for name in path[:-1]:
            inner = inner[name]
        if value is ...:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
    return values


def test_the_document_that_the_next_tests_damage_is_read() -> None:
    assert c.RunConfig.from_json(document()).data is not None


def test_whole_numbers_are_read_where_fractions_are_meant() -> None:
    run = c.RunConfig.from_json(document("training", "budget", value={"steps": None, "epochs": 3, "time": None}))
    assert run.training is not None
    assert isinstance(run.training.budget.epochs, float)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("surprise",), 1),
        (("model", "surprise"), 1),
        (("training", "budget", "surprise"), 1),
        (("model",), ...),
        (("version",), ...),
        (("model", "width"), ...),
        (("data", "fingerprint"), ...),
        (("model",), None),
        (("model",), []),
        (("model",), "modern"),
        (("model", "width"), "16"),
        (("model", "width"), 16.0),
        (("model", "width"), True),
        (("model", "width"), None),
        (("model", "tie"), 1),
        (("model", "position"), 3),
        (("model", "rope_theta"), "10000"),
        (("training", "patience"), 1.5),
        (("training", "budget"), 10),
        (("data", "corpus"), 5),
        (("data", "corpus"), None),
        (("format",), "1"),
        (("format",), True),
        (("format",), None),
        (("format",), 1.5),
        (("model", "position"), "alibi"),
        (("model", "kv_heads"), 3),
        (("training", "lr"), -1.0),
        (("adapter", "targets"), []),
        (("data", "corpus"), "a.txt"),
        (("data", "corpus"), {"a.txt": 1}),
        (("data", "corpus"), [1, None]),
        (("model", "dropout"), False),
        (("model", "rope_theta"), 10**400),
        (("model", "width"), 10**400),
        (("runtime", "threads"), 0),
        (("runtime", "threads"), -1),
        (("runtime", "device"), "/dev/null"),
        (("model", "layers"), 1 << 20),
        (("model", "experts"), 1 << 20),
        (("model", "local_layers"), list(range(1 << 12))),
        (("data", "kind"), "pairs"),
        (("data", "train_tokens"), -1),
        (("data", "corpus"), ["a\0b"]),
        (("adapter", "base"), "x" * 10_000),
        (("merged",), ["0"] * 2000),
        (("format",), 0),
        (("format",), ...),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_document_with_unknown_keys_or_wrong_values_is_refused(path: tuple[str, ...], value: object) -> None:
    with pytest.raises(TinyLMError, match="it is not a tinylm run configuration"):
        c.RunConfig.from_json(document(*path, value=value))


@pytest.mark.parametrize("values", [None, [], "text", 3, {}])
def test_what_is_no_run_at_all_is_refused(values: object) -> None:
    with pytest.raises(TinyLMError, match="it is not a tinylm run configuration"):
        c.RunConfig.from_json(values)


def test_a_newer_format_is_refused_with_its_number_even_if_all_else_has_changed() -> None:
    for values in (document("format", value=3), {"format": 3, "surprise": 1}):
        with pytest.raises(TinyLMError, match=r"format 3, this one reads 2.*upgrade tinylm") as caught:
            c.RunConfig.from_json(values)
        assert caught.value.exit_code == 1


def test_a_refusal_says_what_is_wrong_in_the_document() -> None:
    with pytest.raises(TinyLMError, match=r"unknown: oddity, surprise"):
        c.RunConfig.from_json({**document(), "surprise": 1, "oddity": 2})
    with pytest.raises(TinyLMError, match=r"expected int, found '16'"):
        c.RunConfig.from_json(document("model", "width", value="16"))


def test_what_was_chosen_is_the_same_when_a_later_version_has_more_fields() -> None:
    """Weights are bound to it by their digest, and stay readable."""
    later = dataclasses.make_dataclass("Later", [("more", int, 7)], bases=(c.ModelConfig,), frozen=True, kw_only=True)
    values = {"vocab_size": 9, "context": 8, "layers": 1, "heads": 2, "kv_heads": 2, "width": 8, "ffn_width": 8}
    for changes in ({}, {"position": "learned"}, {"dropout": 0.5, "local_window": 3, "local_layers": (0,)}):
        assert chosen(later(**values, **changes)) == chosen(c.ModelConfig(**values, **changes)) == values | changes
    assert chosen(later(**values, more=8)) == values | {"more": 8}
