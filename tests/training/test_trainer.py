"""The training loop on a small decoder in float64.

Reference: the gradient of the whole batch in one pass, and the formula of AdamW.
"""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.variants import randomised, small
from tinylm.errors import DivergedError, TinyLMError, UsageError
from tinylm.kernels.optimizers import AdamW
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.objectives.loss import Loss, next_token
from tinylm.ranks import ONE_RANK
from tinylm.text.batches import Batch
from tinylm.training import trainer as trainer_module
from tinylm.training.events import Evaluated, Event, Logged, Notice, Stepped
from tinylm.training.learning_rate import learning_rate
from tinylm.training.muon import Muon
from tinylm.training.optimizer import MuonAdamW, build_optimizer, layer_matrices
from tinylm.training.state import TrainerState
from tinylm.training.stop_conditions import EXIT_SECONDS
from tinylm.training.trainer import Outcome, StopTraining, Trainer, TrainerHooks, TrainingJob
from tinylm.training.weight_average import WeightAverage
from tinylm.training_config import Budget, TrainingConfig

CONFIG = small(context=6, layers=1, width=8, heads=2, kv_heads=1, ffn_width=8)

SETTINGS: dict[str, Any] = {
    "budget": Budget(steps=1),
    "batch_size": 6,
    "micro_batch": 6,
    "lr": 1.0,
    "min_lr": 0.0,
    "warmup": 0.0,
    "schedule": "constant",
    "grad_clip": 0.0,
    "eval_every": 1000,
    "save_every": 1000,
    "log_every": 1,
}


def decoder() -> Decoder:
    return randomised(build_model(CONFIG)).double()


def random_batch(number: int, rows: int = 6, target_fraction: float | None = None) -> Batch:
    """Random ids from the seed `number`, with a random loss mask that keeps about `target_fraction` of the targets."""
    rng = torch.Generator().manual_seed(number)
    ids = torch.randint(CONFIG.vocab_size, (rows, CONFIG.context + 1), generator=rng)
    mask = None if target_fraction is None else torch.rand(rows, CONFIG.context, generator=rng) < target_fraction
    return Batch(ids[:, :-1], ids[:, 1:], mask)


@dataclass
class FakeTask:
    """A task with the given batches and objective. `validate` returns the validation loss."""

    batch: Callable[[int], Batch]
    objective: Callable[..., Loss]
    validate: Callable[[], float]
    steps_per_epoch: float = 1
    validating: bool = False

    def validation_batches(self, rows: int, max_tokens: int) -> list[Batch]:
        self.validating = True
        return [random_batch(0, 1)]

    def validation_objective(self, model: Decoder, batch: Batch) -> Loss:
        return Loss(torch.tensor(self.validate(), dtype=torch.float64), 1, torch.zeros(()))


