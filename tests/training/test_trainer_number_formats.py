"""The training loop in bf16 and fp16, compared with the same steps in fp32, and with numbers that are not finite."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.training.trainer_bench import CONFIG, Bench, assert_same, trained, values, watched
from tests.variants import randomised
from tinylm.config.training import Budget
from tinylm.errors import DivergedError
from tinylm.kernels.graphs import AdamW
from tinylm.machine.device import DTYPES
from tinylm.objectives.loss import Loss, next_token
from tinylm.text.batches import Batch
from tinylm.training import trainer as trainer_module
from tinylm.training.events import Logged
from tinylm.training.muon import Muon
from tinylm.training.optimizer import MuonAdamW, layer_matrices
from tinylm.training.state import TrainerState
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_products_are_in_the_number_format_and_weights_and_steps_those_in_fp32(dtype: str) -> None:
    """fp16 has loss scaling, which is slow on a CPU but correct."""
    seen: list[torch.dtype] = []
    objective = watched(lambda model, batch: seen.append(model.logits(torch.ones(1, CONFIG.width)).dtype))
    rough, exact = (trained(model=in_fp32(), objective=objective, dtype=name, lr=1e-3) for name in (dtype, "fp32"))
    assert seen == [DTYPES[dtype], torch.float32]
    assert {parameter.dtype for parameter in rough.model.parameters()} == {torch.float32}
    for name, value in values(exact.model).items():
        torch.testing.assert_close(values(rough.model)[name], value, rtol=0, atol=2e-4)


def in_fp32() -> Decoder:
    return randomised(build_model(CONFIG))


def fp16_bench(**choices: Any) -> Bench:
    return Bench(model=in_fp32(), dtype="fp16", **{"lr": 1e-3, **choices})


def infinite_gradient(loss: Loss, model: Decoder) -> Loss:
    """Adds sqrt(0) to the loss, as if its gradient overflowed fp16: the value is unchanged, the gradient not finite."""
    weight = model.embedding.weight
    return loss._replace(total=loss.total + (weight - weight.detach()).sum().abs().sqrt())


def spoiled(
    steps: range, spoil: Callable[[Loss, Decoder], Loss] = infinite_gradient
) -> Callable[[Decoder, Batch], Loss]:
    """An objective that applies `spoil` to the losses of these steps; passes without gradients do not count."""
    calls = iter(range(1000))

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        return spoil(loss, model) if torch.is_grad_enabled() and next(calls) in steps else loss

    return objective


def test_a_step_that_overflows_fp16_is_skipped_and_halves_the_scale() -> None:
    bench, other = (
        fp16_bench(objective=spoiled(range(2, 4)), budget=Budget(steps=4)),
        fp16_bench(budget=Budget(steps=2)),
    )
    bench.run()
    other.run()
    state = bench.state
    assert_same(values(bench.model), values(other.model))
    assert (state.step, state.skipped_steps, state.scaler["scale"]) == (4, 2, 65536 / 4)
    norms = [event.grad_norm for event in bench.reported(Logged)]
    assert norms[2:] == [None, None] and all(math.isfinite(norm) for norm in norms[:2])


def test_skipped_steps_at_the_start_do_not_change_an_average() -> None:
    def muon(model: Decoder) -> torch.optim.Optimizer:
        matrices = layer_matrices(model)
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        return MuonAdamW(Muon(matrices, 1e-3, 0.0, 0.95, torch.float32), AdamW(others, lr=1e-3, fused=True))

    bench = fp16_bench(objective=spoiled(range(2)), optimizer=muon, average=0.1, budget=Budget(steps=4), eval_every=1)
    before = values(bench.model)
    bench.run()
    _, second, _, last = bench.best_values
    assert_same(second, before)
    assert not torch.equal(last["norm.weight"], before["norm.weight"])


def test_too_many_skipped_steps_in_a_row_are_divergence() -> None:
    step = 6 + trainer_module.MAX_SKIPPED_STEPS
    with pytest.raises(DivergedError, match=f"The gradient of step {step} is not finite; .* `lr`"):
        fp16_bench(objective=spoiled(range(5, 1000)), budget=Budget(steps=999)).run()


def test_a_resumed_run_restores_the_loss_scale() -> None:
    """The scale doubles after 2,000 good steps and halves after a bad one."""
    bench = fp16_bench(objective=spoiled(range(1, 2)), budget=Budget(steps=2))
    bench.run()
    state = TrainerState.from_json(json.loads(json.dumps(bench.state.to_json())))
    assert state.scaler["scale"] == 65536 / 2
    resumed = fp16_bench(state=state, budget=Budget(steps=3))
    resumed.run()
    state = resumed.state
    assert (state.scaler["scale"], state.scaler["_growth_tracker"]) == (65536 / 2, 1)


# Numbers that are not finite.


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
    bench = Bench(objective=spoiled(range(3, 4), spoil), budget=Budget(steps=9), eval_every=2, save_every=1, lr=0.01)
    with pytest.raises(DivergedError, match=f"The {what} of step 4 is not finite; .* `lr`") as caught:
        bench.run()
    assert (caught.value.exit_code, bench.saved, bench.best[-1][0]) == (3, [1, 2, 3], 2)
    assert_same(values(bench.model), values(trained(budget=Budget(steps=3), lr=0.01).model))


def test_a_validation_loss_that_is_not_finite_ends_the_run_and_is_never_saved() -> None:
    for loss in (math.nan, math.inf, -math.inf):
        losses = iter([2.0, 1.5, loss])
        choices: dict[str, Any] = {"budget": Budget(steps=9), "eval_every": 2, "save_every": 2, "lr": 0.01}
        bench = Bench(validate=lambda losses=losses: next(losses), **choices)
        with pytest.raises(DivergedError, match=r"The validation loss after step 4 is not finite") as caught:
            bench.run()
        assert (caught.value.exit_code, bench.saved, bench.best) == (3, [1, 2], [(1, None), (2, 1.5)])


@pytest.mark.parametrize("value", [math.nan, 1e200])
def test_weights_whose_next_loss_is_not_finite_are_never_saved(value: float) -> None:
    """Also if the weights are finite (1e200): the step whose loss would show it comes after the save."""
    steps = itertools.count(1)

    class Exploding(torch.optim.SGD):
        """Its third step sets every weight to `value`, though its gradient is finite."""

        def step(self, closure: object = None) -> None:
            super().step()
            if next(steps) == 3:
                for parameter in self.param_groups[0]["params"]:
                    parameter.data.fill_(value)

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        return loss._replace(total=loss.total + model.embedding.weight.square().sum())

    choices: dict[str, Any] = {"optimizer": lambda model: Exploding(model.parameters(), lr=0.01), "eval_every": 9}
    bench = Bench(objective=objective, budget=Budget(steps=9), save_every=1, **choices)
    message = r"After step 3, a weight or the next loss is not finite; .* Try a lower `lr`"
    with pytest.raises(DivergedError, match=message):
        bench.run()
    assert bench.saved == [1, 2]


def test_checking_the_next_loss_before_a_save_changes_no_random_number() -> None:
    dropped, found = dataclasses.replace(CONFIG, dropout=0.5), []
    for every, saved in ((1, [1, 2, 3, 4, 5, 6]), (100, [1, 6])):
        bench = Bench(model=build_model(dropped).double(), budget=Budget(steps=6), save_every=every, lr=0.01)
        torch.manual_seed(3)
        bench.run()
        assert sorted({*bench.saved}) == saved
        found.append(values(bench.model))
    assert_same(*found)
