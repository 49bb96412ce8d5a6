"""The training loop. It knows no architecture and prints nothing: what happens, it reports as events."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tinylm.config import TrainingConfig
from tinylm.device import autocast, empty_cache
from tinylm.errors import DivergedError, TinyLMError, is_out_of_memory
from tinylm.evaluation import losses
from tinylm.model.stack import Transformer
from tinylm.objective import Objective
from tinylm.text.dataset import Batch
from tinylm.training.average import WeightAverage
from tinylm.training.eager import eagerly
from tinylm.training.optimizer import allocate_state, set_learning_rate
from tinylm.training.schedule import learning_rate
from tinylm.training.state import TrainerState, capture_rng, restore_rng


@dataclass(frozen=True)
class Logged:
    """Every `log_every` steps: the mean training loss since the last time, and of what the model told of itself.

    A step that was left out has no gradient norm.
    """

    step: int
    progress: float
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_second: float
    seconds: float
    told: dict[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """`best`: whether this is the lowest validation loss so far."""

    step: int
    val_loss: float
    best: bool
    seconds: float


@dataclass(frozen=True)
class Stepped:
    """After every step, for a progress bar."""

    step: int
    progress: float


@dataclass(frozen=True)
class Notice:
    """Something the user should know."""

    message: str


Event = Logged | Evaluated | Stepped | Notice


class Store(Protocol):
    """Where a trainer saves."""

    def save_best(self, model: Transformer, step: int, val_loss: float) -> None: ...

    def save_last(self, model: Transformer, optimizer: torch.optim.Optimizer, state: TrainerState) -> None: ...


EXIT_SECONDS = 0.2  # for the process to end
MOST_SKIPPED = 30  # steps one after another; by then fp16's loss scale, halved each time, is below one in 10,000


class StopTraining(Exception):
    """Raised by `check_stop`; what was being done is abandoned, and the state saved as it was before."""


@dataclass(frozen=True)
class Outcome:
    """`stopped_by`: steps, epochs, time, patience, or signal."""

    stopped_by: str
    state: TrainerState


class Trainer:
    """Trains a model on batches by number until its budget is used up, validation stops improving, or it is stopped.

    `validate` returns the validation loss; `total_steps` is the budget in steps, `None` for a budget of time; `started`
    is the `time.monotonic()` from which that counts; `check_stop` raises StopTraining when the user wants to stop;
    `inspect` gives more to log of a step, and is asked when its gradient is there. With an `average`, its weights are
    validated and saved as the best, while training goes on from the last.
    """

    def __init__(
        self,
        model: Transformer,
        objective: Objective,
        batches: Callable[[int], Batch],
        validate: Callable[[], float],
        optimizer: torch.optim.Optimizer,
        config: TrainingConfig,
        *,
        dtype: str,
        total_steps: int | None,
        state: TrainerState,
        store: Store,
        report: Callable[[Event], None],
        check_stop: Callable[[], None],
        started: float,
        inspect: Callable[[], dict[str, Any]] = dict,
        average: WeightAverage | None = None,
    ) -> None:
        self.model = model
        self.objective = objective
        self.batches = batches
        self.validate = validate
        self.optimizer = optimizer
        self.config = config
        self.dtype = dtype
        self.state = state
        self.store = store
        self.report = report
        self.check_stop = check_stop
        self.inspect = inspect
        self.average = average
        self.device = next(model.parameters()).device
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == "fp16")
        if state.scaler:
            self._scaler.load_state_dict(state.scaler)
        self._total_steps = total_steps
        # Seconds of an earlier sitting are as if the process had begun that much sooner.
        self._started = started - state.seconds
        self._progress = 0.0
        self._saved = (state.step, state.evaluated) if state.evaluated >= 0 else (-1, -1)
        self._speed = _Speed()

    def run(self) -> Outcome:
        """Raises DivergedError when a loss is not finite; nothing is saved after that."""
        self.model.train()
        try:
            stopped_by = self._loop()
            if self.state.evaluated != self.state.step:
                self._evaluate()
        except StopTraining:
            stopped_by = "signal"
        if self._saved != (self.state.step, self.state.evaluated) and self.state.evaluated >= 0:
            self._save()
        return Outcome(stopped_by, self.state)

    def _loop(self) -> str:
        config, state = self.config, self.state
        while True:
            if state.step % config.eval_every == 0 and state.evaluated != state.step:
                self._evaluate()
            if state.step % config.save_every == 0 and self._saved != (state.step, state.evaluated):
                self._save()
            if config.patience is not None and state.stale >= config.patience:
                return "patience"
            if state.step == 0:
                state.setup_seconds = self._seconds()
            progress = self.progress()
            if progress >= 1:
                return config.budget.kind
            self.check_stop()
            self._step(progress)

    def progress(self) -> float:
        """The used part of the budget. A budget of time leaves room for one more step, an evaluation and a save."""
        state = self.state
        if self._total_steps is not None:
            return state.step / self._total_steps
        assert self.config.budget.time is not None
        reserve = 1.1 * (state.evaluation_seconds + state.save_seconds) + EXIT_SECONDS
        reserve += state.stepping_seconds / max(state.step, 1)
        room = max(self.config.budget.time - reserve - state.setup_seconds, 0.01)
        self._progress = max(self._progress, (self._seconds() - state.setup_seconds) / room)
        return self._progress

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _step(self, progress: float) -> None:
        config, state = self.config, self.state
        begun = time.monotonic()
        batch = self.batches(state.step)
        self._allocate_optimizer()
        nats, told = self._accumulate(batch)
        # Each step is taken at the rate that the schedule has in its middle, so that neither the first nor the last is
        # taken at none.
        middle = progress + 0.5 / self._total_steps if self._total_steps else (progress + self.progress()) / 2
        lr = learning_rate(middle, config)
        set_learning_rate(self.optimizer, lr)
        self._scaler.unscale_(self.optimizer)
        logging = (state.step + 1) % config.log_every == 0
        inspected = self.inspect() if logging else {}
        norm = self._update(nats)
        state.step += 1
        state.nats += nats
        state.scored += batch.scored
        state.sequences += len(batch)
        state.told = {name: _sum(state.told.get(name), value) for name, value in told.items()}
        state.stepping_seconds += time.monotonic() - begun
        self._speed.add(batch.tokens)
        self.report(Stepped(state.step, progress))
        if logging:
            loss = state.nats / state.scored
            told = {name: _scaled(value, 1 / state.sequences) for name, value in state.told.items()} | inspected
            state.nats, state.scored, state.told, state.sequences = 0.0, 0, {}, 0
            taken = norm if math.isfinite(norm) else None
            self.report(Logged(state.step, progress, loss, lr, taken, self._speed.read(), self._seconds(), told))

    def _allocate_optimizer(self) -> None:
        """Allocate what the optimizer's first step would, before any weight changes.

        Raises TinyLMError when there is no memory for it.
        """
        for freed in (False, True):
            try:
                allocate_state(self.optimizer)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if freed:
                    raise TinyLMError(
                        "Out of memory for the optimizer's state, before the first step; choose a smaller --size."
                    ) from None
            self._free_memory()

    def _free_memory(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        empty_cache(self.device)

    def _update(self, nats: float) -> float:
        """Clip the gradient and take the step; returns the gradient's norm before clipping.

        Out of memory, the weights may be those of half a step, and are not saved. Raises TinyLMError.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        try:
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_clip or math.inf).item()
            self._require_finite(nats, norm)
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            if self.average is not None and math.isfinite(norm):
                self.average.update(self.state.step + 1)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            saved = f"the run is saved up to step {self._saved[0]}" if self._saved[0] >= 0 else "nothing is saved yet"
            raise TinyLMError(
                f"Out of memory in the optimizer, in step {self.state.step + 1}; {saved}. Free memory and resume, "
                "or choose a smaller --size."
            ) from None
        return norm

    def _require_finite(self, nats: float, norm: float) -> None:
        """fp16's loss scaling leaves out a step whose gradient overflowed, but not step after step."""
        state = self.state
        state.skipped = 0 if math.isfinite(norm) else state.skipped + 1
        most = MOST_SKIPPED if self._scaler.is_enabled() else 0
        if math.isfinite(nats) and state.skipped <= most:
            return
        what = "gradient" if math.isfinite(nats) else "loss"
        raise DivergedError(
            f"The {what} stopped being a finite number at step {state.step}; saved weights are from before it. Try "
            f"a lower --lr (it is {self.config.lr:g}) or more --warmup-steps."
        )

    def _accumulate(self, batch: Batch) -> tuple[float, dict[str, Any]]:
        """Add up the gradient of the whole batch, a micro-batch at a time; returns the summed nats, and what the model
        told times the sequences that it told it of.

        Out of memory, the micro-batch is halved and the step begun again with the same random numbers.
        """
        while True:
            rng = capture_rng()
            try:
                return self._accumulate_once(batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.state.micro_batch == 1:
                    raise TinyLMError(
                        "Out of memory with one sequence at a time; choose a smaller --size or --context."
                    ) from None
            self._free_memory()
            restore_rng(rng)
            self.state.micro_batch = -(-self.state.micro_batch // 2)
            self.report(
                Notice(
                    f"Out of memory: the micro-batch is now {self.state.micro_batch}; the effective batch is still "
                    f"{len(batch)}."
                )
            )

    def _accumulate_once(self, batch: Batch) -> tuple[float, dict[str, Any]]:
        nats = torch.zeros((), device=self.device)
        told: dict[str, Any] = {}
        for part in batch.split(self.state.micro_batch):
            with autocast(self.device.type, self.dtype):
                loss = self.objective(self.model, part.to(self.device))
            mean = loss.nats / batch.scored + loss.aux / len(batch)
            self._scaler.scale(mean).backward()
            nats += loss.nats.detach()
            for name, value in loss.told.items():
                told[name] = _sum(told.get(name), _scaled(value.tolist(), len(part)))
        return nats.item(), told

    def _evaluate(self) -> None:
        state = self.state
        begun = time.monotonic()
        with self.average.in_place() if self.average is not None else contextlib.nullcontext():
            best = self._validate()
            state.stale = 0 if best else state.stale + 1
            state.evaluated = state.step
            assert state.val_loss is not None
            self.report(Evaluated(state.step, state.val_loss, best, self._seconds()))
        state.evaluation_seconds = time.monotonic() - begun
        self._speed.pause(state.evaluation_seconds)

    def _validate(self) -> bool:
        """Whether the weights are the best so far, which are then saved."""
        state = self.state
        val_loss = self.validate()
        if not math.isfinite(val_loss):
            raise DivergedError(
                f"The validation loss stopped being a finite number at step {state.step}; saved weights are from "
                f"before that. Try a lower --lr (it is {self.config.lr:g})."
            )
        best = state.best_loss is None or val_loss < state.best_loss
        if best:
            state.best_loss, state.best_step = val_loss, state.step
            self.store.save_best(self.model, state.step, val_loss)
        state.val_loss = val_loss
        return best

    def _save(self) -> None:
        state = self.state
        begun = time.monotonic()
        if not self._sound():
            raise DivergedError(
                f"The weights stopped being of use by step {state.step}: the next loss is not a finite number. What "
                f"was saved is intact; try a lower --lr (it is {self.config.lr:g})."
            )
        state.seconds = self._seconds()
        state.scaler = self._scaler.state_dict()
        self.store.save_last(self.model, self.optimizer, state)
        self._saved = (state.step, state.evaluated)
        state.save_seconds = time.monotonic() - begun
        self._speed.pause(state.save_seconds)

    def _sound(self) -> bool:
        """Whether the weights are finite, and lead to a finite loss: the last step may have ruined them."""
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.model.parameters()):
            return False
        if self.state.evaluated == self.state.step and self.average is None:
            return True
        rng = capture_rng()
        part = next(self.batches(self.state.step).split(self.state.micro_batch))
        with torch.no_grad(), eagerly():
            finite = all(
                math.isfinite(loss.nats.item()) for loss in losses(self.model, self.objective, [part], self.dtype)
            )
        restore_rng(rng)
        return finite


def _scaled(value: Any, factor: float) -> Any:
    """A number, or a list of them, or of lists, times a factor."""
    return [_scaled(entry, factor) for entry in value] if isinstance(value, list) else value * factor


def _sum(one: Any, other: Any) -> Any:
    """Of two numbers, or of two lists entry by entry; `None` is nothing yet.

    Raises TinyLMError when they are not alike, as a saved sum of another model would be.
    """
    if one is None:
        return other
    if not isinstance(one, list) and not isinstance(other, list):
        return one + other
    if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        raise TinyLMError("The saved training state does not fit the model: its routing metrics have another shape.")
    return [_sum(a, b) for a, b in zip(one, other, strict=True)]


class _Speed:
    """Tokens a second since it was last read, without the pauses for evaluating and saving."""

    def __init__(self) -> None:
        self._tokens = 0
        self._since = time.monotonic()

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    def pause(self, seconds: float) -> None:
        self._since += seconds

    def read(self) -> float:
        now = time.monotonic()
        speed = self._tokens / max(now - self._since, 1e-9)
        self._tokens, self._since = 0, now
        return speed