class Bench:
    """A trainer under test: records its events and saves. Each of its parts and settings can be replaced."""

    def __init__(self, **choices: Any) -> None:
        parts: dict[str, Any] = {
            "model": decoder(),
            "objective": next_token,
            "batches": random_batch,
            "validate": lambda: 1.0 / (1 + self.state.step),
            "dtype": "fp32",
            "check_stop": lambda: None,
            "started": trainer_module.time.monotonic(),
            "state": None,
            "ranks": ONE_RANK,
        }
        settings = dict(SETTINGS)
        parts |= {name: value for name, value in choices.items() if name in parts}
        settings |= {name: value for name, value in choices.items() if name in (*settings, "patience", "average")}
        self.config = TrainingConfig(**settings)
        self.model: Decoder = parts["model"]
        self.state: TrainerState = parts["state"] or TrainerState(micro_batch=self.config.micro_batch)
        optimizer = choices.get("optimizer") or (lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
        self.events: list[Event] = []
        self.best: list[tuple[int, float]] = []
        self.best_values: list[dict[str, Tensor]] = []
        self.saved: list[int] = []
        self.save_seconds = 0.0
        task = FakeTask(parts["batches"], parts["objective"], parts["validate"])
        job = TrainingJob(self.model, task, optimizer(self.model), self.config, parts["dtype"], parts["ranks"])

        def check_stop() -> None:
            """Call the given function, except after the only batch of an evaluation."""
            if not task.validating:
                parts["check_stop"]()
            task.validating = False

        self.hooks = TrainerHooks(self.events.append, check_stop)
        self.trainer = Trainer(job, self.state, self, self.hooks, started=parts["started"])

    def save_best(self, model: Decoder, step: int, val_loss: float) -> None:
        self.best.append((step, val_loss))
        self.best_values.append(values(model))

    def save_last(self, model: Decoder, optimizer: torch.optim.Optimizer, state: TrainerState) -> float:
        self.saved.append(state.step)
        return self.save_seconds

    @property
    def saved_step(self) -> int:
        return self.saved[-1] if self.saved else -1

    def run(self) -> Outcome:
        return self.trainer.run()

    def reported(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def values(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def update_of(bench: Bench) -> dict[str, Tensor]:
    """The change of each weight in one step of SGD. With a learning rate of 1, it is the gradient."""
    before = values(bench.model)
    bench.run()
    return {name: before[name] - value for name, value in values(bench.model).items()}


def gradient(model: Decoder, batch: Batch, objective: Callable[..., Loss] = next_token) -> dict[str, Tensor]:
    """The gradient of the mean loss per target and of the mean auxiliary loss per sequence, in one pass."""
    model = copy.deepcopy(model).train()
    loss = objective(model, batch)
    (loss.total / loss.n_tokens + loss.aux / len(batch)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


# Accumulation.


@pytest.mark.parametrize("target_fraction", [None, 0.3])
@pytest.mark.parametrize(("rows", "micro_batch"), [(6, 6), (6, 1), (6, 4), (7, 3), (1000, 7)])
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(
    rows: int, micro_batch: int, target_fraction: float | None
) -> None:
    """Also if their loss masks keep different numbers of targets."""
    batch = random_batch(0, rows, target_fraction)
    bench = Bench(batches=lambda number: batch, batch_size=rows, micro_batch=micro_batch)
    expected = gradient(bench.model, batch)
    assert_same(update_of(bench), expected)


def with_auxiliary(model: Decoder, batch: Batch) -> Loss:
    """The next-token loss, with the mean square of each sequence's hidden states as auxiliary loss."""
    loss = next_token(model, batch)
    return loss._replace(aux=model(batch.ids).hidden.square().mean(dim=(1, 2)).sum())


def test_auxiliary_losses_of_micro_batches_add_up_to_that_of_the_whole_batch() -> None:
    batch = random_batch(0, 7)
    bench = Bench(batches=lambda number: batch, batch_size=7, micro_batch=3, objective=with_auxiliary)
    expected = gradient(bench.model, batch, with_auxiliary)
    assert_same(update_of(bench), expected)
    assert not torch.allclose(expected["embedding.weight"], gradient(decoder(), batch)["embedding.weight"])


def test_a_step_of_adamw_equals_its_formula_with_the_clipped_gradient() -> None:
    chosen = {"lr": 0.01, "batch_size": 7, "micro_batch": 2, "grad_clip": 0.05, "budget": Budget(steps=3)}
    config = Bench(**chosen).config
    bench = Bench(
        **chosen, batches=lambda number: random_batch(number, 7), optimizer=lambda m: build_optimizer(m, config, "fp32")
    )
    model = copy.deepcopy(bench.model)
    x = values(model)
    m = {name: torch.zeros_like(value) for name, value in x.items()}
    v = {name: torch.zeros_like(value) for name, value in x.items()}
    norms = []
    for step in range(1, 4):
        g = gradient(model, random_batch(step - 1, 7))
        norm = math.sqrt(sum(value.square().sum().item() for value in g.values()))
        norms.append(norm)
        for name in x:
            clipped = g[name] * min(1.0, 0.05 / (norm + 1e-6))
            m[name] = 0.9 * m[name] + 0.1 * clipped
            v[name] = 0.95 * v[name] + 0.05 * clipped**2
            x[name] = x[name] * (1 - (0.01 * 0.1 if x[name].dim() >= 2 else 0))
            x[name] -= 0.01 * (m[name] / (1 - 0.9**step)) / ((v[name] / (1 - 0.95**step)).sqrt() + 1e-8)
        model.load_state_dict(x, strict=False)
    bench.run()
    assert min(norms) > 0.05
    assert_same(values(bench.model), x)
    assert [event.grad_norm for event in bench.reported(Logged)] == pytest.approx(norms)


@pytest.mark.parametrize(("grad_clip", "factor"), [(0.0, 1.0), (1e6, 1.0), (0.01, None)])
def test_gradients_are_clipped_to_grad_clip(grad_clip: float, factor: float | None) -> None:
    bench = Bench(grad_clip=grad_clip)
    expected = gradient(bench.model, random_batch(0))
    norm = math.sqrt(sum(g.square().sum().item() for g in expected.values()))
    found = update_of(bench)
    factor = factor or grad_clip / norm
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g * factor, rtol=1e-5, atol=1e-12)


def test_dropout_is_on_in_training() -> None:
    seen: list[bool] = []
    model = decoder().eval()
    Bench(model=model, objective=lambda m, batch: (seen.append(m.training), next_token(m, batch))[1]).run()
    assert seen == [True]


# Learning rate and events.


def test_every_step_has_the_learning_rate_at_its_middle() -> None:
    chosen = {"budget": Budget(steps=20), "warmup": 0.2, "schedule": "linear", "lr": 0.1, "min_lr": 0.02}
    bench = Bench(**chosen)
    bench.run()
    found = [event.lr for event in bench.reported(Logged)]
    middles = [s + 0.5 for s in range(20)]
    expected = [0.1 * m / 4 if m < 4 else 0.02 + 0.08 * (20 - m) / 16 for m in middles]
    assert found == pytest.approx(expected)
    assert found == pytest.approx([learning_rate(m / 20, bench.config) for m in middles])


@pytest.mark.parametrize("budget", [Budget(steps=1), Budget(time=10)])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_a_run_of_one_step_has_a_learning_rate_above_zero(
    budget: Budget, warmup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rates at progress 0 and 1 may both be zero."""
    bench = Clock(monkeypatch).bench(10, 7, 0, 0, warmup=warmup, schedule="linear")
    if budget.steps:
        bench = Bench(budget=budget, warmup=warmup, schedule="linear", lr=1e-3)
    assert bench.run().state.step == 1
    assert bench.reported(Logged)[0].lr > 1e-4


def test_the_logged_loss_is_the_mean_since_the_last_log_line() -> None:
    losses: list[tuple[float, int]] = []

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        losses.append((loss.total.item(), loss.n_tokens))
        return loss

    bench = Bench(
        objective=objective,
        batches=lambda number: random_batch(number, 6, 0.5),
        micro_batch=4,
        budget=Budget(steps=7),
        log_every=3,
        lr=0.01,
    )
    bench.run()
    logged = bench.reported(Logged)
    assert [event.step for event in logged] == [3, 6]
    for event, part in zip(logged, (losses[:6], losses[6:12]), strict=True):
        assert event.loss == pytest.approx(sum(total for total, _ in part) / sum(n for _, n in part), rel=1e-6)
    assert [event.step for event in bench.reported(Stepped)] == [1, 2, 3, 4, 5, 6, 7]
    assert [event.progress for event in bench.reported(Stepped)] == pytest.approx([s / 7 for s in range(7)])


def test_metrics_of_the_model_are_averaged_over_sequences_and_steps() -> None:
    """A metric that is a number and one that is a list, from micro-batches of 4 and 2 sequences."""
    values = iter([(1.0, [2.0, 0.0]), (4.0, [5.0, 3.0]), (7.0, [8.0, 6.0]), (10.0, [11.0, 9.0])])

    def objective(model: Decoder, batch: Batch) -> Loss:
        if not torch.is_grad_enabled():
            return next_token(model, batch)
        number, numbers = next(values)
        return next_token(model, batch)._replace(metrics={"one": torch.tensor(number), "many": torch.tensor(numbers)})

    bench = Bench(objective=objective, micro_batch=4, budget=Budget(steps=2), log_every=2, lr=0.01)
    bench.run()
    (logged,) = bench.reported(Logged)
    assert logged.metrics["one"] == pytest.approx((4 * 1 + 2 * 4 + 4 * 7 + 2 * 10) / 12)
    assert logged.metrics["many"] == pytest.approx([(8 + 10 + 32 + 22) / 12, (0 + 6 + 24 + 18) / 12])
    assert (bench.state.metrics, bench.state.n_sequences) == ({}, 0)


@pytest.mark.parametrize(
    ("steps", "eval_every", "save_every", "evaluated", "saved"),
    [
        (10, 3, 4, [0, 3, 6, 9, 10], [0, 4, 8, 10]),
        (10, 5, 5, [0, 5, 10], [0, 5, 10]),
        (3, 100, 100, [0, 3], [0, 3]),
        (1, 1, 1, [0, 1], [0, 1]),
    ],
)
def test_evaluations_and_saves_happen_at_their_intervals_and_at_the_end(
    steps: int, eval_every: int, save_every: int, evaluated: list[int], saved: list[int]
) -> None:
    bench = Bench(budget=Budget(steps=steps), eval_every=eval_every, save_every=save_every, lr=1e-3)
    outcome = bench.run()
    assert (outcome.stopped_by, outcome.state.step) == ("steps", steps)
    assert [event.step for event in bench.reported(Evaluated)] == evaluated
    assert bench.saved == saved


def test_averaged_weights_are_validated_and_saved_while_training_continues_with_the_current_ones() -> None:
    settings: dict[str, Any] = {"budget": Budget(steps=3), "eval_every": 1, "lr": 1e-2}
    plain, averaged = Bench(**settings), Bench(**settings, average=0.5)
    plain.run()
    averaged.run()
    assert_same(values(averaged.model), values(plain.model))
    for step, best in enumerate(averaged.best_values[1:], start=1):
        seen = plain.best_values[1 : step + 1]
        assert_same(best, {name: torch.stack([one[name] for one in seen]).mean(0) for name in best})


def test_a_run_with_a_budget_of_epochs_is_stopped_by_epochs() -> None:
    bench = Bench(budget=Budget(epochs=4))
    assert (bench.run().stopped_by, bench.state.step) == ("epochs", 4)


# Validation.


def test_the_best_weights_have_the_lowest_loss_and_the_first_of_equal_ones_is_kept() -> None:
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.9, 4.0])
    bench = Bench(validate=lambda: next(losses), budget=Budget(steps=5), eval_every=1, lr=1e-3)
    state = bench.run().state
    assert bench.best == [(0, 3.0), (1, 2.0), (4, 1.9)]
    assert [event.best for event in bench.reported(Evaluated)] == [True, True, False, False, True, False]
    assert (state.best_loss, state.best_step, state.val_loss, state.evals_since_best, state.last_eval_step) == (
        1.9,
        4,
        4.0,
        1,
        5,
    )


@pytest.mark.parametrize(("patience", "stops"), [(1, 6), (2, 8), (3, 12), (None, 20)])
def test_training_stops_after_patience_evaluations_without_improvement(patience: int | None, stops: int) -> None:
    losses = iter([5.0, 4.0, 3.0, 3.5, 3.6, 2.9, 3.1, 3.0, 2.95, 3.0, 3.0])
    wanted = {1: [0, 2, 4, 6], 2: [0, 2, 4, 6, 8], 3: list(range(0, 18, 2)), None: list(range(0, 22, 2))}[patience]
    bench = Bench(
        validate=lambda: next(losses), budget=Budget(steps=20), eval_every=2, save_every=100, patience=patience, lr=1e-3
    )
    outcome = bench.run()
    assert outcome.stopped_by == ("steps" if patience is None else "patience")
    assert [event.step for event in bench.reported(Evaluated)] == wanted
    assert outcome.state.step == wanted[-1]
    assert bench.saved[-1] == wanted[-1]


# Divergence.


def fails_at(step: int, spoil: Callable[[Loss, Decoder], Loss]) -> Callable[[Decoder, Batch], Loss]:
    """An objective that applies `spoil` to the loss of training step `step`; passes without gradients do not count."""
    calls = iter(range(1000))

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        return spoil(loss, model) if torch.is_grad_enabled() and next(calls) == step else loss

    return objective


def infinite_gradient(loss: Loss, model: Decoder) -> Loss:
    """Adds sqrt(0) to the loss: its value is unchanged, and its gradient is not finite."""
    weight = model.embedding.weight
    return loss._replace(total=loss.total + (weight - weight.detach()).sum().abs().sqrt())


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda loss, model: loss._replace(total=loss.total * math.nan), "loss"),
        (lambda loss, model: loss._replace(total=loss.total + math.inf), "loss"),
        (infinite_gradient, "gradient"),
    ],
)
def test_a_loss_or_gradient_that_is_not_finite_ends_the_run_before_the_step(
    spoil: Callable[..., Loss], what: str
) -> None:
    bench = Bench(objective=fails_at(3, spoil), budget=Budget(steps=9), eval_every=2, save_every=1, lr=0.01)
    good = Bench(budget=Budget(steps=3), lr=0.01)
    with pytest.raises(DivergedError, match=f"The {what} of step 4 is not finite; .* `lr`") as caught:
        bench.run()
    good.run()
    assert caught.value.exit_code == 3
    assert bench.saved == [0, 1, 2, 3]
    assert bench.best[-1][0] == 2
    assert_same(values(bench.model), values(good.model))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_validation_loss_that_is_not_finite_ends_the_run_and_is_never_saved(loss: float) -> None:
    losses = iter([2.0, 1.5, loss])
    bench = Bench(validate=lambda: next(losses), budget=Budget(steps=9), eval_every=2, save_every=2, lr=0.01)
    with pytest.raises(DivergedError, match=r"The validation loss after step 4 is not finite") as caught:
        bench.run()
    assert caught.value.exit_code == 3
    assert bench.saved == [0, 2]
    assert bench.best == [(0, 2.0), (2, 1.5)]


class Exploding(torch.optim.SGD):
    """SGD whose third step sets every weight to `value`, though its gradient is finite."""

    taken = 0
    value = math.inf

    def step(self, closure: object = None) -> None:
        super().step()
        self.taken += 1
        if self.taken == 3:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.fill_(self.value)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e200])
def test_weights_whose_next_loss_is_not_finite_are_never_saved(value: float) -> None:
    """Also if the weights are finite (1e200): the step whose loss would show it comes after the save."""

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        return loss._replace(total=loss.total + model.embedding.weight.square().sum())

    def optimizer(model: Decoder) -> Exploding:
        exploding = Exploding(model.parameters(), lr=0.01)
        exploding.value = value
        return exploding

    bench = Bench(objective=objective, optimizer=optimizer, budget=Budget(steps=9), eval_every=9, save_every=1)
    with pytest.raises(
        DivergedError, match=r"After step 3, a weight or the next loss is not finite; .* Try a lower `lr`"
    ):
        bench.run()
    assert bench.saved == [0, 1, 2]


def test_checking_the_next_loss_before_a_save_changes_no_random_number() -> None:
    dropped = small(context=6, layers=1, width=8, heads=2, kv_heads=1, ffn_width=8, dropout=0.5)
    often, once = (
        Bench(model=build_model(dropped).double(), budget=Budget(steps=6), save_every=every, lr=0.01)
        for every in (1, 100)
    )
    for bench in (often, once):
        torch.manual_seed(3)
        bench.run()
    assert often.saved[:6] == [0, 1, 2, 3, 4, 5]
    assert once.saved == [0, 6]
    assert_same(values(often.model), values(once.model))


# Out of memory.


def rows_at_most(most: int, seen: list[int]) -> Callable[[Decoder, Batch], Loss]:
    """An objective that runs out of memory above `most` rows, and appends the rows of each call to `seen`."""

    def objective(model: Decoder, batch: Batch) -> Loss:
        seen.append(len(batch))
        if len(batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return next_token(model, batch)

    return objective


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_gradient() -> None:
    seen: list[int] = []
    batch = random_batch(0, 20)
    bench = Bench(objective=rows_at_most(3, seen), batches=lambda number: batch, batch_size=20, micro_batch=13)
    expected = gradient(bench.model, batch)
    assert_same(update_of(bench), expected)
    assert seen == [13, 7, 4, *[2] * 10]
    assert bench.state.micro_batch == 2
    assert [event.message for event in bench.reported(Notice)] == [
        f"Out of memory: the micro-batch is now {rows}; the effective batch is still 20." for rows in (7, 4, 2)
    ]


def test_out_of_memory_in_a_step_repeats_it_with_the_same_random_numbers() -> None:
    """The gradient of the failed attempt is discarded, and the random number generators are reset."""
    batch = random_batch(0, 8)
    calls = iter(range(100))
    first_draws: list[float] = []

    def objective(model: Decoder, part: Batch) -> Loss:
        call = next(calls)
        if call in (0, 3):
            first_draws.append(torch.rand(()).item())
        if call == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return next_token(model, part)

    bench = Bench(objective=objective, batches=lambda number: batch, batch_size=8, micro_batch=2)
    expected = gradient(bench.model, batch)
    assert_same(update_of(bench), expected)
    assert first_draws[0] == first_draws[1]
    assert bench.state.micro_batch == 1


def test_out_of_memory_with_one_sequence_is_an_error_and_not_a_loop() -> None:
    seen: list[int] = []
    bench = Bench(objective=rows_at_most(0, seen), micro_batch=6)
    with pytest.raises(TinyLMError, match="Out of memory with one sequence at a time; choose a smaller") as caught:
        bench.run()
    assert caught.value.exit_code == 1
    assert not isinstance(caught.value, UsageError)
    assert seen == [6, 3, 2, 1]


def test_a_reduced_micro_batch_is_kept_for_later_steps_and_sessions() -> None:
    seen: list[int] = []
    bench = Bench(objective=rows_at_most(3, seen), budget=Budget(steps=2), lr=1e-3)
    state = bench.run().state
    assert seen == [6, 3, 3, 3, 3]
    seen.clear()
    Bench(objective=rows_at_most(3, seen), budget=Budget(steps=3), lr=1e-3, state=state).run()
    assert seen == [3, 3]


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def adamw(model: Decoder) -> torch.optim.Optimizer:
    return build_optimizer(model, TrainingConfig(**{**SETTINGS, "lr": 0.1}), "fp32")


def test_memory_error_counts_as_out_of_memory() -> None:
    seen: list[int] = []

    def objective(model: Decoder, batch: Batch) -> Loss:
        seen.append(len(batch))
        if len(seen) == 1:
            raise MemoryError
        return next_token(model, batch)

    Bench(objective=objective).run()
    assert seen[:3] == [6, 3, 3]


def test_the_optimizer_state_is_allocated_before_the_first_gradient() -> None:
    bench: Bench

    def objective(model: Decoder, batch: Batch) -> Loss:
        if torch.is_grad_enabled():
            assert all(len(bench.trainer.optimizer.state[parameter]) == 3 for parameter in model.parameters())
        return next_token(model, batch)

    bench = Bench(objective=objective, optimizer=adamw)
    bench.run()
    assert bench.state.step == 1


@pytest.mark.parametrize("failure", [0, 5])
def test_out_of_memory_for_the_optimizer_state_is_retried_once_and_changes_no_result(
    failure: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Bench(optimizer=adamw, budget=Budget(steps=3), lr=0.1)
    plain.run()
    calls = iter(range(1000))
    zeros_like = torch.zeros_like

    def allocate(tensor: Tensor, *choices: object, **named: object) -> Tensor:
        if next(calls) == failure:
            out_of_memory()
        return zeros_like(tensor, *choices, **named)  # type: ignore[arg-type]

    bench = Bench(optimizer=adamw, budget=Budget(steps=3), lr=0.1)
    monkeypatch.setattr(torch, "zeros_like", allocate)
    bench.run()
    assert next(calls) > failure
    assert_same(values(bench.model), values(plain.model))


def test_out_of_memory_for_the_optimizer_state_is_an_error_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(optimizer=adamw)
    before = values(bench.model)
    monkeypatch.setattr(torch, "zeros_like", out_of_memory)
    with pytest.raises(TinyLMError, match="Out of memory for the optimizer's state, before the first step") as caught:
        bench.run()
    assert caught.value.exit_code == 1
    assert bench.state.step == 0
    assert_same(values(bench.model), before)


def test_out_of_memory_in_the_optimizer_is_an_error_and_its_partial_step_is_not_saved() -> None:
    """An optimizer that changes one weight and then fails."""
    steps: list[int] = []

    def failing(model: Decoder) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        step = optimizer.step

        def half(*_: object) -> None:
            steps.append(1)
            if len(steps) < 3:
                return step()
            next(iter(model.parameters())).data.add_(1.0)
            return out_of_memory()

        optimizer.step = half  # type: ignore[method-assign,assignment]
        return optimizer

    bench = Bench(optimizer=failing, budget=Budget(steps=9), save_every=1, lr=1e-3)
    with pytest.raises(TinyLMError, match="in step 3; the run is saved up to step 2") as caught:
        bench.run()
    assert (caught.value.exit_code, isinstance(caught.value, UsageError)) == (1, False)
    assert len(steps) == 3
    assert bench.saved == [0, 1, 2]
    assert bench.state.step == 2


def test_out_of_memory_for_an_average_of_the_weights_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightAverage, "update", out_of_memory)
    bench = Bench(optimizer=adamw, average=0.1, lr=1e-3)
    with pytest.raises(TinyLMError, match="Out of memory in the optimizer, in step 1; the run is saved up to step 0"):
        bench.run()
    assert bench.saved == [0]


def test_other_errors_of_an_optimizer_are_raised() -> None:
    def broken(model: Decoder) -> torch.optim.Optimizer:
        optimizer = adamw(model)

        def step(*_: object) -> None:
            raise RuntimeError("a bug")

        optimizer.step = step  # type: ignore[method-assign,assignment]
        return optimizer

    with pytest.raises(RuntimeError, match="a bug"):
        Bench(optimizer=broken).run()


def test_out_of_memory_in_the_check_before_a_save_reduces_the_batch() -> None:
    seen: list[tuple[int, bool]] = []

    def objective(model: Decoder, batch: Batch) -> Loss:
        seen.append((len(batch), torch.is_grad_enabled()))
        if not torch.is_grad_enabled() and len(batch) > 2:
            out_of_memory()
        return next_token(model, batch)

    bench = Bench(objective=objective, budget=Budget(steps=2), save_every=1, eval_every=10, lr=1e-3)
    bench.run()
    assert bench.saved[:2] == [0, 1]
    assert [rows for rows, gradients in seen if not gradients] == 2 * [6, 3, 2, 1, 2, 1]


# Stopping.


def run_stopped_at(step: int, **choices: Any) -> tuple[Bench, Outcome]:
    """Run a trainer whose `check_stop` raises StopTraining from step `step` on."""

    def check_stop() -> None:
        if bench.state.step >= step:
            raise StopTraining

    bench = Bench(check_stop=check_stop, budget=Budget(steps=9), lr=1e-3, **choices)
    return bench, bench.run()


@pytest.mark.parametrize("step", [0, 1, 4, 6])
def test_a_stop_saves_the_current_step_without_an_evaluation(step: int) -> None:
    bench, outcome = run_stopped_at(step, eval_every=4, save_every=4)
    assert (outcome.stopped_by, outcome.state.step) == ("signal", step)
    assert bench.saved == sorted({0, step} | ({4} if step >= 4 else set()))
    assert [event.step for event in bench.reported(Evaluated)] == [0, 4][: 1 + (step >= 4)]


def test_a_stop_during_an_evaluation_saves_the_state_before_it() -> None:
    calls = iter(range(10))

    def validate() -> float:
        if next(calls) == 1:
            raise StopTraining
        return 2.0

    bench = Bench(validate=validate, budget=Budget(steps=9), eval_every=4, save_every=100, lr=1e-3)
    state = bench.run().state
    assert (state.step, state.last_eval_step, state.evals_since_best, bench.saved) == (4, 0, 0, [0, 4])


def test_a_stop_during_the_first_evaluation_saves_nothing() -> None:
    def validate() -> float:
        raise StopTraining

    bench = Bench(validate=validate)
    assert bench.run().stopped_by == "signal"
    assert (bench.saved, bench.best, bench.state.last_eval_step) == ([], [], -1)


# Time.


class Clock:
    """Replaces the trainer's clock by one that advances only in `spend`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def bench(self, budget: float, step: float, val: float, save: float, **choices: Any) -> Bench:
        """A trainer with a time budget whose steps, evaluations and saves take the given seconds."""

        def objective(model: Decoder, batch: Batch) -> Loss:
            self.spend(step)
            return next_token(model, batch)

        def validate() -> float:
            self.spend(val)
            return 1.0

        bench = Bench(
            objective=objective,
            validate=validate,
            budget=Budget(time=budget),
            lr=1e-3,
            eval_every=20,
            save_every=30,
            **choices,
        )
        save_last = bench.save_last
        bench.save_last = lambda *parts: (self.spend(save), save_last(*parts))[1]
        return bench


@pytest.mark.parametrize(
    ("budget", "setup", "step", "val", "save"),
    [(100, 0, 1, 0, 0), (100, 5, 1, 3, 1), (100, 30, 0.5, 8, 2), (60, 2, 0.1, 0.5, 0.1), (600, 20, 3, 20, 5)],
)
def test_a_budget_of_time_includes_start_and_exit(
    budget: float, setup: float, step: float, val: float, save: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5%, including the last evaluation and the last save."""
    clock = Clock(monkeypatch)
    bench = clock.bench(budget, step, val, save, started=clock.now - setup)
    outcome = bench.run()
    assert outcome.stopped_by == "time"
    assert 0.95 * budget <= clock.now - 1000 + setup <= 1.05 * budget
    progress = [event.progress for event in bench.reported(Stepped)]
    assert progress == sorted(progress)
    assert progress[0] == 0
    assert 0.9 < progress[-1] < 1
    assert bench.saved[-1] == outcome.state.step == bench.reported(Evaluated)[-1].step


def test_a_budget_used_up_before_training_still_evaluates_and_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    bench = clock.bench(10, 1, 1, 1, started=clock.now - 20)
    assert bench.run().stopped_by == "time"
    assert bench.saved[-1] == bench.state.step <= 1


def test_a_resumed_run_has_the_rest_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    state = TrainerState(step=40, seconds=70.0, setup_seconds=4.0, micro_batch=6, last_eval_step=40, best_loss=0.5)
    bench = clock.bench(100, 1, 0, 0, state=state)
    bench.run()
    assert bench.reported(Stepped)[0].progress == pytest.approx((70 - 4) / (100 - 4 - EXIT_SECONDS))
    assert clock.now - 1000 == pytest.approx(30, abs=1.5)
    assert bench.state.seconds == pytest.approx(100, abs=1.5)
    assert bench.state.setup_seconds == 4


def test_time_for_the_last_save_is_kept_while_saves_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No save is begun that would not be written before the last one."""
    clock = Clock(monkeypatch)
    bench = clock.bench(100, 1, 0, 0.1)
    bench.save_seconds = 15.0
    bench.run()
    assert bench.saved[:-1] == [0, 30, 60]
    assert clock.now - 1000 == pytest.approx(100 - 1.1 * 15 - EXIT_SECONDS, abs=1.5)
    bench = clock.bench(100, 1, 0, 0.1)
    bench.save_seconds = 30.0
    bench.run()
    assert bench.saved[:-1] == [0, 30]


def test_out_of_memory_names_the_last_save_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "saved_step", property(lambda bench: -1))
    bench = Bench(optimizer=adamw, average=0.1, lr=1e-3)
    monkeypatch.setattr(WeightAverage, "update", out_of_memory)
    with pytest.raises(TinyLMError, match="in step 1; nothing is saved yet"):
        bench.run()
    assert bench.saved == [0]


def test_throughput_excludes_evaluations_and_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has 36 tokens and takes 0.5 s."""
    clock = Clock(monkeypatch)
    bench = clock.bench(50, 0.5, 9, 7, log_every=10)
    bench.run()
    assert [event.tokens_per_second for event in bench.reported(Logged)] == pytest.approx(
        [72.0] * len(bench.reported(Logged))
    )
    assert len(bench.reported(Logged)) >= 2


# Number formats.


def test_products_are_in_bf16_and_weights_in_fp32() -> None:
    seen: list[torch.dtype] = []

    def objective(model: Decoder, batch: Batch) -> Loss:
        seen.append(model.logits(torch.ones(1, CONFIG.width)).dtype)
        return next_token(model, batch)

    model = randomised(build_model(CONFIG))
    bench = Bench(model=model, objective=objective, dtype="bf16", lr=1e-3)
    bench.run()
    assert seen == [torch.bfloat16]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    rough, exact = values(model), Bench(model=randomised(build_model(CONFIG)), lr=1e-3)
    exact.run()
    for name, value in values(exact.model).items():
        torch.testing.assert_close(rough[name], value, rtol=0, atol=2e-4)


def fp16_bench(**choices: Any) -> Bench:
    """A trainer in fp16 with loss scaling, which is slow on a CPU but correct."""
    return Bench(model=randomised(build_model(CONFIG)), dtype="fp16", **{"lr": 1e-3, **choices})


def overflows(steps: range) -> Callable[[Decoder, Batch], Loss]:
    """An objective whose gradient is not finite in `steps`, as if it overflowed fp16, while its loss is finite."""
    calls = iter(range(1000))

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        if not torch.is_grad_enabled() or next(calls) not in steps:
            return loss
        return infinite_gradient(loss, model)

    return objective


def test_a_step_in_fp16_is_close_to_one_in_fp32() -> None:
    bench, exact = fp16_bench(), Bench(model=randomised(build_model(CONFIG)), lr=1e-3)
    bench.run()
    exact.run()
    assert {parameter.dtype for parameter in bench.model.parameters()} == {torch.float32}
    for name, value in values(exact.model).items():
        torch.testing.assert_close(values(bench.model)[name], value, rtol=0, atol=2e-4)


def test_a_step_that_overflows_fp16_is_skipped_and_halves_the_scale() -> None:
    bench = fp16_bench(objective=overflows(range(2, 4)), budget=Budget(steps=4))
    other = fp16_bench(budget=Budget(steps=2))
    state = bench.run().state
    other.run()
    assert_same(values(bench.model), values(other.model))
    assert (state.step, state.skipped_steps) == (4, 2)
    assert state.scaler["scale"] == 65536 / 4
    norms = [event.grad_norm for event in bench.reported(Logged)]
    assert norms[2:] == [None, None]
    assert all(math.isfinite(norm) for norm in norms[:2])


def test_skipped_steps_at_the_start_do_not_change_an_average() -> None:
    def muon(model: Decoder) -> torch.optim.Optimizer:
        matrices = layer_matrices(model)
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        return MuonAdamW(Muon(matrices, 1e-3, 0.0, 0.95, torch.float32), AdamW(others, lr=1e-3, fused=True))

    bench = fp16_bench(objective=overflows(range(2)), optimizer=muon, average=0.1, budget=Budget(steps=4), eval_every=1)
    bench.run()
    first, _, third, _, last = bench.best_values
    assert_same(third, first)
    assert not torch.equal(last["norm.weight"], first["norm.weight"])


def test_too_many_skipped_steps_in_a_row_are_divergence() -> None:
    bench = fp16_bench(objective=overflows(range(5, 1000)), budget=Budget(steps=999))
    with pytest.raises(
        DivergedError, match=f"The gradient of step {6 + trainer_module.MAX_SKIPPED_STEPS} is not finite; .* `lr`"
    ):
        bench.run()


def test_a_resumed_run_restores_the_loss_scale() -> None:
    """The scale doubles after 2,000 good steps and halves after a bad one."""
    bench = fp16_bench(objective=overflows(range(1, 2)), budget=Budget(steps=2))
    state = TrainerState.from_json(json.loads(json.dumps(bench.run().state.to_json())))
    assert state.scaler["scale"] == 65536 / 2
    state = fp16_bench(state=state, budget=Budget(steps=3)).run().state
    assert (state.scaler["scale"], state.scaler["_growth_tracker"]) == (65536 / 2, 1)


def test_extra_metrics_are_computed_with_the_gradients_and_logged() -> None:
    bench = Bench(budget=Budget(steps=4), log_every=2, lr=0.01)
    seen: list[float] = []

    def extra_metrics() -> dict[str, float]:
        assert bench.model.embedding.weight.grad is not None
        seen.append(bench.model.embedding.weight.grad.norm().item())
        return {"of_embedding": seen[-1]}

    bench.hooks.extra_metrics = extra_metrics
    bench.run()
    assert [event.metrics for event in bench.reported(Logged)] == [{"of_embedding": value} for value in seen]
    assert len(seen) == 2


def test_sharded_the_check_before_a_save_is_not_repeated_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would wait for the forward passes of more parts."""
    monkeypatch.setattr(trainer_module, "is_sharded", lambda model: True)
    seen: list[int] = []
    bench = Bench(objective=rows_at_most(3, seen), micro_batch=6, average=0.5)
    with pytest.raises(TinyLMError, match="Out of memory while evaluating"):
        bench.run()
    assert seen == [6]
