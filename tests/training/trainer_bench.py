"""A trainer under test with a small decoder in float64, for the test_trainer*.py files."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from tests.variants import randomised, small
from tinylm.config.training import Budget, TrainingConfig
from tinylm.objectives.loss import Loss, next_token
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.text.batches import Batch
from tinylm.training.events import Event
from tinylm.training.execution import GraphedModel
from tinylm.training.state import TrainerState
from tinylm.training.trainer import Trainer
from tinylm.transformer.architectures import Decoder, Transformer
from tinylm.transformer.build import build_model

CONFIG = small(context=6, layers=1, width=8, heads=2, kv_heads=1, ffn_width=8)
SETTINGS: dict[str, Any] = {"budget": Budget(steps=1), "batch_size": 6, "micro_batch": 6, "lr": 1.0, "min_lr": 0.0}
SETTINGS |= {"warmup": 0.0, "schedule": "constant", "grad_clip": 0.0}
SETTINGS |= {"eval_every": 1000, "save_every": 1000, "log_every": 1}


def decoder() -> Decoder:
    model = randomised(build_model(CONFIG)).double()
    assert isinstance(model, Decoder)
    return model


def random_batch(number: int, rows: int = 6, target_fraction: float | None = None) -> Batch:
    """Random ids from the seed `number`, with a random loss mask that keeps about `target_fraction` of the targets."""
    rng = torch.Generator().manual_seed(number)
    ids = torch.randint(CONFIG.vocab_size, (rows, CONFIG.context + 1), generator=rng)
    mask = None if target_fraction is None else torch.rand(rows, CONFIG.context, generator=rng) < target_fraction
    return Batch(ids[:, :-1], ids[:, 1:], mask)


def with_auxiliary(model: Decoder, batch: Batch) -> Loss:
    """The next-token loss, with the mean square of each sequence's hidden states as auxiliary loss."""
    loss = next_token(model, batch)
    return loss._replace(aux=model(batch.ids).hidden.square().mean(dim=(1, 2)).sum())


class Bench:
    """A trainer under test: records its events and saves. Each of its parts and settings can be replaced."""

    def __init__(
        self,
        *,
        model: Decoder | None = None,
        objective: Callable[..., Loss] = next_token,
        batches: Callable[[int], Batch] = random_batch,
        validate: Callable[[], float] | None = None,
        validation_size: int = 1,
        save: Callable[[], object] = lambda: None,
        optimizer: Callable[[Decoder], torch.optim.Optimizer] = lambda model: torch.optim.SGD(model.parameters(), lr=1),
        dtype: str = "fp32",
        check_stop: Callable[[], object] = lambda: None,
        started: float | None = None,
        state: TrainerState | None = None,
        ranks: Ranks = ONE_RANK,
        graphed: GraphedModel | None = None,
        now: Callable[[], float] = time.monotonic,
        kind: Callable[..., Trainer] = Trainer,
        **settings: Any,
    ) -> None:
        self.config = TrainingConfig(**{**SETTINGS, **settings})
        self.model = model or decoder()
        self.state = state or TrainerState(micro_batch=self.config.micro_batch)
        self.events: list[Event] = []
        self.best: list[tuple[int, float | None]] = []
        self.best_values: list[dict[str, Tensor]] = []
        self.saved: list[int] = []
        self.save_seconds = 0.0
        self._save = save
        self.validating = False
        validate = validate or (lambda: 1.0 / (1 + self.state.step))

        def validation_batches(rows: int, max_tokens: int) -> Iterator[Batch]:
            """At most `validation_size` batches of 4 targets, a power of 2, so that their mean is exact."""
            self.validation_rows = rows
            four = replace(random_batch(0, 1), mask=torch.arange(CONFIG.context)[None] < 4)
            return iter([four] * min(validation_size, -(-max_tokens // 4)))

        def validation_objective(model: Decoder, batch: Batch) -> Loss:
            self.validating = True
            total = batch.n_targets * torch.tensor(validate(), dtype=torch.float64)
            return Loss(total, batch.n_targets, torch.zeros(()))

        def check() -> None:
            """Call the given function, except after a batch of an evaluation."""
            if not self.validating:
                check_stop()
            self.validating = False

        validation = {"validation_batches": validation_batches, "validation_objective": validation_objective}
        task = SimpleNamespace(batch=batches, objective=lambda progress: objective, steps_per_epoch=1, **validation)
        self.trainer = kind(
            model=self.model,
            task=cast(Any, task),
            optimizer=optimizer(self.model),
            config=self.config,
            state=self.state,
            store=self,
            started=now() if started is None else started,
            now=now,
            dtype=dtype,
            ranks=ranks,
            graphed=graphed,
            report=self.events.append,
            check_stop=check,
        )

    def save_for_inference(self, model: Transformer, step: int, val_loss: float | None) -> None:
        self.best.append((step, val_loss))
        self.best_values.append(values(model))

    def save_for_resuming(self, model: Transformer, optimizer: torch.optim.Optimizer, state: TrainerState) -> float:
        self._save()
        self.saved.append(state.step)
        return self.save_seconds

    @property
    def saved_step(self) -> int:
        return self.saved[-1] if self.saved else -1

    def run(self) -> str:
        return self.trainer.run()

    def reported(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def trained(**choices: Any) -> Bench:
    """A trainer under test after its run."""
    bench = Bench(**choices)
    bench.run()
    return bench


def watched(watch: Callable[[Decoder, Batch], object]) -> Callable[[Decoder, Batch], Loss]:
    """The next-token loss; `watch` is called before, and may raise an exception."""

    def objective(model: Decoder, batch: Batch) -> Loss:
        watch(model, batch)
        return next_token(model, batch)

    return objective


def rows_at_most(
    most: int, seen: list[int], error: type[BaseException] = torch.OutOfMemoryError
) -> Callable[[Decoder, Batch], Loss]:
    """An objective that runs out of memory above `most` rows, and appends the rows of each call to `seen`."""

    def watch(model: Decoder, batch: Batch) -> None:
        seen.append(len(batch))
        if len(batch) > most:
            raise error("CUDA out of memory.")

    return watched(watch)


def values(model: Transformer) -> dict[str, Tensor]:
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
    (loss.total / loss.n_targets + loss.aux / len(batch)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=(name + ": {}").format)


class FakeTime:
    """A clock that advances only in `spend`, from 1000."""

    def __init__(self) -> None:
        self.now = 1000.0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def bench(self, budget: float, step: float, val: float, save: float, **choices: Any) -> Bench:
        """A trainer with a time budget whose steps, evaluations and saves take the given seconds."""

        def validate() -> float:
            self.spend(val)
            return 1.0

        settings = {"budget": Budget(time=budget), "lr": 1e-3, "eval_every": 20, "save_every": 30, **choices}
        settings |= {"now": lambda: self.now, "save": lambda: self.spend(save)}
        return Bench(objective=watched(lambda model, batch: self.spend(step)), validate=validate, **settings)
