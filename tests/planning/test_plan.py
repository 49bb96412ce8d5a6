"""A plan is valid and fits the text, the memory and the choices; choices that are invalid are errors."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machines import GIB, machine
from tests.planning.planned import adapter, data, planned, planned_pairs
from tests.text.corpora import require_errors
from tests.variants import small
from tinylm.config.model import ModelConfig
from tinylm.config.presets import PRESETS, SIZES
from tinylm.config.training import Budget
from tinylm.machine.measure import Machine
from tinylm.planning import recipes
from tinylm.planning.plan_request import PlanRequest, training_step_seconds
from tinylm.planning.recipes import MUON_TARGET_STEPS, TARGET_STEPS, TOKENS_PER_STEP


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_leaves_enough_steps_within_the_range_that_suits_the_device(device: str) -> None:
    min_tokens, max_tokens = TOKENS_PER_STEP["cpu" if device == "cpu" else "gpu"]

    def tokens(budget: Budget) -> int:
        plan = planned(model={"size": "micro", "context": 128}, on=machine(device), budget=budget)
        return plan.training.batch_size * plan.model.context

    assert tokens(Budget(time=1.0)) == min_tokens
    assert tokens(Budget(time=1e6)) == tokens(Budget(steps=10)) == max_tokens
    assert planned(model={"context": 100_000, "size": "nano"}).training.batch_size == 1
    for preset, optimizer, steps in (
        ("modern", "muon", MUON_TARGET_STEPS),
        ("modern", "normuon", MUON_TARGET_STEPS),
        ("gpt2", "adamw", TARGET_STEPS),
    ):
        model = {"size": "micro", "context": 64, "preset": preset}
        config = planned(model=model).model
        step = training_step_seconds(machine(device), config, (min_tokens + max_tokens) / 2, optimizer)
        budget, one = Budget(time=steps * step), {"generations": 1}
        between = planned(model=model, on=machine(device), budget=budget, training=one)
        assert between.training.batch_size * 64 == pytest.approx((min_tokens + max_tokens) / 2, abs=64)
        assert between.steps == pytest.approx(steps, rel=0.05)


def test_a_batch_of_epochs_leaves_enough_steps_and_muon_takes_larger_ones_in_wide_models() -> None:
    for preset, tokens in (("modern", recipes.MUON_TOKENS_PER_WIDTH * 1024), ("gpt2", TOKENS_PER_STEP["cpu"][1])):
        model = {"size": "micro", "width": 1024, "context": 128, "preset": preset}
        assert planned(model=model, budget=Budget(steps=10)).training.batch_size * 128 == tokens
    plan = planned(100_000, model={"size": "nano"}, budget=Budget(epochs=20))
    assert plan.steps == pytest.approx(TARGET_STEPS, rel=0.05)
    assert plan.epochs == pytest.approx(20, rel=0.01)


@pytest.mark.parametrize("batch_size", [1, 1000])
def test_a_batch_of_any_size_is_split_into_micro_batches_that_fit_the_memory(batch_size: int) -> None:
    choices = {"model": {"size": "micro", "context": 128}, "training": {"batch_size": batch_size}}
    whole = planned(**choices)
    assert whole.training.batch_size == whole.training.micro_batch == batch_size and whole.notices == ()
    sizes = []
    for free in (GIB // 16, GIB // 8, GIB // 4):
        plan = planned(**choices, on=machine(free_memory=free))
        assert plan.training.batch_size == batch_size
        sizes.append(plan.training.micro_batch)
        assert plan.memory - recipes.PROCESS_BYTES["cpu"] <= recipes.MEMORY_SHARE * free or sizes[-1] == 1
        if plan.training.micro_batch < batch_size:
            (notice,) = plan.notices
            assert notice.startswith(f"The micro-batch is {sizes[-1]}, which fits the {free / 1e9:.1f} GB")
            assert f"the effective batch is still {batch_size}" in notice
    assert sizes == sorted(sizes) and len(set(sizes)) == (1 if batch_size == 1 else 3)


def test_a_chosen_micro_batch_is_an_upper_limit_and_without_memory_it_is_one() -> None:
    choices = {"model": {"size": "nano"}, "training": {"batch_size": 64, "micro_batch": 16}}
    assert planned(**choices).training.micro_batch == 16
    assert planned(**choices, on=machine(free_memory=GIB // 32)).training.micro_batch < 16
    large = planned(model={"size": "small"}, on=machine(free_memory=1 << 20))
    assert (large.training.micro_batch, len(large.notices)) == (1, 1)
    unknown = planned(model={"size": "base"}, training={"batch_size": 4096}, on=machine(free_memory=None))
    assert (unknown.training.micro_batch, unknown.notices) == (4096, ())


def test_without_a_budget_a_run_lasts_ten_minutes_or_until_it_stops_improving() -> None:
    plan = planned()
    assert (plan.training.budget, plan.training.patience) == (Budget(time=600), 10)
    assert plan.seconds == 600
    assert planned(training={"patience": 3}).training.patience == 3
    for budget in (Budget(steps=7), Budget(epochs=0.5), Budget(time=90)):
        training = planned(budget=budget).training
        assert (training.budget, training.patience) == (budget, None)


def test_long_runs_are_compiled_if_compiled_layers_are_faster() -> None:
    for wanted, dtype, seconds, faster, compiled in (
        ("on", "fp32", 1, False, True),
        ("off", "fp32", 1e6, True, False),
        ("auto", "fp32", 1200, True, True),
        ("auto", "fp32", 1199, True, False),
        ("auto", "bf16", 600, True, True),
        ("auto", "bf16", 599, True, False),
        ("auto", "fp32", 1e6, False, False),
    ):
        on = machine(compiled_is_faster=faster, dtype=dtype)
        plan = planned(budget=Budget(time=seconds), compile=wanted, on=on, model={"size": "nano"})
        assert plan.runtime == on.runtime(compile=compiled), (wanted, dtype, seconds, faster)


@pytest.mark.parametrize(("share", "compiled"), [(0.98, False), (1.02, True)])
def test_a_run_of_steps_is_compiled_by_its_expected_time(share: float, compiled: bool) -> None:
    on = machine(compiled_is_faster=True, dtype="fp32")
    one: dict[str, Any] = {"on": on, "model": {"size": "nano"}, "training": {"generations": 1}}
    seconds_per_step = planned(budget=Budget(steps=1000), **one).seconds / 1000
    plan = planned(budget=Budget(steps=round(share * 1200 / seconds_per_step)), **one)
    assert (plan.seconds, plan.runtime.compile) == (pytest.approx(share * 1200, rel=0.01), compiled)


def test_models_whose_tensors_change_size_are_compiled_only_on_request() -> None:
    long = Budget(time=1e6)
    assert not planned(budget=long, model={"size": "nano", "experts": 4}).runtime.compile
    assert not planned_pairs([10], budget=long).runtime.compile
    assert planned_pairs([10], budget=long, compile="on").runtime.compile


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
    on=st.builds(
        machine,
        st.sampled_from(["cpu", "cuda", "mps"]),
        matmul_rate=st.floats(1e6, 1e16),
        free_memory=st.none() | st.integers(0, 1 << 40),
    ),
)
def test_every_text_budget_and_machine_has_a_valid_plan(
    tokens: int, vocab_size: int, budget: Budget | None, preset: str, batch_size: int | None, on: Machine
) -> None:
    training = {} if batch_size is None else {"batch_size": batch_size}
    plan = planned(tokens, on, vocab_size=vocab_size, budget=budget, model={"preset": preset}, training=training)
    assert plan.model.context < tokens and isinstance(plan.model, ModelConfig)
    assert plan.training.batch_size == (batch_size or plan.training.batch_size)
    assert 1 <= plan.training.micro_batch <= plan.training.batch_size and plan.steps >= 1
    assert plan.seconds > 0 and plan.memory > 0
    assert plan.training.budget == (budget or Budget(time=600))


def request(**choices: Any) -> PlanRequest:
    return PlanRequest(objective="next-token", data=data(1000), vocab_size=100, **choices)


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"training": {"micro_batch": -1}}, "`micro_batch` is -1; it must be from 1 to"),
    ({"training": {"batch_size": 4, "micro_batch": 5}}, "`micro_batch` is 5; it must be at most `batch_size` (4)"),
    ({"training": {"lr": 1e-3, "min_lr": 1e-2}}, "`min_lr` is 0.01; it must be at most `lr` (0.001)"),
    ({"training": {"schedule": "constant", "min_lr": 1e-5}}, '`min_lr` has no effect with `schedule="constant"`'),
    ({"training": {"warmup_steps": -1}}, "`warmup_steps` is -1; it must be from 0 to"),
    ({"training": {"warmup_steps": 101}}, "`warmup_steps` is more than the whole run"),
    ({"training": {"eval_every": 0}}, "`eval_every` is 0"),
    ({"training": {"optimizer": "sgd"}}, "`optimizer` is 'sgd'"),
    ({"training": {"optimizer": "adamw", "momentum": 0.9}}, '`momentum` has no effect with `optimizer="adamw"`'),
    ({"training": {"sequence_growth": 3}}, "`sequence_growth` is 3; it must be 1, 2 or 4"),
    ({"training": {"sequence_growth": 4}, "model": {"context": 30}}, "must divide the length of the sequences, 30"),
    ({"model": {"preset": "bert"}}, "`preset` is 'bert'; it must be one of: modern, gpt2, original"),
    ({"model": {"size": "vast"}}, "`size` is 'vast'; it must be one of: auto, nano, micro"),
    ({"model": {"size": "nano", **SIZES["micro"]}}, "`size` sets `layers`, `heads`, `width`, `context`"),
    ({"model": {"width": 97, "heads": 4}}, "`heads` is 4; it must divide `width` (97)"),
    ({"model": {"context": 0}}, "`context` is 0"),
    ({"compile": "yes"}, "`compile` is 'yes'; it must be one of: auto, on, off"),
]


def test_settings_that_are_invalid_or_contradict_each_other_are_refused_by_name() -> None:
    rows = [(choices, re.escape(words)) for choices, words in INVALID]
    require_errors(lambda choices: planned(budget=Budget(steps=100), **choices), rows)


def test_recipe_and_optimizer_are_those_of_the_preset_of_the_base_or_of_the_adapter_unless_chosen() -> None:
    assert (request().recipe_name, request(model={"preset": "gpt2"}).recipe_name) == ("modern", "gpt2")
    assert request(base=small("original", kv_heads=4)).recipe_name == "original"
    for kind in ("lora", "bottleneck"):
        assert request(base=small(), adapter=adapter(kind=kind)).recipe_name == kind
    assert (request().optimizer, request(model={"preset": "gpt2"}).optimizer) == ("muon", "adamw")
    assert request(training={"optimizer": "adam"}).optimizer == "adam"
