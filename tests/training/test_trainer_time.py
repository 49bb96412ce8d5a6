"""The training loop when it is stopped, and with a budget of time."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.training.trainer_bench import Bench, FakeTime, assert_same, values
from tinylm.config.training import Budget
from tinylm.training.clock import EXIT_SECONDS, Clock, StoppingRule
from tinylm.training.events import Evaluated, Logged, Stepped
from tinylm.training.state import TrainerState
from tinylm.training.trainer import StopTraining, Trainer

# Stopping.


def stop_at(step: int, **choices: Any) -> Bench:
    """A trainer that a signal stops after this step, with an evaluation and a save every four."""

    def check_stop() -> None:
        if bench.state.step >= step:
            raise StopTraining

    bench = Bench(check_stop=check_stop, **{**STOPPED, **choices})
    assert (bench.run(), bench.state.step) == ("signal", step)
    return bench


STOPPED: dict[str, Any] = {"budget": Budget(steps=9), "lr": 1e-2, "eval_every": 4, "save_every": 4}


@pytest.mark.parametrize("average", [0.0, 0.5])
@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_a_stop_saves_the_last_step_and_keeps_trained_weights(step: int, average: float) -> None:
    """The last ones with their loss before the first evaluation, which may be on fewer tokens; then the best ones."""
    bench = stop_at(step, average=average)
    assert bench.saved == sorted({1, step} | ({4} if step >= 4 else set()))
    kept = min(step, 4)
    assert bench.best[-1] == (kept, 1 / (1 + kept))
    plain = stop_at(step, average=average, eval_every=1)
    assert_same(bench.best_values[-1], plain.best_values[kept - 1])
    assert_same(values(bench.model), values(plain.model))
    assert (bench.state.best_step, bench.state.best_loss) == bench.best[-1]
    evaluated = [(event.step, event.tokens) for event in bench.reported(Evaluated)]
    assert evaluated == [(0, 4), (kept, None if step >= 4 else 4)]


def test_a_stop_before_the_first_step_leaves_nothing() -> None:
    bench = stop_at(0)
    assert (bench.saved, bench.best) == ([], [])


def test_a_stop_keeps_the_last_weights_where_these_are_kept() -> None:
    bench = stop_at(6, keep="last")
    assert bench.best == [(1, None), (4, 1 / 5), (6, 1 / 7)]
    assert bench.saved == [1, 4, 6]


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_evaluation_of_a_stop_is_not_in_the_state_that_was_saved(keep: str) -> None:
    """So that a resumed run continues as if it had not been stopped."""
    saved: list[dict[str, Any]] = []
    state = TrainerState(micro_batch=6)
    stop_at(3, keep=keep, state=state, save=lambda: saved.append(state.to_json()))
    assert (state.last_eval_step, state.best_step, state.best_loss, state.val_loss) == (3, 3, 0.25, 0.25)
    names = ("step", "last_eval_step", "evals_since_best", "best_loss", "val_loss")
    assert [saved[-1][name] for name in names] == [3, 0, 0, None, None]


@pytest.mark.parametrize(
    ("before", "after", "tokens"),
    [
        (0.001, 0.001, 400),  # 0.1 s for all
        (0.05, 0.05, 80),  # 5 s for all
        (0.9, 0.9, 4),  # one batch
        (3.0, 3.0, None),  # not even one
        (0.05, 0.2, None),  # unexpectedly slow
    ],
)
def test_a_stop_evaluates_on_what_a_second_allows_or_keeps_the_weights_without_a_loss(
    before: float, after: float, tokens: int | None
) -> None:
    """A batch of 4 of 400 targets takes the given seconds before the first step, and after the stop."""
    clock = FakeTime()
    spent: list[float] = []

    def validate() -> float:
        spent.append(before if len(spent) < 25 else after)  # a quarter of the targets
        clock.spend(spent[-1])
        return 1.5

    bench = stop_at(3, validate=validate, validation_size=100, eval_tokens=400, now=lambda: clock.now)
    assert bench.best[-1] == (3, None if tokens is None else 1.5)
    assert [event.tokens for event in bench.reported(Evaluated)] == [100] + ([] if tokens is None else [tokens])
    assert sum(spent[25:]) <= 2.0 + after


def test_a_stop_during_an_evaluation_saves_the_state_before_it_and_nothing_during_the_first_one() -> None:
    for stopped, saved in ((1, [1, 4]), (0, [])):
        calls = iter(range(10))

        def validate(calls: Iterator[int] = calls, stopped: int = stopped) -> float:
            if next(calls) == stopped:
                raise StopTraining
            return 2.0

        bench = Bench(validate=validate, budget=Budget(steps=9), eval_every=4, save_every=100, lr=1e-3)
        assert bench.run() == "signal"
        assert bench.saved == saved
        assert bench.best == ([(1, None), (4, None), (4, 2.0)] if stopped else [])


# Time.


@pytest.mark.parametrize(
    ("budget", "setup", "step", "val", "save"),
    [(100, 5, 1, 3, 1), (100, 30, 0.5, 8, 2), (600, 20, 3, 20, 5), (10, 20, 1, 1, 1)],
)
def test_a_budget_of_time_includes_start_and_exit(
    budget: float, setup: float, step: float, val: float, save: float
) -> None:
    """Within 5%, with the last evaluation and save, which also follow a start that takes longer than the budget."""
    clock = FakeTime()
    bench = clock.bench(budget, step, val, save, started=clock.now - setup)
    assert bench.run() == "time"
    assert bench.saved[-1] == bench.state.step == bench.reported(Evaluated)[-1].step
    if setup > budget:
        assert bench.state.step <= 1
        return
    assert 0.95 * budget <= clock.now - 1000 + setup <= 1.05 * budget
    progress = [event.progress for event in bench.reported(Stepped)]
    assert progress == sorted(progress)
    assert progress[0] == 0 and 0.9 < progress[-1] < 1


def test_the_loss_before_training_is_of_few_tokens_which_tell_how_long_the_last_evaluation_takes() -> None:
    """A batch of 4 targets takes 0.5 s."""
    clock = FakeTime()
    bench = clock.bench(100, 0.5, 0.5, 1, validation_size=16, eval_tokens=64, eval_every=10_000)
    bench.run()
    assert [event.tokens for event in bench.reported(Evaluated)] == [16, None]
    assert 95 <= clock.now - 1000 <= 105
    slow = clock.bench(100, 0.5, 1, 1, validation_size=16, eval_tokens=64, eval_every=40, started=clock.now)
    slow.run()
    last = slow.reported(Evaluated)[1:]
    assert len(last) >= 2 and slow.state.eval_tokens == 40  # 10 s for 10 batches
    many = stop_at(0, validation_size=9000, eval_tokens=36_000)
    assert many.reported(Evaluated)[0].tokens == 4096


class SlowerTime(FakeTime):
    """From 1070 on, all takes four times as long."""

    def spend(self, seconds: float) -> None:
        super().spend(4 * seconds if self.now >= 1070 else seconds)


def test_a_budget_of_time_holds_when_all_takes_longer_from_some_moment_on() -> None:
    """As beside another process, which also slows the last evaluation and the last save."""
    clock = SlowerTime()
    bench = clock.bench(100, 0.5, 3, 1)
    bench.run()
    assert bench.state.step < 130  # at full speed about 150
    assert 95 <= clock.now - 1000 <= 105


class Queue:
    """A device that begins what was started when it has done what was started before; each step takes it a second."""

    def __init__(self, clock: FakeTime) -> None:
        self.clock, self.ends, self.waited = clock, clock.now, list[float]()

    def mark(self, device: torch.device) -> Callable[[], None]:
        self.ends = max(self.ends, self.clock.now) + 1
        return functools.partial(self.wait_until, self.ends)

    def wait_until(self, moment: float) -> None:
        self.waited.append(max(0.0, moment - self.clock.now))
        self.clock.spend(self.waited[-1])

    def trainer(self, **parts: Any) -> Trainer:
        queue = self

        class QueueTrainer(Trainer):
            def _read_losses(self) -> None:
                queue.wait_until(queue.ends)
                super()._read_losses()

        trainer = QueueTrainer(**parts, mark=self.mark)
        self.ends = self.clock.now  # the trainer has asked for a mark, and no step has been started
        return trainer


@pytest.mark.parametrize("log_every", [1, 10, 1000])
def test_a_budget_of_time_holds_on_a_device_that_python_runs_ahead_of(log_every: int) -> None:
    """Starting a step takes 0.01 s and computing it 1 s. Reading losses waits for all steps."""
    clock = FakeTime()
    queue = Queue(clock)
    bench = clock.bench(100, 0.01, 3, 1, log_every=log_every, kind=queue.trainer)
    assert bench.run() == "time"
    assert 95 <= clock.now - 1000 <= 105
    assert max(queue.waited) < 3.5  # two steps ahead, and the one that has just begun
    assert 0.9 < bench.reported(Stepped)[-1].progress < 1


def test_a_resumed_run_has_the_rest_of_its_time() -> None:
    clock = FakeTime()
    state = TrainerState(step=40, seconds=70.0, setup_seconds=4.0, micro_batch=6, last_eval_step=40, best_loss=0.5)
    bench = clock.bench(100, 1, 0, 0, state=state)
    bench.run()
    assert bench.reported(Stepped)[0].progress == pytest.approx((70 - 4) / (100 - 4 - EXIT_SECONDS))
    assert clock.now - 1000 == pytest.approx(30, abs=1.5)
    assert bench.state.seconds == pytest.approx(100, abs=1.5)
    assert bench.state.setup_seconds == 4


def test_time_for_the_last_save_is_kept_while_saves_are_written_in_a_thread() -> None:
    """No save is begun that would not be written before the last one."""
    for seconds, saved in ((15.0, [1, 30, 60]), (30.0, [1, 30])):
        clock = FakeTime()
        bench = clock.bench(100, 1, 0, 0.1)
        bench.save_seconds = seconds
        bench.run()
        assert bench.saved[:-1] == saved
        assert clock.now - 1000 == pytest.approx(100 - 1.1 * seconds - EXIT_SECONDS, abs=1.5)


def test_throughput_excludes_evaluations_and_saves() -> None:
    """A step has 36 tokens and takes 0.5 s."""
    clock = FakeTime()
    bench = clock.bench(70, 0.5, 9, 7, log_every=10)
    bench.run()
    found = [event.tokens_per_second for event in bench.reported(Logged)]
    assert len(found) >= 2 and found == pytest.approx([72.0] * len(found))


# The rule, with budgets computed by hand.

TIMED = StoppingRule(Budget(time=100.0), None, None)


def timed_state(**values: Any) -> TrainerState:
    """The state after 10 steps of 2 s each, with evaluations of 5 s and saves of 3 s."""
    seconds = {"step_seconds": 20.0, "eval_seconds": 5.0, "save_seconds": 3.0, "setup_seconds": 4.0}
    return TrainerState(**{"step": 10, "last_eval_step": 10, **seconds, **values})


def test_progress_is_the_used_fraction_of_steps_or_of_time_without_setup_and_reserve() -> None:
    assert StoppingRule(Budget(steps=40), 40, None).progress(timed_state(), 1e9) == 0.25
    for slowdown in (1, 3):
        reserve = slowdown * (2 + 1.1 * (5 + 3)) + EXIT_SECONDS
        found = TIMED.progress(timed_state(), 50, slowdown=slowdown)
        assert found == pytest.approx((50 - 4) / (100 - reserve - 4))
    for step, seconds in ((10, 2), (1, 20)):
        reserve = seconds + 1.1 * (5 + 3) + EXIT_SECONDS
        assert TIMED.reserve(timed_state(step=step)) == pytest.approx(reserve)


def test_a_run_is_finished_by_its_budget_or_patience_unless_its_last_evaluation_is_missing_and_there_is_time() -> None:
    """A step, an evaluation and a save must fit in the time that is left."""
    found = [TIMED.finished_by(timed_state(seconds=50), seconds) for seconds in (50, 88.9, 89.1, 200)]
    assert found == [None, None, "time", "time"]
    missing = timed_state(last_eval_step=5, seconds=95)
    assert TIMED.finished_by(missing, 96) is None
    missing.seconds = 100
    assert TIMED.finished_by(missing, 101) == "time"
    steps = StoppingRule(Budget(steps=10), 10, None)
    assert steps.finished_by(missing, 0) is None
    assert steps.finished_by(timed_state(), 0) == "steps"
    assert StoppingRule(Budget(epochs=2), 10, None).finished_by(timed_state(), 0) == "epochs"
    rule = StoppingRule(Budget(steps=40), 40, 3)
    assert rule.finished_by(timed_state(evals_since_best=2), 0) is None
    assert rule.finished_by(timed_state(evals_since_best=3), 0) == "patience"


def test_progress_counts_on_a_slower_evaluation_after_slower_steps_and_never_decreases() -> None:
    """Steps of 2 s and an evaluation of 5 s, then steps of 6 s."""
    time, state, rule = (
        FakeTime(),
        TrainerState(step=10, save_seconds=3.0),
        StoppingRule(Budget(time=1000.0), None, None),
    )
    clock = Clock(rule, state, time.now, lambda: time.now, lambda value: value)

    def train(seconds: float, steps: int) -> None:
        for _ in range(steps):
            clock.begin_step()
            time.spend(seconds)
            assert clock.end_step(tokens=1) == seconds

    def evaluate(seconds: float) -> None:
        with clock.evaluation():
            time.spend(seconds)

    train(2, steps=1)
    evaluate(5)
    assert clock.slowdown == 1
    train(6, steps=40)
    assert clock.slowdown == pytest.approx(3, rel=1e-3)
    slow = 247 / (1000 - 3 * (242 / 10 + 1.1 * (5 + 3)) - EXIT_SECONDS)
    assert clock.progress() == pytest.approx(slow, rel=1e-3)
    assert clock.middle(0.0) == clock.progress() / 2
    evaluate(6)
    assert clock.slowdown == 1
    assert rule.progress(state, clock.seconds) == pytest.approx(253 / (1000 - 24.2 - 1.1 * (6 + 3) - EXIT_SECONDS))
    assert clock.progress() == pytest.approx(slow, rel=1e-3)
