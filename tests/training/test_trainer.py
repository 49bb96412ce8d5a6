"""The loop on a small decoder in float64. Judge: gradients of the whole batch at once, and AdamW written by hand."""

import copy
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.variants import randomised, small
from tinylm.config import Budget, TrainingConfig
from tinylm.errors import DivergedError, TinyLMError, UsageError
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.objective import Loss, next_token
from tinylm.text.dataset import Batch
from tinylm.training import trainer as t
from tinylm.training.average import WeightAverage
from tinylm.training.optimizer import MuonAdamW, build_optimizer, layer_matrices
from tinylm.training.schedule import learning_rate
from tinylm.training.state import TrainerState
from tinylm.training.trainer import Evaluated, Event, Logged, Notice, Outcome, Stepped, StopTraining, Trainer

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


def random_batch(number: int, rows: int = 6, scored: float | None = None) -> Batch:
    rng = torch.Generator().manual_seed(number)
    ids = torch.randint(CONFIG.vocab_size, (rows, CONFIG.context + 1), generator=rng)
    mask = None if scored is None else torch.rand(rows, CONFIG.context, generator=rng) < scored
    return Batch(ids[:, :-1], ids[:, 1:], mask)


class Bench:
    """A trainer whose events and saves are written down; every part can be replaced."""

    def __init__(self, **choices: Any) -> None:
        parts: dict[str, Any] = {
            "model": decoder(),
            "objective": next_token,
            "batches": random_batch,
            "validate": lambda: 1.0 / (1 + self.state.step),
            "dtype": "fp32",
            "check_stop": lambda: None,
            "started": t.time.monotonic(),
            "state": None,
            "average": None,
        }
        settings = dict(SETTINGS)
        parts |= {name: value for name, value in choices.items() if name in parts}
        settings |= {name: value for name, value in choices.items() if name in settings or name == "patience"}
        self.config = TrainingConfig(**settings)
        self.model: Decoder = parts["model"]
        self.state: TrainerState = parts.pop("state") or TrainerState(micro_batch=self.config.micro_batch)
        optimizer = choices.get("optimizer") or (lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
        self.events: list[Event] = []
        self.best: list[tuple[int, float]] = []
        self.best_values: list[dict[str, Tensor]] = []
        self.saved: list[int] = []
        parts["optimizer"] = optimizer(self.model)
        parts["average"] = parts["average"] and WeightAverage(parts["optimizer"], parts["average"])
        self.trainer = Trainer(
            **parts,
            config=self.config,
            total_steps=self.config.budget.total_steps(1),
            state=self.state,
            store=self,
            report=self.events.append,
        )

    def save_best(self, model: Decoder, step: int, val_loss: float) -> None:
        self.best.append((step, val_loss))
        self.best_values.append(values(model))

    def save_last(self, model: Decoder, optimizer: torch.optim.Optimizer, state: TrainerState) -> None:
        self.saved.append(state.step)

    def run(self) -> Outcome:
        return self.trainer.run()

    def reported(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def values(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def step_of(bench: Bench) -> dict[str, Tensor]:
    """What one step of plain descent at a rate of one takes away from each weight: its gradient."""
    before = values(bench.model)
    bench.run()
    return {name: before[name] - value for name, value in values(bench.model).items()}


def gradient(model: Decoder, batch: Batch, objective: Callable[..., Loss] = next_token) -> dict[str, Tensor]:
    """Of the mean over all that the batch scores, and of the auxiliary loss a sequence."""
    model = copy.deepcopy(model).train()
    loss = objective(model, batch)
    (loss.nats / loss.scored + loss.aux / len(batch)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


# Accumulation.


@pytest.mark.parametrize("scored", [None, 0.3])
@pytest.mark.parametrize(("rows", "micro_batch"), [(6, 6), (6, 1), (6, 4), (7, 3), (1000, 7)])
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(
    rows: int, micro_batch: int, scored: float | None
) -> None:
    """Also where they score unequal numbers of tokens."""
    batch = random_batch(0, rows, scored)
    bench = Bench(batches=lambda number: batch, batch_size=rows, micro_batch=micro_batch)
    expected = gradient(bench.model, batch)
    assert_same(step_of(bench), expected)


def with_auxiliary(model: Decoder, batch: Batch) -> Loss:
    """Beside the loss, something of every sequence."""
    loss = next_token(model, batch)
    return loss._replace(aux=model(batch.ids).hidden.square().mean(dim=(1, 2)).sum())


def test_auxiliary_losses_of_micro_batches_add_up_too() -> None:
    batch = random_batch(0, 7)
    bench = Bench(batches=lambda number: batch, batch_size=7, micro_batch=3, objective=with_auxiliary)
    expected = gradient(bench.model, batch, with_auxiliary)
    assert_same(step_of(bench), expected)
    assert not torch.allclose(expected["embedding.weight"], gradient(decoder(), batch)["embedding.weight"])


def test_a_step_of_adamw_is_its_formula_on_the_clipped_gradient() -> None:
    chosen = {"lr": 0.01, "batch_size": 7, "micro_batch": 2, "grad_clip": 0.05, "budget": Budget(steps=3)}
    config = Bench(**chosen).config
    bench = Bench(
        **chosen, batches=lambda number: random_batch(number, 7), optimizer=lambda m: build_optimizer(m, config)
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
def test_a_gradient_is_clipped_to_its_norm_and_nothing_else(grad_clip: float, factor: float | None) -> None:
    bench = Bench(grad_clip=grad_clip)
    expected = gradient(bench.model, random_batch(0))
    norm = math.sqrt(sum(g.square().sum().item() for g in expected.values()))
    found = step_of(bench)
    factor = factor or grad_clip / norm
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g * factor, rtol=1e-5, atol=1e-12)


def test_dropout_is_on_in_training() -> None:
    seen: list[bool] = []
    model = decoder().eval()
    Bench(model=model, objective=lambda m, batch: (seen.append(m.training), next_token(m, batch))[1]).run()
    assert seen == [True]


# The learning rate and what is reported.


def test_every_step_is_taken_at_the_rate_that_the_schedule_has_in_its_middle() -> None:
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
def test_a_run_of_one_step_learns(budget: Budget, warmup: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the rate of the very beginning, nor of the very end, which may both be zero."""
    bench = Clock(monkeypatch).bench(10, 7, 0, 0, warmup=warmup, schedule="linear")
    if budget.steps:
        bench = Bench(budget=budget, warmup=warmup, schedule="linear", lr=1e-3)
    assert bench.run().state.step == 1
    assert bench.reported(Logged)[0].lr > 1e-4


def test_the_logged_loss_is_the_mean_since_the_last_time() -> None:
    nats: list[tuple[float, int]] = []

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        nats.append((loss.nats.item(), loss.scored))
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
    for event, part in zip(logged, (nats[:6], nats[6:12]), strict=True):
        assert event.loss == pytest.approx(sum(n for n, _ in part) / sum(s for _, s in part), rel=1e-6)
    assert [event.step for event in bench.reported(Stepped)] == [1, 2, 3, 4, 5, 6, 7]
    assert [event.progress for event in bench.reported(Stepped)] == pytest.approx([s / 7 for s in range(7)])


def test_what_a_model_tells_of_itself_is_averaged_over_sequences_and_steps() -> None:
    """A number and a list of numbers, told of micro-batches of 4 and 2 sequences."""
    told = iter([(1.0, [2.0, 0.0]), (4.0, [5.0, 3.0]), (7.0, [8.0, 6.0]), (10.0, [11.0, 9.0])])

    def objective(model: Decoder, batch: Batch) -> Loss:
        if not torch.is_grad_enabled():
            return next_token(model, batch)
        number, numbers = next(told)
        return next_token(model, batch)._replace(told={"one": torch.tensor(number), "many": torch.tensor(numbers)})

    bench = Bench(objective=objective, micro_batch=4, budget=Budget(steps=2), log_every=2, lr=0.01)
    bench.run()
    (logged,) = bench.reported(Logged)
    assert logged.told["one"] == pytest.approx((4 * 1 + 2 * 4 + 4 * 7 + 2 * 10) / 12)
    assert logged.told["many"] == pytest.approx([(8 + 10 + 32 + 22) / 12, (0 + 6 + 24 + 18) / 12])
    assert (bench.state.told, bench.state.sequences) == ({}, 0)


@pytest.mark.parametrize(
    ("steps", "eval_every", "save_every", "evaluated", "saved"),
    [
        (10, 3, 4, [0, 3, 6, 9, 10], [0, 4, 8, 10]),
        (10, 5, 5, [0, 5, 10], [0, 5, 10]),
        (3, 100, 100, [0, 3], [0, 3]),
        (1, 1, 1, [0, 1], [0, 1]),
    ],
)
def test_evaluations_and_saves_keep_their_rhythm_and_end_the_run(
    steps: int, eval_every: int, save_every: int, evaluated: list[int], saved: list[int]
) -> None:
    bench = Bench(budget=Budget(steps=steps), eval_every=eval_every, save_every=save_every, lr=1e-3)
    outcome = bench.run()
    assert (outcome.stopped_by, outcome.state.step) == ("steps", steps)
    assert [event.step for event in bench.reported(Evaluated)] == evaluated
    assert bench.saved == saved


def test_an_average_is_what_is_validated_and_saved_while_training_goes_on_from_the_last_weights() -> None:
    settings: dict[str, Any] = {"budget": Budget(steps=3), "eval_every": 1, "lr": 1e-2}
    plain, averaged = Bench(**settings), Bench(**settings, average=0.5)
    plain.run()
    averaged.run()
    assert_same(values(averaged.model), values(plain.model))
    for step, best in enumerate(averaged.best_values[1:], start=1):
        seen = plain.best_values[1 : step + 1]
        assert_same(best, {name: torch.stack([one[name] for one in seen]).mean(0) for name in best})


def test_epochs_are_a_budget_of_their_own_name() -> None:
    bench = Bench(budget=Budget(epochs=4))
    assert (bench.run().stopped_by, bench.state.step) == ("epochs", 4)


# Validation.


def test_the_best_weights_are_those_of_the_lowest_loss_and_a_tie_is_no_better() -> None:
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.9, 4.0])
    bench = Bench(validate=lambda: next(losses), budget=Budget(steps=5), eval_every=1, lr=1e-3)
    state = bench.run().state
    assert bench.best == [(0, 3.0), (1, 2.0), (4, 1.9)]
    assert [event.best for event in bench.reported(Evaluated)] == [True, True, False, False, True, False]
    assert (state.best_loss, state.best_step, state.val_loss, state.stale, state.evaluated) == (1.9, 4, 4.0, 1, 5)


@pytest.mark.parametrize(("patience", "stops"), [(1, 6), (2, 8), (3, 12), (None, 20)])
def test_training_stops_after_so_many_evaluations_without_improvement(patience: int | None, stops: int) -> None:
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
    """The loss of one step's training is spoiled; looking at a loss without training on it is not counted."""
    calls = iter(range(1000))

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        return spoil(loss, model) if torch.is_grad_enabled() and next(calls) == step else loss

    return objective


def infinite_gradient(loss: Loss, model: Decoder) -> Loss:
    """The root of zero: a value of 0, and a gradient without one."""
    weight = model.embedding.weight
    return loss._replace(nats=loss.nats + (weight - weight.detach()).sum().abs().sqrt())


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda loss, model: loss._replace(nats=loss.nats * math.nan), "loss"),
        (lambda loss, model: loss._replace(nats=loss.nats + math.inf), "loss"),
        (infinite_gradient, "gradient"),
    ],
)
def test_a_step_that_is_not_finite_ends_the_run_before_it_is_taken(spoil: Callable[..., Loss], what: str) -> None:
    bench = Bench(objective=fails_at(3, spoil), budget=Budget(steps=9), eval_every=2, save_every=1, lr=0.01)
    good = Bench(budget=Budget(steps=3), lr=0.01)
    with pytest.raises(DivergedError, match=f"The {what} stopped being a finite number at step 3; .* --lr") as caught:
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
    with pytest.raises(DivergedError, match=r"The validation loss stopped being a finite number at step 4") as caught:
        bench.run()
    assert caught.value.exit_code == 3
    assert bench.saved == [0, 2]
    assert bench.best == [(0, 2.0), (2, 1.5)]


class Exploding(torch.optim.SGD):
    """Its third step, from a good gradient, leaves every weight at a value."""

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
    """Finite ones too: the step that would show it comes after the save."""

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        return loss._replace(nats=loss.nats + model.embedding.weight.square().sum())

    def optimizer(model: Decoder) -> Exploding:
        exploding = Exploding(model.parameters(), lr=0.01)
        exploding.value = value
        return exploding

    bench = Bench(objective=objective, optimizer=optimizer, budget=Budget(steps=9), eval_every=9, save_every=1)
    with pytest.raises(DivergedError, match=r"The weights stopped being of use by step 3: .*; try a lower --lr"):
        bench.run()
    assert bench.saved == [0, 1, 2]


def test_looking_at_the_next_loss_before_a_save_changes_no_random_number() -> None:
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
    assert_same(step_of(bench), expected)
    assert seen == [13, 7, 4, *[2] * 10]
    assert bench.state.micro_batch == 2
    assert [event.message for event in bench.reported(Notice)] == [
        f"Out of memory: the micro-batch is now {rows}; the effective batch is still 20." for rows in (7, 4, 2)
    ]


def test_out_of_memory_in_the_middle_of_a_step_leaves_nothing_of_it() -> None:
    """Neither half a gradient, nor other random numbers than the step began with."""
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
    assert_same(step_of(bench), expected)
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


def test_a_smaller_micro_batch_is_remembered() -> None:
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
    return build_optimizer(model, TrainingConfig(**{**SETTINGS, "lr": 0.1}))


def test_a_system_without_memory_is_out_of_memory_too() -> None:
    seen: list[int] = []

    def objective(model: Decoder, batch: Batch) -> Loss:
        seen.append(len(batch))
        if len(seen) == 1:
            raise MemoryError
        return next_token(model, batch)

    Bench(objective=objective).run()
    assert seen[:3] == [6, 3, 3]


def test_the_optimizers_state_is_there_before_the_first_gradient_is() -> None:
    bench: Bench

    def objective(model: Decoder, batch: Batch) -> Loss:
        if torch.is_grad_enabled():
            assert all(len(bench.trainer.optimizer.state[parameter]) == 3 for parameter in model.parameters())
        return next_token(model, batch)

    bench = Bench(objective=objective, optimizer=adamw)
    bench.run()
    assert bench.state.step == 1


@pytest.mark.parametrize("failure", [0, 5])
def test_out_of_memory_for_the_optimizers_state_is_tried_once_more_and_changes_no_result(
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


def test_no_memory_for_the_optimizers_state_is_an_error_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(optimizer=adamw)
    before = values(bench.model)
    monkeypatch.setattr(torch, "zeros_like", out_of_memory)
    with pytest.raises(TinyLMError, match="Out of memory for the optimizer's state, before the first step") as caught:
        bench.run()
    assert caught.value.exit_code == 1
    assert bench.state.step == 0
    assert_same(values(bench.model), before)


def test_out_of_memory_in_a_step_is_an_error_and_half_a_step_is_neither_saved_nor_repeated() -> None:
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


def test_other_errors_of_an_optimizer_are_not_taken_for_memory() -> None:
    def broken(model: Decoder) -> torch.optim.Optimizer:
        optimizer = adamw(model)

        def step(*_: object) -> None:
            raise RuntimeError("a bug")

        optimizer.step = step  # type: ignore[method-assign,assignment]
        return optimizer

    with pytest.raises(RuntimeError, match="a bug"):
        Bench(optimizer=broken).run()


def test_out_of_memory_when_weights_are_checked_before_a_save_is_tried_with_fewer_rows() -> None:
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


class Stop:
    """Asks to stop from some step on; `skip` so many checks first."""

    def __init__(self, step: int, skip: int = 0) -> None:
        self.step, self.skip, self.bench = step, skip, None

    def __call__(self) -> None:
        assert self.bench is not None
        if self.bench.state.step >= self.step:
            if not self.skip:
                raise StopTraining
            self.skip -= 1


def stopped(step: int, **choices: Any) -> tuple[Bench, Outcome]:
    stop = Stop(step)
    bench = Bench(check_stop=stop, budget=Budget(steps=9), lr=1e-3, **choices)
    stop.bench = bench
    return bench, bench.run()


@pytest.mark.parametrize("step", [0, 1, 4, 6])
def test_a_stop_saves_the_step_it_came_in_and_evaluates_no_more(step: int) -> None:
    bench, outcome = stopped(step, eval_every=4, save_every=4)
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
    assert (state.step, state.evaluated, state.stale, bench.saved) == (4, 0, 0, [0, 4])


def test_a_stop_before_the_first_evaluation_ends_leaves_nothing_to_save() -> None:
    def validate() -> float:
        raise StopTraining

    bench = Bench(validate=validate)
    assert bench.run().stopped_by == "signal"
    assert (bench.saved, bench.best, bench.state.evaluated) == ([], [], -1)


# Time.


class Clock:
    """Stands still unless told how long something takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(t, "time", SimpleNamespace(monotonic=lambda: self.now))

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def bench(self, budget: float, step: float, val: float, save: float, **choices: Any) -> Bench:
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
def test_a_budget_of_time_is_kept_from_process_start_to_exit(
    budget: float, setup: float, step: float, val: float, save: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start-up, the last evaluation and the last save included, within a twentieth."""
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


def test_a_budget_that_is_gone_before_training_begins_still_evaluates_and_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    bench = clock.bench(10, 1, 1, 1, started=clock.now - 20)
    assert bench.run().stopped_by == "time"
    assert bench.saved[-1] == bench.state.step <= 1


def test_a_resumed_run_has_the_seconds_left_that_it_had_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    state = TrainerState(step=40, seconds=70.0, setup_seconds=4.0, micro_batch=6, evaluated=40, best_loss=0.5)
    bench = clock.bench(100, 1, 0, 0, state=state)
    bench.run()
    assert bench.reported(Stepped)[0].progress == pytest.approx((70 - 4) / (100 - 4 - t.EXIT_SECONDS))
    assert clock.now - 1000 == pytest.approx(30, abs=1.5)
    assert bench.state.seconds == pytest.approx(100, abs=1.5)
    assert bench.state.setup_seconds == 4


def test_speed_is_measured_without_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """36 tokens a step of half a second."""
    clock = Clock(monkeypatch)
    bench = clock.bench(50, 0.5, 9, 7, log_every=10)
    bench.run()
    assert [event.tokens_per_second for event in bench.reported(Logged)] == pytest.approx(
        [72.0] * len(bench.reported(Logged))
    )
    assert len(bench.reported(Logged)) >= 2


# Formats.


def test_products_are_computed_in_bf16_and_weights_stay_in_fp32() -> None:
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


def half(**choices: Any) -> Bench:
    """Training in fp16 with loss scaling, on which a CPU is slow and no less right."""
    return Bench(model=randomised(build_model(CONFIG)), dtype="fp16", **{"lr": 1e-3, **choices})


def overflows(steps: range) -> Callable[[Decoder, Batch], Loss]:
    """A gradient that is too large for fp16 in some steps, of a loss that is not."""
    calls = iter(range(1000))

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        if not torch.is_grad_enabled() or next(calls) not in steps:
            return loss
        return infinite_gradient(loss, model)

    return objective


def test_a_step_in_fp16_is_near_that_of_fp32() -> None:
    bench, exact = half(), Bench(model=randomised(build_model(CONFIG)), lr=1e-3)
    bench.run()
    exact.run()
    assert {parameter.dtype for parameter in bench.model.parameters()} == {torch.float32}
    for name, value in values(exact.model).items():
        torch.testing.assert_close(values(bench.model)[name], value, rtol=0, atol=2e-4)


def test_a_step_that_overflows_fp16_is_left_out_and_halves_the_scale() -> None:
    bench, other = half(objective=overflows(range(2, 4)), budget=Budget(steps=4)), half(budget=Budget(steps=2))
    state = bench.run().state
    other.run()
    assert_same(values(bench.model), values(other.model))
    assert (state.step, state.skipped) == (4, 2)
    assert state.scaler["scale"] == 65536 / 4
    norms = [event.grad_norm for event in bench.reported(Logged)]
    assert norms[2:] == [None, None]
    assert all(math.isfinite(norm) for norm in norms[:2])


def test_an_average_can_begin_with_steps_that_are_left_out() -> None:
    def muon(model: Decoder) -> torch.optim.Optimizer:
        matrices = layer_matrices(model)
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        settings = {"lr": 1e-3, "betas": (0.9, 0.99), "epsilon": 1e-8, "weight_decay": 0.0}
        return MuonAdamW(matrices, [{"params": others}], **settings, precision=torch.float32)

    bench = half(objective=overflows(range(2)), optimizer=muon, average=0.1, budget=Budget(steps=4), eval_every=1)
    bench.run()
    first, _, third, _, last = bench.best_values
    assert_same(third, first)
    assert not torch.equal(last["norm.weight"], first["norm.weight"])


def test_fp16_that_overflows_step_after_step_has_diverged() -> None:
    bench = half(objective=overflows(range(5, 1000)), budget=Budget(steps=999))
    with pytest.raises(DivergedError, match=f"The gradient .* at step {5 + t.MOST_SKIPPED}; .* --lr"):
        bench.run()


def test_a_resumed_run_scales_its_loss_as_before() -> None:
    """The scale doubles after 2,000 good steps and halves after a bad one."""
    bench = half(objective=overflows(range(1, 2)), budget=Budget(steps=2))
    state = TrainerState.from_json(json.loads(json.dumps(bench.run().state.to_json())))
    assert state.scaler["scale"] == 65536 / 2
    state = half(state=state, budget=Budget(steps=3)).run().state
    assert (state.scaler["scale"], state.scaler["_growth_tracker"]) == (65536 / 2, 1)


def test_what_is_inspected_of_a_step_is_asked_when_its_gradient_is_there_and_logged() -> None:
    bench = Bench(budget=Budget(steps=4), log_every=2, lr=0.01)
    seen: list[float] = []

    def inspect() -> dict[str, float]:
        assert bench.model.embedding.weight.grad is not None
        seen.append(bench.model.embedding.weight.grad.norm().item())
        return {"of_embedding": seen[-1]}

    bench.trainer.inspect = inspect
    bench.run()
    assert [event.told for event in bench.reported(Logged)] == [{"of_embedding": value} for value in seen]
    assert len(seen) == 2
