"""A plan is valid and fits the text, the memory and the choices."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machines import machine
from tests.planning.planned import planned, planned_pairs
from tinylm.machine import Machine
from tinylm.model_config import ModelConfig
from tinylm.presets import PRESETS
from tinylm.training_config import Budget


def test_without_a_budget_a_run_lasts_ten_minutes_or_until_it_stops_improving() -> None:
    plan = planned()
    assert plan.training.budget == Budget(time=600)
    assert plan.training.patience == 10
    assert plan.seconds == 600
    assert planned(training={"patience": 3}).training.patience == 3


@pytest.mark.parametrize("budget", [Budget(steps=7), Budget(epochs=0.5), Budget(time=90)])
def test_a_chosen_budget_is_kept_and_has_no_patience(budget: Budget) -> None:
    plan = planned(budget=budget)
    assert plan.training.budget == budget
    assert plan.training.patience is None


@pytest.mark.parametrize(
    ("wanted", "dtype", "seconds", "faster", "compiled"),
    [
        ("on", "fp32", 1, False, True),
        ("off", "fp32", 1e6, True, False),
        ("auto", "fp32", 1200, True, True),
        ("auto", "fp32", 1199, True, False),
        ("auto", "bf16", 600, True, True),
        ("auto", "bf16", 599, True, False),
        ("auto", "fp32", 1e6, False, False),
    ],
)
def test_long_runs_are_compiled_if_compiled_layers_are_faster(
    wanted: str, dtype: str, seconds: float, faster: bool, compiled: bool
) -> None:
    on = machine(compiled_is_faster=faster, dtype=dtype)
    plan = planned(budget=Budget(time=seconds), compile=wanted, on=on, model={"size": "nano"})
    assert plan.runtime == on.runtime(compile=compiled)


@pytest.mark.parametrize(("share", "compiled"), [(0.98, False), (1.02, True)])
def test_a_run_of_steps_is_compiled_by_its_expected_time(share: float, compiled: bool) -> None:
    on = machine(compiled_is_faster=True, dtype="fp32")
    seconds_per_step = planned(budget=Budget(steps=1000), on=on, model={"size": "nano"}).seconds / 1000
    plan = planned(budget=Budget(steps=round(share * 1200 / seconds_per_step)), on=on, model={"size": "nano"})
    assert plan.seconds == pytest.approx(share * 1200, rel=0.01)
    assert plan.runtime.compile == compiled


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
    assert plan.model.context < tokens
    assert isinstance(plan.model, ModelConfig)
    assert plan.training.batch_size == (batch_size or plan.training.batch_size)
    assert 1 <= plan.training.micro_batch <= plan.training.batch_size
    assert plan.steps >= 1
    assert plan.seconds > 0
    assert plan.memory > 0
    assert plan.training.budget == (budget or Budget(time=600))
