"""The training loop when memory runs out."""

import gc
import weakref
from collections.abc import Container
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.trainer_bench import (
    SETTINGS,
    Bench,
    assert_same,
    gradient,
    random_batch,
    rows_at_most,
    trained,
    update_of,
    values,
    watched,
)
from tinylm.config.training import Budget, TrainingConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.objectives.loss import Loss, next_token
from tinylm.text.batches import Batch
from tinylm.training import trainer as trainer_module
from tinylm.training.events import Notice
from tinylm.training.optimizer import WeightAverage, build_optimizer
from tinylm.transformer.architectures import Decoder


def out_of_memory(*_: object, **__: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_gradient(error: type[BaseException]) -> None:
    seen: list[int] = []
    batch = random_batch(0, 20)
    bench = Bench(objective=rows_at_most(3, seen, error), batches=lambda number: batch, batch_size=20, micro_batch=13)
    expected = gradient(bench.model, batch)
    assert_same(update_of(bench), expected)
    assert seen == [13, 7, 4, *[2] * 10]
    assert bench.state.micro_batch == 2
    assert [event.message for event in bench.reported(Notice)] == [
        f"Out of memory: the micro-batch is now {rows}; the effective batch is still 20." for rows in (7, 4, 2)
    ]


def test_out_of_memory_of_split_windows_halves_the_micro_batch_of_windows() -> None:
    seen: list[int] = []
    bench = trained(sequence_growth=2, objective=rows_at_most(6, seen))
    assert seen == [12, 6, 6]  # sequences; two per window
    (notice,) = bench.reported(Notice)
    assert notice.message == "Out of memory: the micro-batch is now 3; the effective batch is still 6."


def test_a_reduced_micro_batch_is_kept_for_later_steps_and_sessions_and_one_sequence_too_many_is_an_error() -> None:
    seen: list[int] = []
    state = trained(objective=rows_at_most(3, seen), budget=Budget(steps=2), lr=1e-3).state
    assert seen == [6, 3, 3, 3, 3, 3]  # the fourth before the first save
    seen.clear()
    trained(objective=rows_at_most(3, seen), budget=Budget(steps=3), lr=1e-3, state=state)
    assert seen == [3, 3]
    seen.clear()
    with pytest.raises(TinyLMError, match="Out of memory with one sequence at a time; choose a smaller") as caught:
        trained(objective=rows_at_most(0, seen))
    assert (caught.value.exit_code, isinstance(caught.value, UsageError)) == (1, False)
    assert seen == [6, 3, 2, 1]


def test_out_of_memory_for_one_sequence_saves_the_steps_before_it() -> None:
    """With the weights and random numbers of the last step, so that a resumed run repeats the one that failed."""
    states: list[Tensor] = []

    def watch(model: Decoder, part: Batch) -> None:
        if bench.state.step == 3 and torch.is_grad_enabled():
            states.append(torch.get_rng_state())
            torch.rand(1)
            out_of_memory()

    choices: dict[str, Any] = {"budget": Budget(steps=9), "micro_batch": 1, "lr": 1e-3}
    bench = Bench(objective=watched(watch), save=lambda: states.append(torch.get_rng_state()), **choices)
    with pytest.raises(TinyLMError, match=r"Out of memory with one sequence .* The run is saved up to step 3\."):
        bench.run()
    assert bench.saved == [1, 3] and bench.best == [(1, None), (3, None)]
    assert_same(bench.best_values[-1], values(bench.model))
    assert torch.equal(states[-2], states[-1])


def test_out_of_memory_in_a_step_repeats_it_with_the_same_random_numbers() -> None:
    """The gradient of the failed attempt is discarded, and the random number generators are reset."""
    batch, calls, first_draws = random_batch(0, 8), iter(range(100)), []

    def watch(model: Decoder, part: Batch) -> None:
        call = next(calls)
        if call in (0, 3):
            first_draws.append(torch.rand(()).item())
        if call == 2:
            out_of_memory()

    bench = Bench(objective=watched(watch), batches=lambda number: batch, batch_size=8, micro_batch=2)
    expected = gradient(bench.model, batch)
    assert_same(update_of(bench), expected)
    assert first_draws[0] == first_draws[1]
    assert bench.state.micro_batch == 1


def test_the_tensors_of_a_pass_that_failed_are_freed_before_the_step_is_repeated() -> None:
    """Even if the garbage collector does not run of its own accord."""
    losses: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def objective(model: Decoder, batch: Batch) -> Loss:
        if torch.is_grad_enabled():  # not in the check before a save
            alive.append(sum(tensor() is not None for tensor in losses))
        loss = next_token(model, batch)
        losses.append(weakref.ref(loss.total))
        return out_of_memory() if len(batch) > 2 else loss

    gc.disable()
    try:
        trained(objective=objective, lr=1e-3)
    finally:
        gc.enable()
    assert alive == [0, 0, 0, 1, 1]  # with 6 rows, 3, and three times 2, where the loss before is not yet replaced


def adamw(model: Decoder) -> torch.optim.Optimizer:
    return build_optimizer(model, TrainingConfig(**{**SETTINGS, "lr": 0.1}), "fp32")


@pytest.mark.parametrize("failures", [{0}, {5}, range(1000)])
def test_out_of_memory_for_the_optimizer_state_is_retried_once_and_else_an_error_before_the_first_step(
    failures: Container[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    choices: dict[str, Any] = {"optimizer": adamw, "budget": Budget(steps=3), "lr": 0.1}
    plain, calls, zeros_like = trained(**choices), iter(range(1000)), torch.zeros_like

    def allocate(tensor: Tensor, *choices: object, **named: object) -> Tensor:
        return out_of_memory() if next(calls) in failures else zeros_like(tensor, *choices, **named)

    def watch(model: Decoder, batch: Batch) -> None:
        if torch.is_grad_enabled():  # the state is allocated before the first gradient
            assert all(len(bench.trainer.optimizer.state[parameter]) == 3 for parameter in model.parameters())

    bench = Bench(objective=watched(watch), **choices)
    before = values(bench.model)
    monkeypatch.setattr(torch, "zeros_like", allocate)
    if isinstance(failures, set):
        bench.run()
        assert next(calls) > max(failures)
        assert_same(values(bench.model), values(plain.model))
        return
    with pytest.raises(TinyLMError, match="Out of memory for the optimizer's state, before the first step") as caught:
        bench.run()
    assert (caught.value.exit_code, bench.state.step) == (1, 0)
    assert_same(values(bench.model), before)


@pytest.mark.parametrize(("last", "message"), [(1, "nothing is saved yet"), (3, "the run is saved up to step 2")])
def test_out_of_memory_in_the_optimizer_is_an_error_and_its_partial_step_is_not_saved(last: int, message: str) -> None:
    """An optimizer that changes one weight and then fails."""
    steps: list[int] = []

    def failing(model: Decoder) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        step = optimizer.step

        def half(*_: object) -> None:
            steps.append(1)
            if len(steps) < last:
                return step()
            next(iter(model.parameters())).data.add_(1.0)
            return out_of_memory()

        optimizer.step = half
        return optimizer

    bench = Bench(optimizer=failing, budget=Budget(steps=9), save_every=1, lr=1e-3)
    with pytest.raises(TinyLMError, match=f"Out of memory in the optimizer, in step {last}; {message}") as caught:
        bench.run()
    assert (caught.value.exit_code, isinstance(caught.value, UsageError)) == (1, False)
    assert (len(steps), bench.saved, bench.state.step) == (last, list(range(1, last)), last - 1)


def test_out_of_memory_for_an_average_of_the_weights_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightAverage, "update", out_of_memory)
    with pytest.raises(TinyLMError, match="Out of memory in the optimizer, in step 1; nothing is saved yet"):
        trained(optimizer=adamw, average=0.1, lr=1e-3)


def test_other_errors_of_an_optimizer_are_raised() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        Bench(optimizer=lambda model: Broken(model.parameters())).run()


def test_out_of_memory_in_the_check_before_a_save_reduces_its_rows_unless_weights_are_sharded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With shards, the other ranks would wait for the forward passes of more parts."""
    checked: list[int] = []

    def watch(model: Decoder, batch: Batch) -> None:
        if not torch.is_grad_enabled():
            checked.append(len(batch))
            if len(batch) > 2:
                out_of_memory()

    bench = trained(objective=watched(watch), budget=Budget(steps=2), save_every=1, eval_every=10, lr=1e-3)
    assert bench.saved[:2] == [1, 2]
    assert checked == 2 * [6, 3, 2, 1, 2, 1]
    monkeypatch.setattr(trainer_module, "is_sharded", lambda model: True)
    checked.clear()
    with pytest.raises(TinyLMError, match="Out of memory while evaluating"):
        trained(objective=watched(watch), average=0.5)
    assert checked == [6]
