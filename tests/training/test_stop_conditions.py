"""When a run ends. Reference: budgets computed by hand."""

from typing import Any

import pytest

from tinylm.training.state import TrainerState
from tinylm.training.stop_conditions import EXIT_SECONDS, StoppingRule
from tinylm.training_config import Budget

TIMED = StoppingRule(Budget(time=100.0), None, None)


def timed_state(**values: Any) -> TrainerState:
    """The state after 10 steps of 2 s each, with evaluations of 5 s and saves of 3 s."""
    seconds = {"step_seconds": 20.0, "eval_seconds": 5.0, "save_seconds": 3.0, "setup_seconds": 4.0}
    return TrainerState(**{"step": 10, "last_eval_step": 10, **seconds, **values})


def test_progress_is_the_used_fraction_of_steps_or_of_time_without_setup_and_reserve() -> None:
    assert StoppingRule(Budget(steps=40), 40, None).progress(timed_state(), 1e9) == 0.25
    reserve = 2 + 1.1 * (5 + 3) + EXIT_SECONDS
    assert TIMED.reserve(timed_state()) == pytest.approx(reserve)
    assert TIMED.reserve(timed_state(step=1)) == pytest.approx(20 + 1.1 * (5 + 3) + EXIT_SECONDS)
    assert TIMED.progress(timed_state(), 50) == pytest.approx((50 - 4) / (100 - reserve - 4))
    slow_reserve = 3 * (2 + 1.1 * (5 + 3)) + EXIT_SECONDS
    assert TIMED.progress(timed_state(), 50, slowdown=3) == pytest.approx((50 - 4) / (100 - slow_reserve - 4))


@pytest.mark.parametrize(("seconds", "finished_by"), [(50, None), (88.9, None), (89.1, "time"), (200, "time")])
def test_a_timed_run_is_finished_when_no_time_is_left_for_a_step_an_evaluation_and_a_save(
    seconds: float, finished_by: str | None
) -> None:
    assert TIMED.finished_by(timed_state(seconds=50), seconds) == finished_by


def test_a_run_without_its_last_evaluation_is_unfinished_while_there_is_time() -> None:
    missing = timed_state(last_eval_step=5, seconds=95)
    assert TIMED.finished_by(missing, 96) is None
    missing.seconds = 100
    assert TIMED.finished_by(missing, 101) == "time"
    steps = StoppingRule(Budget(steps=10), 10, None)
    assert steps.finished_by(missing, 0) is None
    assert steps.finished_by(timed_state(), 0) == "steps"
    assert StoppingRule(Budget(epochs=2), 10, None).finished_by(timed_state(), 0) == "epochs"


def test_patience_counts_evaluations_since_the_best() -> None:
    rule = StoppingRule(Budget(steps=40), 40, 3)
    assert rule.finished_by(timed_state(evals_since_best=2), 0) is None
    assert rule.finished_by(timed_state(evals_since_best=3), 0) == "patience"
