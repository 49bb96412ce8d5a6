"""The training loop on a small decoder in float64. Reference: the gradient of the whole batch in one pass."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.training.trainer_bench import (
    Bench,
    FakeTime,
    assert_same,
    decoder,
    gradient,
    random_batch,
    trained,
    update_of,
    values,
    with_auxiliary,
)
from tinylm.config.training import Budget
from tinylm.errors import DivergedError
from tinylm.evaluation import loop
from tinylm.objectives.loss import Loss, next_token
from tinylm.text.batches import Batch
from tinylm.training.events import Evaluated, Logged, Stepped
from tinylm.training.optimizer import learning_rate
from tinylm.training.trainer import Trainer
from tinylm.transformer.architectures import Decoder

# Accumulation.


@pytest.mark.parametrize(
    ("rows", "micro_batch", "target_fraction", "objective"),
    [
        *((6, 6, None, next_token), (6, 1, 0.3, next_token), (7, 3, 0.3, next_token), (1000, 7, None, next_token)),
        (7, 3, None, with_auxiliary),
    ],
)
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(
    rows: int, micro_batch: int, target_fraction: float | None, objective: Callable[..., Loss]
) -> None:
    """Also if their loss masks keep different numbers of targets, and of auxiliary losses. Dropout is on."""
    batch, modes = random_batch(0, rows, target_fraction), set()

    def watched_objective(model: Decoder, part: Batch) -> Loss:
        modes.add(model.training)
        return objective(model, part)

    choices: dict[str, Any] = {"batches": lambda number: batch, "batch_size": rows, "micro_batch": micro_batch}
    bench = Bench(model=decoder().eval(), objective=watched_objective, **choices)
    expected = gradient(bench.model, batch, objective)
    assert_same(update_of(bench), expected)
    assert modes == {True}
    plain = gradient(decoder(), batch)["embedding.weight"]
    assert torch.allclose(expected["embedding.weight"], plain) == (objective is next_token)


@pytest.mark.parametrize("grad_clip", [0.0, 1e6, 0.01])
def test_gradients_are_clipped_to_grad_clip_and_their_norm_before_is_logged(grad_clip: float) -> None:
    bench = Bench(grad_clip=grad_clip)
    expected = gradient(bench.model, random_batch(0))
    norm = math.sqrt(sum(g.square().sum().item() for g in expected.values()))
    found = update_of(bench)
    factor = grad_clip / norm if grad_clip == 0.01 else 1.0
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g * factor, rtol=1e-5, atol=1e-12)
    assert bench.reported(Logged)[0].grad_norm == pytest.approx(norm)


# Learning rate and events.


def test_every_step_has_the_learning_rate_at_its_middle() -> None:
    bench = trained(budget=Budget(steps=20), warmup=0.2, schedule="linear", lr=0.1, min_lr=0.02)
    middles = [s + 0.5 for s in range(20)]
    expected = [0.1 * m / 4 if m < 4 else 0.02 + 0.08 * (20 - m) / 16 for m in middles]
    assert [event.lr for event in bench.reported(Logged)] == pytest.approx(expected)
    assert [learning_rate(m / 20, bench.config) for m in middles] == pytest.approx(expected)


def test_a_run_of_one_step_has_a_learning_rate_above_zero() -> None:
    """The learning rates at progress 0 and 1 may both be zero."""
    for warmup in (0.0, 0.5, 1.0):
        timed = FakeTime().bench(10, 7, 0, 0, warmup=warmup, schedule="linear")
        for bench in (Bench(warmup=warmup, schedule="linear", lr=1e-3), timed):
            bench.run()
            assert bench.state.step == 1
            assert bench.reported(Logged)[0].lr > 1e-4


def test_the_logged_loss_is_the_mean_since_the_last_log_line() -> None:
    losses: list[tuple[float, int]] = []

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        if torch.is_grad_enabled():  # not in the check before a save
            losses.append((loss.total.item(), loss.n_targets))
        return loss

    choices: dict[str, Any] = {"micro_batch": 4, "budget": Budget(steps=7), "log_every": 3, "lr": 0.01}
    bench = trained(objective=objective, batches=lambda number: random_batch(number, 6, 0.5), **choices)
    logged = bench.reported(Logged)
    assert [event.step for event in logged] == [3, 6]
    for event, part in zip(logged, (losses[:6], losses[6:12]), strict=True):
        assert event.loss == pytest.approx(sum(total for total, _ in part) / sum(n for _, n in part), rel=1e-6)
    assert [event.step for event in bench.reported(Stepped)] == [1, 2, 3, 4, 5, 6, 7]
    assert [event.progress for event in bench.reported(Stepped)] == pytest.approx([s / 7 for s in range(7)])


def test_metrics_of_the_model_are_averaged_over_targets_and_steps() -> None:
    """A metric that is a number and one that is a list, from micro-batches of 4 and 2 sequences."""
    values = iter([(1.0, [2.0, 0.0]), (4.0, [5.0, 3.0]), (7.0, [8.0, 6.0]), (10.0, [11.0, 9.0])])

    def objective(model: Decoder, batch: Batch) -> Loss:
        if not torch.is_grad_enabled():
            return next_token(model, batch)
        number, numbers = next(values)
        return next_token(model, batch)._replace(metrics={"one": torch.tensor(number), "many": torch.tensor(numbers)})

    bench = trained(objective=objective, micro_batch=4, budget=Budget(steps=2), log_every=2, lr=0.01)
    (logged,) = bench.reported(Logged)
    assert logged.metrics["one"] == pytest.approx((4 * 1 + 2 * 4 + 4 * 7 + 2 * 10) / 12)
    assert logged.metrics["many"] == pytest.approx([(8 + 10 + 32 + 22) / 12, (0 + 6 + 24 + 18) / 12])
    assert (bench.state.metrics, bench.state.n_targets) == ({}, 0)


@pytest.mark.parametrize(
    ("steps", "eval_every", "save_every", "evaluated", "saved"),
    [
        (10, 3, 4, [0, 3, 6, 9, 10], [1, 4, 8, 10]),
        (10, 5, 5, [0, 5, 10], [1, 5, 10]),
        (2, 100, 100, [0, 2], [1, 2]),
        (1, 100, 100, [0, 1], [1]),
    ],
)
def test_evaluations_and_saves_happen_at_their_intervals_and_at_the_end(
    steps: int, eval_every: int, save_every: int, evaluated: list[int], saved: list[int]
) -> None:
    """A save after the first step makes the run."""
    bench = Bench(budget=Budget(steps=steps), eval_every=eval_every, save_every=save_every, lr=1e-3)
    assert (bench.run(), bench.state.step) == ("steps", steps)
    assert [event.step for event in bench.reported(Evaluated)] == evaluated
    assert bench.saved == saved


def test_averaged_weights_are_validated_and_saved_while_training_continues_with_the_current_ones() -> None:
    plain, averaged = (trained(budget=Budget(steps=3), eval_every=1, lr=1e-2, **c) for c in ({}, {"average": 0.5}))
    assert_same(values(averaged.model), values(plain.model))
    for step, best in enumerate(averaged.best_values, start=1):
        seen = plain.best_values[:step]
        assert_same(best, {name: torch.stack([one[name] for one in seen]).mean(0) for name in best})


# Validation.


def test_the_best_weights_have_the_lowest_loss_and_the_first_of_equal_ones_is_kept() -> None:
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.9, 4.0])
    bench = Bench(validate=lambda: next(losses), budget=Budget(steps=5), eval_every=1, lr=1e-3)
    bench.run()
    state = bench.state
    assert bench.best == [(1, 2.0), (4, 1.9)]
    assert [event.best for event in bench.reported(Evaluated)] == [False, True, False, False, True, False]
    assert (state.best_loss, state.best_step, state.val_loss) == (1.9, 4, 4.0)
    assert (state.evals_since_best, state.last_eval_step) == (1, 5)


def test_the_loss_before_training_is_never_the_best_and_does_not_count_for_the_patience() -> None:
    losses = iter([1.0, 5.0, 4.0, 4.5, 4.6])
    bench = Bench(validate=lambda: next(losses), budget=Budget(steps=20), eval_every=2, patience=2, lr=1e-3)
    assert (bench.run(), bench.state.step) == ("patience", 8)
    assert bench.best == [(1, None), (2, 5.0), (4, 4.0)]
    assert (bench.state.best_loss, bench.state.best_step) == (4.0, 4)
    assert [event.tokens for event in bench.reported(Evaluated)] == [4, None, None, None, None]


def test_until_an_evaluation_each_save_keeps_the_current_weights_without_a_loss() -> None:
    """So that no end of the process leaves untrained ones; the averages, if these are validated."""
    for average in (0.0, 0.5):
        bench = trained(budget=Budget(steps=7), eval_every=5, save_every=2, lr=1e-2, average=average)
        assert [step for step, _ in bench.best] == [1, 2, 4, 5, 7]
        assert [loss is None for _, loss in bench.best] == [True, True, True, False, False]
        plain = trained(budget=Budget(steps=7), eval_every=1, lr=1e-2, average=average)
        for step, found in zip((1, 2, 4, 5, 7), bench.best_values, strict=True):
            assert_same(found, plain.best_values[step - 1])


@pytest.mark.parametrize(("patience", "last"), [(1, 6), (3, 16), (None, 20)])
def test_training_stops_after_patience_evaluations_without_improvement(patience: int | None, last: int) -> None:
    losses = iter([5.0, 4.0, 3.0, 3.5, 3.6, 2.9, 3.1, 3.0, 2.95, 3.0, 3.0])
    bench = Bench(validate=lambda: next(losses), budget=Budget(steps=20), eval_every=2, patience=patience, lr=1e-3)
    assert bench.run() == ("steps" if patience is None else "patience")
    assert [event.step for event in bench.reported(Evaluated)] == list(range(0, last + 2, 2))
    assert bench.state.step == bench.saved[-1] == last


def test_each_step_minimises_the_objective_of_its_progress() -> None:
    """The loss of the two SGD steps is next_token's times 1 and 0.5, their progress subtracted from 1."""
    bench = Bench(budget=Budget(steps=2), lr=0.01)
    expected = copy.deepcopy(bench.model)
    for number, factor in ((0, 1.0), (1, 0.5)):
        for name, of_loss in gradient(expected, random_batch(number)).items():
            expected.get_parameter(name).data -= 0.01 * factor * of_loss

    def scaled(progress: float, model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        return loss._replace(total=(1 - progress) * loss.total)

    bench.trainer.task.objective = lambda progress: functools.partial(scaled, progress)
    bench.run()
    assert_same(values(bench.model), values(expected))


def test_validation_batches_have_more_rows_for_shorter_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most four micro-batches, and at most as many tokens as an evaluation has in a forward pass."""
    monkeypatch.setattr(loop, "EVALUATION_TOKENS", 12)
    for length, micro_batch, rows in ((None, 6, 2), (3, 6, 4), (1, 2, 8), (1, 6, 12)):
        assert trained(sequence_length=length, micro_batch=micro_batch, lr=0.1).validation_rows == rows


class AheadTrainer(Trainer):
    """A trainer on a device that Python runs ahead of. reads: the number of steps whose losses are read at a time"""

    def __init__(self, reads: list[int], **parts: Any) -> None:
        self.reads = reads
        super().__init__(**parts, mark=lambda device: lambda: None)

    def _read_losses(self) -> None:
        self.reads.append(len(self._unread))
        super()._read_losses()


INTERVALS: dict[str, Any] = {"log_every": 4, "eval_every": 5, "save_every": 7, "lr": 0.1, "average": 0.25}


def test_a_gpu_is_waited_for_only_before_log_lines_evaluations_and_saves() -> None:
    """And events, weights and state are those of a device that is waited for in every step."""
    reads: list[int] = []
    ahead = trained(budget=Budget(steps=12), kind=functools.partial(AheadTrainer, reads), **INTERVALS)
    assert [count for count in reads if count] == [1, 3, 1, 2, 1, 2, 2]  # after steps 1, 4, 5, 7, 8, 10 and 12
    plain = trained(budget=Budget(steps=12), **INTERVALS)
    assert ahead.saved == plain.saved and ahead.best == plain.best
    for kind in (Logged, Evaluated, Stepped):
        found, expected = ([timeless(event) for event in bench.reported(kind)] for bench in (ahead, plain))
        assert found == expected and found
    assert_same(values(ahead.model), values(plain.model))
    assert (ahead.state.loss_sum, ahead.state.n_targets) == (plain.state.loss_sum, plain.state.n_targets)


def timeless(event: Any) -> Any:
    """The event without measured times."""
    return dataclasses.replace(event, **{name: 0 for name in ("seconds", "tokens_per_second") if hasattr(event, name)})


@pytest.mark.parametrize(("last", "what"), [("log_every", "loss"), ("eval_every", "loss"), ("save_every", "gradient")])
def test_a_step_that_diverged_is_named_later_and_nothing_is_saved_after_it(last: str, what: str) -> None:
    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        if not torch.is_grad_enabled() or bench.state.step != 2:
            return loss
        factor = float("nan")
        return loss._replace(total=loss.total * factor) if what == "loss" else loss._replace(aux=loss.total * factor)

    intervals = {"log_every": 100, "eval_every": 100, "save_every": 100, last: 6}
    ahead = functools.partial(AheadTrainer, [])
    bench = Bench(objective=objective, budget=Budget(steps=50), lr=0.1, kind=ahead, **intervals)
    with pytest.raises(DivergedError, match=f"The {what} of step 3 is not finite"):
        bench.run()
    assert bench.state.step == 6
    assert bench.saved == [1] and bench.best == [(1, None)]
