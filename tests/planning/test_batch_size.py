"""The planned batch leaves enough steps and fits the free memory."""

import pytest

from tests.machines import GIB, machine
from tests.planning.planned import planned
from tinylm.config.training import Budget
from tinylm.planning import recipes
from tinylm.planning.plan_request import training_step_seconds
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
        between = planned(model=model, on=machine(device), budget=Budget(time=steps * step))
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
