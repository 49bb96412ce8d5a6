"""What is planned is checked against the promises: it fits the text, the memory and the choices, and is valid."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machines import machine
from tests.variants import small
from tinylm import plan as p
from tinylm.config import AdapterConfig, Budget, DataConfig, ModelConfig, RuntimeConfig
from tinylm.cost import Machine, training_step_seconds
from tinylm.errors import UsageError
from tinylm.model.build import build_model
from tinylm.presets import PRESETS, SIZES
from tinylm.text.pairs import PairContexts
from tinylm.training.schedule import learning_rate

GIB = 1 << 30


def data(train_tokens: int) -> DataConfig:
    return DataConfig(
        corpus=("c.txt",),
        train_characters=train_tokens,
        fingerprint="f",
        characters=train_tokens,
        bytes=train_tokens,
        documents=1,
        train_tokens=train_tokens,
        val_tokens=10,
    )


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "free_memory", lambda device: 64 * GIB)


def planned(
    tokens: int = 1_000_000,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    budget: Budget | None = None,
    vocab_size: int = 100,
    on: Machine | None = None,
    **choices: Any,
) -> p.Plan:
    return p.plan_training(
        on or machine(), data(tokens), vocab_size, model=model or {}, training=training or {}, budget=budget, **choices
    )


def adapter(**choices: Any) -> AdapterConfig:
    """As finetune-lora makes it, with the default rank."""
    values: dict[str, Any] = {"base": "", "base_digest": "", "rank": 8, "alpha": 16.0, "dropout": 0.0}
    return AdapterConfig(**{**values, "targets": ("q_proj",), **choices})


# The budget.


def test_without_a_budget_a_run_lasts_ten_minutes_or_until_it_stops_improving() -> None:
    plan = planned()
    assert plan.training.budget == Budget(time=600)
    assert plan.training.patience == 10
    assert plan.seconds == 600
    assert planned(training={"patience": 3}).training.patience == 3


@pytest.mark.parametrize("budget", [Budget(steps=7), Budget(epochs=0.5), Budget(time=90)])
def test_a_budget_that_was_given_is_kept_and_brings_no_patience(budget: Budget) -> None:
    plan = planned(budget=budget)
    assert plan.training.budget == budget
    assert plan.training.patience is None


def test_steps_are_those_of_the_budget() -> None:
    assert planned(budget=Budget(steps=7)).steps == 7
    two_epochs = planned(10_000, {"context": 50}, {"batch_size": 8}, Budget(epochs=2))
    assert two_epochs.steps == 50  # 20,000 tokens at 400 a step
    slow, fast = (planned(budget=Budget(time=60), model={"size": "nano"}, on=machine(flops=f)) for f in (1e9, 1e12))
    assert 1 <= slow.steps < fast.steps
    assert planned(budget=Budget(time=1e-9)).steps == 1


# The shape.


def test_more_time_and_more_text_make_a_larger_model() -> None:
    sizes = [
        planned(tokens, budget=Budget(time=seconds)).parameters
        for tokens, seconds in ((1000, 1), (100_000, 1), (100_000, 600), (10_000_000, 600), (100_000_000, 36_000))
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) >= 3


# Seconds of training and FLOP/s of the CPU's products, and what was trained for the figures of decisions 012, 014, 018.
SIZES_ON_RECORD = [
    (14, 0.86e12, "nano"),
    (80, 0.86e12, "micro"),
    (360, 0.86e12, "mini"),
    (3600, 0.86e12, "small"),
    (15, 0.4e12, "nano"),
    (80, 0.4e12, "micro"),
    (180, 0.4e12, "micro"),
    (360, 0.4e12, "tiny"),
]


@pytest.mark.parametrize("seconds, flops, size", SIZES_ON_RECORD)
def test_a_million_characters_get_the_size_whose_figures_are_on_record(seconds: float, flops: float, size: str) -> None:
    two_cores = Machine(RuntimeConfig(device="cpu", dtype="bf16", compile=False, threads=2), "because", flops)
    shape = planned(budget=Budget(time=seconds), vocab_size=66, on=two_cores).model
    assert {name: getattr(shape, name) for name in SIZES[size]} == SIZES[size]


@pytest.mark.parametrize(
    ("budget", "vocab_size", "tied"),
    [
        (Budget(steps=1), 66, False),
        (Budget(steps=2441), 4096, False),  # of 1,024 tokens: 2,499,584
        (Budget(steps=2442), 66, True),
        (Budget(steps=1), 4097, True),
        (Budget(epochs=2.4), 66, False),
        (Budget(epochs=2.6), 66, True),
        (Budget(time=10.0), 66, False),
        (Budget(time=3600.0), 66, True),
    ],
)
def test_a_modern_decoder_has_an_output_layer_of_its_own_in_a_short_run(
    budget: Budget, vocab_size: int, tied: bool
) -> None:
    def tie(**model: Any) -> bool:
        training = {"batch_size": 8}
        shape = {"size": "micro", **model}
        return planned(budget=budget, vocab_size=vocab_size, model=shape, training=training).model.tie

    assert tie() == tied
    assert tie(tie=not tied) != tied


@pytest.mark.parametrize("model", [{"preset": "gpt2"}, {"preset": "original"}, {"architecture": "encoder"}])
def test_the_output_layer_of_other_models_is_the_embedding_however_short_the_run(model: dict[str, Any]) -> None:
    assert planned(budget=Budget(steps=1), model=model).model.tie


@pytest.mark.parametrize("size", sorted(SIZES))
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_size_and_preset_are_as_asked_for(size: str, preset: str) -> None:
    shape = planned(model={"size": size, "preset": preset}).model
    assert {name: getattr(shape, name) for name in SIZES[size]} == SIZES[size]
    for name, value in PRESETS[preset].items():
        assert getattr(shape, name) == value


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"preset": "bert"}, "--preset is 'bert'; it must be one of: modern, gpt2, original"),
        ({"size": "vast"}, "--size is 'vast'; it must be one of: auto, nano, micro"),
        ({"width": 97, "heads": 4}, "--heads 4 does not divide --width 97"),
        ({"position": "alibi"}, "--position is 'alibi'"),
        ({"context": 0}, "--context is 0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(model: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(model=model)


def test_the_parameters_are_those_of_the_model() -> None:
    for preset in PRESETS:
        plan = planned(model={"preset": preset, "size": "nano"}, vocab_size=77)
        assert plan.model.vocab_size == 77
        assert plan.parameters == sum(parameter.numel() for parameter in build_model(plan.model).parameters())


def test_a_context_that_the_text_is_too_short_for_shrinks_with_a_word_or_is_refused() -> None:
    plan = planned(50)
    assert plan.model.context == 49
    assert plan.notices == ("The training text has only 50 tokens: the context shrinks to 49.",)
    assert planned(50, {"context": 49}).model.context == 49
    with pytest.raises(UsageError, match=r"has 50 tokens, and a context of 50 needs 51; .* --context of at most 49"):
        planned(50, {"context": 50})
    base = small(context=64, vocab_size=100)
    assert planned(65, base=base).model == base
    with pytest.raises(UsageError, match="a context of 64 needs 65"):
        planned(64, base=base)


def test_training_on_from_a_model_keeps_its_shape() -> None:
    base = small(vocab_size=100, layers=5, dropout=0.3)
    assert planned(base=base, budget=Budget(time=1e5)).model == base


# The batch, and the memory it takes.


@pytest.mark.parametrize(("device", "fewest", "most"), [("cpu", 1024, 2048), ("cuda", 8192, 65_536)])
def test_a_batch_leaves_enough_steps_within_what_suits_the_device(device: str, fewest: int, most: int) -> None:
    def tokens(budget: Budget) -> int:
        plan = planned(model={"size": "micro", "context": 128}, on=machine(device), budget=budget)
        return plan.training.batch_size * plan.model.context

    assert tokens(Budget(time=1.0)) == fewest
    assert tokens(Budget(time=1e6)) == tokens(Budget(steps=10)) == most
    assert planned(model={"context": 100_000, "size": "nano"}).training.batch_size == 1
    wide = {"size": "micro", "width": 1024, "context": 128}
    for preset, tokens_of_wide in (("modern", 8192), ("gpt2", 2048)):  # for Muon's sake, eight times the width
        plan = planned(model={**wide, "preset": preset}, on=machine(device), budget=Budget(steps=10))
        assert plan.training.batch_size * 128 == max(most, tokens_of_wide)
    for preset, optimizer, steps in (("modern", "muon", 800), ("gpt2", "adamw", 1500)):
        model = {"size": "micro", "context": 64, "preset": preset}
        shape = planned(model=model).model
        step = training_step_seconds(machine(device), shape, (fewest + most) / 2, optimizer)
        between = planned(model=model, on=machine(device), budget=Budget(time=steps * step))
        assert between.training.batch_size * 64 == pytest.approx((fewest + most) / 2, abs=64)
        assert between.steps == pytest.approx(steps, rel=0.05)


@pytest.mark.parametrize("batch_size", [1, 1000, 4096])
def test_a_batch_can_be_as_large_as_wanted_and_runs_in_the_parts_that_fit(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"size": "micro"}
    whole = planned(model=model, training={"batch_size": batch_size})
    assert whole.training.batch_size == whole.training.micro_batch == batch_size
    assert whole.notices == ()
    sizes = []
    for free in (GIB // 16, GIB // 8, GIB // 4):
        monkeypatch.setattr(p, "free_memory", lambda device, free=free: free)
        plan = planned(model=model, training={"batch_size": batch_size})
        assert plan.training.batch_size == batch_size
        assert plan.memory <= 0.7 * free or plan.training.micro_batch == 1
        sizes.append(plan.training.micro_batch)
        if plan.training.micro_batch < batch_size:
            (notice,) = plan.notices
            assert notice.startswith(f"{plan.training.micro_batch} sequences at a time fit the {free / GIB:.1f} GB")
            assert f"the batch is still {batch_size}" in notice
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == (1 if batch_size == 1 else 3)


def test_a_micro_batch_that_was_chosen_is_a_limit_and_not_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    training = {"batch_size": 64, "micro_batch": 16}
    assert planned(model={"size": "nano"}, training=training).training.micro_batch == 16
    monkeypatch.setattr(p, "free_memory", lambda device: GIB // 32)
    assert planned(model={"size": "nano"}, training=training).training.micro_batch < 16


def test_a_model_that_leaves_no_memory_is_planned_with_one_sequence_and_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(p, "free_memory", lambda device: 1 << 20)
    plan = planned(model={"size": "small"})
    assert plan.training.micro_batch == 1
    assert len(plan.notices) == 1


def test_where_the_system_does_not_say_what_is_free_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "free_memory", lambda device: None)
    plan = planned(model={"size": "base"}, training={"batch_size": 4096})
    assert (plan.training.micro_batch, plan.notices) == (4096, ())


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"batch_size": 0}, "--batch-size is 0; it must be from 1 to"),
        ({"micro_batch": -1}, "--micro-batch is -1; it must be from 1 to"),
        ({"batch_size": 4, "micro_batch": 5}, "--micro-batch 5 is larger than --batch-size 4"),
        ({"lr": -1.0}, "--lr is -1"),
        ({"lr": 1e-3, "min_lr": 1e-2}, "--min-lr 0.01 is above --lr 0.001"),
        ({"schedule": "constant", "min_lr": 1e-5}, "--min-lr is where --schedule falls to, and constant does not fall"),
        ({"warmup_steps": -1}, "--warmup-steps is -1; it must be from 0 to"),
        ({"warmup_steps": 101}, "--warmup-steps is more than the whole run"),
        ({"eval_every": 0}, "--eval-every is 0"),
        ({"save_every": 0}, "--save-every is 0"),
        ({"optimizer": "sgd"}, "--optimizer is 'sgd'"),
        ({"schedule": "sudden"}, "--schedule is 'sudden'"),
        ({"patience": 0}, "--patience is 0"),
        ({"grad_clip": -1.0}, "--grad-clip is -1"),
    ],
)
def test_contradictions_are_refused_by_the_flag(training: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(training=training, budget=Budget(steps=100))


# The recipe and the rhythm.


def test_each_preset_has_a_recipe_and_a_flag_wins_over_it() -> None:
    for preset in PRESETS:
        training = planned(model={"preset": preset}).training
        for name, value in p.RECIPES[preset].items():
            assert getattr(training, name) == value
    chosen = {"lr": 5e-4, "min_lr": 1e-5, "weight_decay": 0.3, "grad_clip": 0.5, "optimizer": "adam", "seed": 9}
    training = planned(training=chosen).training
    assert {name: getattr(training, name) for name in chosen} == chosen


def test_the_learning_rate_ends_at_a_tenth_unless_the_recipe_or_the_user_says_where() -> None:
    gpt2 = planned(model={"preset": "gpt2"}).training
    assert gpt2.min_lr == pytest.approx(gpt2.lr / 10)
    assert planned(model={"preset": "gpt2"}, training={"lr": 0.5}).training.min_lr == pytest.approx(0.05)
    assert planned(model={"preset": "gpt2"}, training={"min_lr": 0.0}).training.min_lr == 0
    assert planned(model={"preset": "modern"}).training.min_lr == 0
    assert planned(adapter=adapter(), base=small(vocab_size=100)).training.weight_decay == 0


@pytest.mark.parametrize(("warmup_steps", "warmup"), [(0, 0.0), (5, 0.05), (100, 1.0), (None, 0.02)])
def test_warmup_steps_become_a_part_of_the_run(warmup_steps: int | None, warmup: float) -> None:
    training = {} if warmup_steps is None else {"warmup_steps": warmup_steps}
    assert planned(training=training, budget=Budget(steps=100)).training.warmup == pytest.approx(warmup)


def test_more_warmup_steps_than_the_time_is_thought_to_be_enough_for_are_the_whole_run() -> None:
    """How many steps there will be is only a guess, and no reason to refuse."""
    plan = planned(training={"warmup_steps": 10**9}, budget=Budget(time=60))
    assert plan.training.warmup == 1
    assert plan.notices == (f"The time is enough for about {plan.steps} steps: all of them are warmup.",)


@pytest.mark.parametrize(("preset", "lr"), [("gpt2", 1e-3), ("modern", 3.5e-3), ("original", 3.3e-4)])
def test_the_learning_rate_falls_with_the_width(preset: str, lr: float) -> None:
    assert planned(model={"preset": preset, "size": "small"}).training.lr == pytest.approx(lr, rel=0.03)


@pytest.mark.parametrize(
    ("choices", "lr"),
    [
        ({}, 0.01),
        ({"rank": 32, "alpha": 64.0}, 0.005),
        ({"rank": 2, "alpha": 4.0}, 0.02),
        ({"alpha": 64.0}, 0.005),
        ({"rank": 16, "rank_stabilised": True}, 0.005),
        ({"rank": 1, "alpha": 1e-9}, 0.02),
        ({"kind": "bottleneck", "rank": 64}, 0.02),
    ],
)
def test_an_adapter_is_trained_at_the_rate_that_was_measured_for_its_rank_and_scale(
    choices: dict[str, Any], lr: float
) -> None:
    """As docs/decisions/022 has it, at a width of 128, and never at more than twice what was measured there."""
    base = small(vocab_size=100, width=128, heads=4)
    assert planned(base=base, adapter=adapter(**choices)).training.lr == pytest.approx(lr)
    wide = planned(base=dataclasses.replace(base, width=512), adapter=adapter(**choices)).training.lr
    narrow = planned(base=dataclasses.replace(base, width=8), adapter=adapter(**choices)).training.lr
    assert wide <= lr <= narrow <= 0.04


@pytest.mark.parametrize("width", [64, 512])
def test_the_original_is_trained_as_published(width: int) -> None:
    """Vaswani et al. 2017, section 5.3: Adam with 0.9, 0.98 and 1e-9; D^-0.5 min(s^-0.5, s w^-1.5), scaled."""
    steps, warmup = 1000, 100
    budget = Budget(steps=steps)
    training = planned(model={"preset": "original", "size": "micro", "width": width}, budget=budget).training
    assert (training.optimizer, training.beta1, training.beta2, training.weight_decay) == ("adam", 0.9, 0.98, 0.0)
    assert training.epsilon == 1e-9
    published = [width**-0.5 * min(s**-0.5, s * warmup**-1.5) for s in range(1, steps + 1)]
    rates = [learning_rate(s / steps, training) for s in range(1, steps + 1)]
    assert [rate / rates[-1] for rate in rates] == pytest.approx([rate / published[-1] for rate in published])


def test_evaluations_are_a_dozen_or_as_often_as_asked_for_and_cost_little() -> None:
    training = planned(budget=Budget(steps=2000)).training
    assert training.eval_every == 2000 // 12
    assert training.log_every == 20
    assert training.save_every <= training.eval_every
    chosen = planned(budget=Budget(steps=2000), training={"eval_every": 7, "save_every": 3}).training
    assert (chosen.eval_every, chosen.save_every) == (7, 3)
    slow = planned(model={"size": "base"}, budget=Budget(steps=10_000), on=machine(flops=5e11))
    assert 1 < slow.training.save_every < slow.training.eval_every
    assert slow.training.save_every * slow.seconds / slow.steps < 70  # about a minute between two saves
    for size in SIZES:
        assert 20_000 <= planned(model={"size": size}).training.eval_tokens <= 1_000_000


@pytest.mark.parametrize(
    ("wanted", "device", "seconds", "compiled"),
    [
        ("on", "cpu", 1, True),
        ("off", "cuda", 1e6, False),
        ("auto", "cuda", 1e6, True),
        ("auto", "cuda", 60, False),
        ("auto", "mps", 1e6, False),
    ],
)
def test_compiling_is_worth_it_in_long_runs(wanted: str, device: str, seconds: float, compiled: bool) -> None:
    plan = planned(budget=Budget(time=seconds), compile=wanted, on=machine(device), model={"size": "nano"})
    assert plan.runtime == dataclasses.replace(machine(device).runtime, compile=compiled)


@pytest.mark.parametrize(
    ("dtype", "onednn", "compiled"),
    [
        ("bf16", True, True),
        ("fp32", True, False),
        ("fp32", False, True),
    ],
)
def test_a_cpu_compiles_where_that_makes_a_step_faster(
    dtype: str, onednn: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinylm.plan.can_compile", lambda device: True)
    monkeypatch.setattr("tinylm.plan.USES_ONEDNN", onednn)
    plan = planned(budget=Budget(time=1e6), on=machine(dtype=dtype), model={"size": "nano"})
    assert plan.runtime.compile == compiled


def test_compile_is_one_of_three_words() -> None:
    with pytest.raises(UsageError, match="--compile is 'yes'; it must be one of: auto, on, off"):
        planned(compile="yes")


# Anything goes.

budgets = st.one_of(
    st.none(),
    st.integers(1, 10**9).map(lambda steps: Budget(steps=steps)),
    st.floats(1e-6, 1e6).map(lambda epochs: Budget(epochs=epochs)),
    st.floats(1e-6, 3e7).map(lambda time: Budget(time=time)),
)


@settings(max_examples=60)
@given(
    tokens=st.integers(3, 10**12),
    vocab_size=st.integers(2, 100_000),
    budget=budgets,
    preset=st.sampled_from(sorted(PRESETS)),
    batch_size=st.none() | st.integers(1, 10**5),
    flops=st.floats(1e6, 1e16),
    device=st.sampled_from(["cpu", "cuda", "mps"]),
    free=st.none() | st.integers(0, 1 << 40),
)
def test_any_text_budget_and_machine_make_a_plan(
    tokens: int,
    vocab_size: int,
    budget: Budget | None,
    preset: str,
    batch_size: int | None,
    flops: float,
    device: str,
    free: int | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p, "free_memory", lambda device: free)
        training = {} if batch_size is None else {"batch_size": batch_size}
        plan = planned(tokens, {"preset": preset}, training, budget, vocab_size, machine(device, flops))
    assert plan.model.context < tokens
    assert isinstance(plan.model, ModelConfig)
    assert plan.training.batch_size == (batch_size or plan.training.batch_size)
    assert 1 <= plan.training.micro_batch <= plan.training.batch_size
    assert plan.steps >= 1
    assert plan.seconds > 0
    assert plan.memory > 0
    assert plan.training.budget == (budget or Budget(time=600))


def test_the_size_is_chosen_with_the_parts_that_were_chosen() -> None:
    """64 experts at a time cost what 64 feed-forward layers do, and 64 heads do not fit the smallest width."""
    budget = Budget(time=400)
    dense = planned(10**9, budget=budget).model
    wide = planned(10**9, budget=budget, model={"experts": 64, "experts_per_token": 64}).model
    assert (wide.layers * wide.width) < (dense.layers * dense.width)
    assert planned(budget=Budget(time=1), model={"kv_heads": 8, "heads": 8, "position": "learned"}).model.width % 8 == 0
    odd = {"heads": 64, "kv_heads": 64}  # of two features each at a width of 128, and none at one of 96
    assert planned(budget=Budget(time=1), model=odd).model.width == 128


# Pairs.


def planned_pairs(train: list[int], val: Sequence[int] = (10,), **choices: Any) -> p.Plan:
    """Pairs that need contexts of so many tokens."""
    found = dataclasses.replace(data(20 * len(train)), kind="pairs", train_pairs=len(train))
    needed = PairContexts(np.array(train), np.array(val))
    settings = {"model": {"architecture": "encoder-decoder"}, "training": {}, "budget": None, **choices}
    return p.plan_training(machine(), found, 100, pair_contexts=needed, **settings)


@given(st.integers(2, 1000), st.data())
@settings(deadline=None, max_examples=30)
def test_pairs_that_need_no_more_than_twice_what_others_need_all_fit(least: int, drawn: st.DataObject) -> None:
    train, val = (drawn.draw(st.lists(st.integers(least, 2 * least), min_size=1, max_size=50)) for _ in range(2))
    plan = planned_pairs(train, val)
    assert max(train + val) <= plan.model.context <= max(128, max(train + val) + 31)
    assert not any("left out" in notice for notice in plan.notices)


@given(usual=st.integers(3, 400), outliers=st.integers(1, 5), hundreds=st.integers(6, 200))
@settings(deadline=None, max_examples=30)
def test_a_few_long_pairs_are_left_out_with_a_word_and_cost_the_others_nothing(
    usual: int, outliers: int, hundreds: int
) -> None:
    pairs = [usual] * (100 * hundreds - outliers)
    plan = planned_pairs(pairs + [5000] * outliers, [usual, 4000])
    alone = planned_pairs(pairs, [usual, 2 * usual])
    assert plan.model.context <= max(128, 2 * usual + 31)
    notice, of_val = [notice for notice in plan.notices if "left out" in notice]
    assert notice.startswith(f"{outliers} of {100 * hundreds:,} pairs to train on are left out: they do not fit")
    assert notice.endswith("and the longest needs 5000.")
    assert of_val.startswith("1 of 2 pairs to validate with are left out")
    assert (plan.model, plan.training.micro_batch) == (alone.model, alone.training.micro_batch)


def test_modern_models_are_trained_by_muon_and_adapters_and_older_ones_are_not() -> None:
    assert planned_pairs([10]).training.optimizer == "muon"
    for modern in ({}, {"model": {"experts": 4}}, {"base": small()}):
        assert planned(**modern).training.optimizer == "muon"
    for other in ({"model": {"preset": "gpt2"}}, {"base": small(), "adapter": adapter()}):
        assert planned(**other).training.optimizer == "adamw"
    assert planned_pairs([10], training={"optimizer": "adamw"}).training.optimizer == "adamw"
    for others in ({"adapter": adapter()}, {"model": {"architecture": "encoder-decoder", "preset": "original"}}):
        assert planned_pairs([10], **others).training.optimizer != "muon"


@pytest.mark.parametrize(
    ("size", "passes", "decay"),
    [
        ("micro", 0.5, 0.1),
        ("micro", 1, 0.12),
        ("micro", 5, 0.6),
        ("micro", 50, 1.1),
        ("small", 10, 1.2),
        ("small", 50, 2.0),
        ("medium", 50, 3.0),
    ],
)
def test_weights_of_a_modern_model_decay_more_where_the_text_is_seen_more_often_and_small_for_the_model(
    size: str, passes: float, decay: float
) -> None:
    budget = Budget(epochs=passes)
    assert planned(budget=budget, model={"size": size}).training.weight_decay == pytest.approx(decay, rel=0.05)
    assert planned(budget=budget, model={"size": size, "preset": "gpt2"}).training.weight_decay == 0.1
    assert planned(budget=budget, model={"size": size}, training={"weight_decay": 0.3}).training.weight_decay == 0.3


@pytest.mark.parametrize(
    ("size", "passes", "dropout"),
    [("micro", 1, 0), ("micro", 70, 0), ("micro", 100, 0.05), ("small", 20, 0.13), ("micro", 500, 0.2)],
)
def test_a_modern_model_drops_out_the_more_the_larger_it_is_and_the_more_often_it_sees_a_text(
    size: str, passes: float, dropout: float
) -> None:
    budget = Budget(epochs=passes)
    assert planned(budget=budget, model={"size": size}).model.dropout == pytest.approx(dropout)
    assert planned(budget=budget, model={"size": size, "preset": "gpt2"}).model.dropout == 0
    assert planned(budget=budget, model={"size": size, "dropout": 0.1}).model.dropout == 0.1
    assert planned(budget=budget, base=small()).model.dropout == 0


def test_a_context_that_was_chosen_or_that_a_base_has_stays_and_the_pairs_beyond_it_are_no_part_of_an_epoch() -> None:
    chosen = {"architecture": "encoder-decoder", "context": 16}
    train, training = [16] * 40 + [17] * 60, {"batch_size": 10}
    plan = planned_pairs(train, [17, 5, 5], model=chosen, training=training, budget=Budget(epochs=3))
    assert (plan.model.context, plan.steps) == (16, 3 * 4)
    assert [notice.split(":")[0] for notice in plan.notices] == [
        "60 of 100 pairs to train on are left out",
        "1 of 3 pairs to validate with are left out",
    ]
    base = small(architecture="encoder-decoder", encoder_layers=1, context=24)
    assert planned_pairs([16, 30], base=base, model={}).model == base
