"""The training loop when memory runs out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.training.trainer_bench import SETTINGS, Bench, assert_same, gradient, random_batch, update_of, values
from tinylm.errors import TinyLMError, UsageError
from tinylm.model.decoder import Decoder
from tinylm.objectives.loss import Loss, next_token
from tinylm.text.batches import Batch
from tinylm.training import trainer as trainer_module
from tinylm.training.events import Notice
from tinylm.training.optimizer import build_optimizer
from tinylm.training.weight_average import WeightAverage
from tinylm.training_config import Budget, TrainingConfig


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def rows_at_most(
    most: int, seen: list[int], error: type[BaseException] = torch.OutOfMemoryError
) -> Callable[[Decoder, Batch], Loss]:
    """An objective that runs out of memory above `most` rows, and appends the rows of each call to `seen`."""

    def objective(model: Decoder, batch: Batch) -> Loss:
        seen.append(len(batch))
        if len(batch) > most:
            raise error("CUDA out of memory.")
        return next_token(model, batch)

    return objective


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
    bench = Bench(sequence_growth=2, objective=rows_at_most(6, seen))
    bench.run()
    assert seen == [12, 6, 6]  # sequences; two per window
    (notice,) = bench.reported(Notice)
    assert notice.message == "Out of memory: the micro-batch is now 3; the effective batch is still 6."


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


def adamw(model: Decoder) -> torch.optim.Optimizer:
    return build_optimizer(model, TrainingConfig(**{**SETTINGS, "lr": 0.1}), "fp32")


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
        return zeros_like(tensor, *choices, **named)

    def objective(model: Decoder, batch: Batch) -> Loss:
        if torch.is_grad_enabled():  # the state is allocated before the first gradient
            assert all(len(bench.trainer.optimizer.state[parameter]) == 3 for parameter in model.parameters())
        return next_token(model, batch)

    bench = Bench(optimizer=adamw, objective=objective, budget=Budget(steps=3), lr=0.1)
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

        optimizer.step = half
        return optimizer

    bench = Bench(optimizer=failing, budget=Budget(steps=9), save_every=1, lr=1e-3)
    with pytest.raises(TinyLMError, match="in step 3; the run is saved up to step 2") as caught:
        bench.run()
    assert (caught.value.exit_code, isinstance(caught.value, UsageError)) == (1, False)
    assert len(steps) == 3
    assert bench.saved == [0, 1, 2]
    assert bench.state.step == 2


def test_out_of_memory_for_an_average_of_the_weights_names_the_last_save_that_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WeightAverage, "update", out_of_memory)
    for saved, message in ((0, "in step 1; the run is saved up to step 0"), (-1, "in step 1; nothing is saved yet")):
        monkeypatch.setattr(Bench, "saved_step", property(lambda bench, saved=saved: saved))
        bench = Bench(optimizer=adamw, average=0.1, lr=1e-3)
        with pytest.raises(TinyLMError, match=f"Out of memory in the optimizer, {message}"):
            bench.run()
        assert bench.saved == [0]


def test_other_errors_of_an_optimizer_are_raised() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        Bench(optimizer=lambda model: Broken(model.parameters())).run()


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


def test_sharded_the_check_before_a_save_is_not_repeated_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would wait for the forward passes of more parts."""
    monkeypatch.setattr(trainer_module, "is_sharded", lambda model: True)
    seen: list[int] = []
    bench = Bench(objective=rows_at_most(3, seen), micro_batch=6, average=0.5)
    with pytest.raises(TinyLMError, match="Out of memory while evaluating"):
        bench.run()
    assert seen == [6]
