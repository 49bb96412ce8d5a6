"""The training loop when the loss, a gradient or a weight is not finite."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.training.trainer_bench import Bench, assert_same, infinite_gradient, values
from tests.variants import small
from tinylm.errors import DivergedError
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.objectives.loss import Loss, next_token
from tinylm.text.batches import Batch
from tinylm.training_config import Budget


def fails_at(step: int, spoil: Callable[[Loss, Decoder], Loss]) -> Callable[[Decoder, Batch], Loss]:
    """An objective that applies `spoil` to the loss of training step `step`; passes without gradients do not count."""
    calls = iter(range(1000))

    def objective(model: Decoder, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        return spoil(loss, model) if torch.is_grad_enabled() and next(calls) == step else loss

    return objective


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


def test_a_validation_loss_that_is_not_finite_ends_the_run_and_is_never_saved() -> None:
    for loss in (math.nan, math.inf, -math.inf):
        losses = iter([2.0, 1.5, loss])
        choices: dict[str, Any] = {"budget": Budget(steps=9), "eval_every": 2, "save_every": 2, "lr": 0.01}
        bench = Bench(validate=lambda losses=losses: next(losses), **choices)
        with pytest.raises(DivergedError, match=r"The validation loss after step 4 is not finite") as caught:
            bench.run()
        assert caught.value.exit_code == 3
        assert bench.saved == [0, 2]
        assert bench.best == [(0, 2.0), (2, 1.5)]


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

    def optimizer(model: Decoder) -> Exploding:
        return Exploding(model.parameters(), lr=0.01)

    bench = Bench(objective=objective, optimizer=optimizer, budget=Budget(steps=9), eval_every=9, save_every=1)
    message = r"After step 3, a weight or the next loss is not finite; .* Try a lower `lr`"
    with pytest.raises(DivergedError, match=message):
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
