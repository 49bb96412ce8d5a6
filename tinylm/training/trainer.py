"""The training loop. It is independent of the architecture, prints nothing, and reports its progress as events."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tinylm.config.training import TrainingConfig, window_parts
from tinylm.errors import DivergedError, TinyLMError, is_out_of_memory
from tinylm.evaluation.loop import EvaluationLoss, batch_losses, default_batch_size, evaluate_loss
from tinylm.jobs.job import Task
from tinylm.kernels.without_compiler import force_eager
from tinylm.machine.device import autocast, empty_cache, mark, runs_ahead
from tinylm.objectives.loss import LanguageModel, Objective
from tinylm.planning.memory import evaluation_rows
from tinylm.planning.recipes import MAX_EVALUATION_SHARE
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.text.batches import Batch, prefetch
from tinylm.training.events import Evaluated, Event, Logged, Notice, Stepped
from tinylm.training.execution import GraphedModel
from tinylm.training.optimizer import WeightAverage, allocate_state, learning_rate, set_learning_rate
from tinylm.training.parallel import full, is_sharded, micro_batches, release_gathered, sum_gradients, weights_finite
from tinylm.training.state import StoppingRule, TrainerState, capture_rng, restore_rng
from tinylm.transformer.architectures import Transformer


class Store(Protocol):
    """The place where a trainer saves a run. The methods raise TinyLMError if the run cannot be written."""

    @property
    def saved_step(self) -> int:
        """The step of the last complete save by `save_last`, -1 before the first."""
        ...

    def save_best(self, model: Transformer, step: int, val_loss: float | None) -> None:
        """Save the weights for inference: those of the lowest validation loss so far or, if the last ones are kept,
        those of the last evaluation; before the first one, those of the last save. val_loss: `None` if not evaluated
        """
        ...

    def save_last(self, model: Transformer, optimizer: torch.optim.Optimizer, state: TrainerState) -> float:
        """Save the data for resuming. Files may be written after this call returns, from copies of the tensors.

        Returns the expected duration of the next write, in seconds.
        """
        ...


PACE_STEPS = 5
STEPS_AHEAD = 2  # keeps a GPU busy; time budgets are measured on the clock of Python
MAX_SKIPPED_STEPS = 30  # consecutive; the loss scale of fp16, halved each time from 65,536, is then below 1e-4
FIRST_TOKENS = 4096  # about as many are scored before the first step
STOP_SECONDS = 2.0  # an evaluation after a stop: it is planned to take half of them


class StopTraining(Exception):
    """Raised by `check_stop` to end training. The current evaluation is abandoned, and the last step is saved."""


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains until the budget is used up, the validation loss stops improving, or `check_stop` raises StopTraining.

    The weights for inference are trained ones, whenever training ends: the loss before the first step is never the
    best, and until an evaluation has found the best, every save replaces them by the current ones.

    With `config.average`, the averaged weights are validated and saved for inference, while training continues with the
    current weights.

    task: provides the batches and the objective
    state: updated in place
    started: `time.monotonic()` from which the training time of this process counts
    dtype: number format of the forward and backward pass, under autocast: fp32, bf16 or fp16
    ranks: the processes that train the model together, each with a replica or a shard of it
    graphed: the model with CUDA graphs, which steps use; `None` without
    report: receives every event
    check_stop: called between steps and between evaluation batches; raises StopTraining to end training
    extra_metrics: called before the update of a step that is logged, when the gradients are complete; its values are
        logged with the step
    step_done: called after each step with its tokens and its duration in seconds
    """

    model: Transformer
    task: Task
    optimizer: torch.optim.Optimizer
    config: TrainingConfig
    state: TrainerState
    store: Store
    started: float
    dtype: str = "fp32"
    ranks: Ranks = ONE_RANK
    graphed: GraphedModel | None = None
    report: Callable[[Event], None] = lambda event: None
    check_stop: Callable[[], None] = lambda: None
    extra_metrics: Callable[[], dict[str, Any]] = dict
    step_done: Callable[[int, float], None] = lambda tokens, seconds: None

    def __post_init__(self) -> None:
        state = self.state
        self.device = self.model.device
        self._batch = prefetch(self.task.batch, self.device, self.ranks)
        self._rule = StoppingRule.of(self.config, self.task.steps_per_epoch)
        self._sharded = is_sharded(self.model)
        self._average = WeightAverage(self.optimizer, self.config.average) if self.config.average else None
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == "fp16")
        if state.scaler:
            self._scaler.load_state_dict(state.scaler)
        self._started = self.started - state.seconds  # so that `_seconds` includes the time of earlier sessions
        self._progress = 0.0  # the largest so far
        # Step and last_eval_step of the last save that was begun.
        self._begun_save = (state.step, state.last_eval_step) if state.step else (-1, -1)
        self._throughput = _Throughput()
        # Without loss scaling, which needs each gradient norm, losses and norms stay on a GPU until a log line, an
        # evaluation or a save, and up to STEPS_AHEAD steps are started ahead.
        self._runs_ahead = runs_ahead(self.device) and self.ranks.size == 1 and not self._scaler.is_enabled()
        self._unread: list[tuple[Tensor, Tensor]] = []  # loss and norm of the last steps
        self._read_steps = state.step
        self._started_steps: deque[Callable[[], None]] = deque()  # each waits for the end of a step
        self._norm = 0.0  # of the gradient of the last step that was read, before clipping
        self._pace: float | None = None  # seconds per step, mean of about the last PACE_STEPS
        self._evaluated_pace: float | None = None  # at the last evaluation

    def run(self) -> str:
        """Train, evaluate and save at their intervals and at the end.

        Returns why training ended: steps, epochs, time, patience, or signal.

        A signal before the end of the first step leaves nothing. `state` then has step 0.

        Raises DivergedError for a loss, gradient or weight that is not finite, after which nothing is saved, and
        TinyLMError if memory runs out at a micro-batch of one sequence (with shards, at any) or in the optimizer, and
        if the run cannot be written.
        """
        self.model.train()
        try:
            stopped_by = self._loop()
            if self.state.last_eval_step != self.state.step:
                self._evaluate()
        except StopTraining:
            stopped_by = "signal"
        if self._is_unsaved:
            self._save()
        if stopped_by == "signal":
            self._keep_last_step()
        return stopped_by

    def _loop(self) -> str:
        config, state = self.config, self.state
        while True:
            if state.step == 0 and state.last_eval_step < 0:
                self._evaluate_untrained()
            elif state.step % config.eval_every == 0 and state.last_eval_step != state.step:
                self._evaluate()
            if self._is_unsaved and self._save_is_due() and not self._ends_during_save():
                self._save()
            if self._rule.patience_exhausted(state):
                return "patience"
            if state.step == 0:
                state.setup_seconds = self._seconds()
            progress = self._current_progress() if state.step else 0.0  # one step at least, also after a long start
            if progress >= 1:
                return config.budget.kind
            self.check_stop()
            self._step(progress)

    @property
    def _is_unsaved(self) -> bool:
        state = self.state
        return state.step > 0 and self._begun_save != (state.step, state.last_eval_step)

    def _current_progress(self) -> float:
        """The used fraction of the budget. It never decreases, even if the time reserved for the final evaluation and
        save is estimated lower than before.
        """
        progress = self._rule.progress(self.state, self._seconds(), self._slowdown())
        if self._rule.total_steps is None:  # the clocks of the ranks differ
            progress = self.ranks.first(progress)
        self._progress = max(self._progress, progress)
        return self._progress

    def _save_is_due(self) -> bool:
        """Whether a save is due; also after the first step, since it makes the run, which has no untrained weights."""
        is_first = self._begun_save[0] < 0
        return self.state.step % self.config.save_every == 0 or (is_first and self._current_progress() < 1)

    def _ends_during_save(self) -> bool:
        """Whether the time budget ends before a save that begins now is written. The final save would have to wait for
        that one.
        """
        if self._rule.total_steps is not None:
            return False
        seconds = self._seconds() + self.state.save_seconds
        return bool(self.ranks.first(self._rule.progress(self.state, seconds, self._slowdown()) >= 1))

    def _slowdown(self) -> float:
        """How many times longer steps take now than at the last evaluation; at least 1."""
        if self._pace is None or self._evaluated_pace is None:
            return 1.0
        return max(1.0, self._pace / self._evaluated_pace)

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _step(self, progress: float) -> None:
        config, state = self.config, self.state
        start = time.monotonic()
        parts = window_parts(state.step, progress, config.sequence_growth)
        batch, own = (windows.split_windows(parts) for windows in self._batch(state.step))
        self.ranks.seed(config.seed, state.step)
        self._allocate_optimizer()
        loss_sum, metrics = self._accumulate(self.task.objective(progress), batch, own, parts)
        # The learning rate at the middle of the step, so that it is 0 neither in the first nor in the last step.
        total_steps = self._rule.total_steps
        middle = progress + 0.5 / total_steps if total_steps else (progress + min(1.0, self._current_progress())) / 2
        lr = learning_rate(middle, config)
        set_learning_rate(self.optimizer, lr)
        self._scaler.unscale_(self.optimizer)
        logging = (state.step + 1) % config.log_every == 0
        extra_metrics = self.extra_metrics() if logging else {}
        self._update(loss_sum)
        if self._runs_ahead:
            self._started_steps.append(mark(self.device))
            if len(self._started_steps) > STEPS_AHEAD:
                self._started_steps.popleft()()
        state.step += 1
        state.n_targets += batch.n_targets
        state.metrics = {name: _sum(state.metrics.get(name), value) for name, value in metrics.items()}
        seconds = time.monotonic() - start
        state.step_seconds += seconds
        self._pace = seconds if self._pace is None else self._pace + (seconds - self._pace) / PACE_STEPS
        self._throughput.add(batch.n_tokens)
        self.step_done(batch.n_tokens, seconds)
        self.report(Stepped(state.step, progress))
        if logging:
            self._read_losses()
            self._log(progress, lr, extra_metrics)

    def _log(self, progress: float, lr: float, extra_metrics: dict[str, Any]) -> None:
        """Report the means since the last log line, and reset the sums."""
        state = self.state
        event = Logged(
            step=state.step,
            progress=progress,
            loss=state.loss_sum / state.n_targets,
            lr=lr,
            grad_norm=self._norm if math.isfinite(self._norm) else None,
            tokens_per_second=self._throughput.read(),
            seconds=self._seconds(),
            metrics={name: _scaled(value, 1 / state.n_targets) for name, value in state.metrics.items()}
            | extra_metrics,
        )
        state.loss_sum, state.n_targets, state.metrics = 0.0, 0, {}
        self.report(event)

    def _allocate_optimizer(self) -> None:
        """Allocate the optimizer's state before any weight changes. Raises TinyLMError if memory runs out."""
        for freed in (False, True):
            try:
                allocate_state(self.optimizer)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if freed:
                    raise TinyLMError(
                        "Out of memory for the optimizer's state, before the first step; choose a smaller `size`."
                    ) from None
            self._free_memory()

    def _free_memory(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.graphed is not None:
            self.graphed.release_graphs()  # no smaller micro-batch has one of their shapes
        empty_cache(self.device)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _update(self, loss_sum: Tensor) -> None:
        """Clip the gradient and update the weights.

        Raises TinyLMError if memory runs out; some weights may then be updated and others not, and are not saved.
        """
        try:
            norm = full(torch.nn.utils.clip_grad_norm_(self._parameters(), self.config.grad_clip or math.inf))
            self._unread.append((loss_sum, norm))
            if not self._runs_ahead:
                self._read_losses()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            if self._average is not None and (self._runs_ahead or math.isfinite(self._norm)):
                self._average.update(self.state.step + 1)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            step = self.store.saved_step
            saved = f"the run is saved up to step {step}" if step >= 0 else "nothing is saved yet"
            raise TinyLMError(
                f"Out of memory in the optimizer, in step {self.state.step + 1}; {saved}. Free memory and resume, "
                "or choose a smaller `size`."
            ) from None

    def _read_losses(self) -> None:
        """Read loss and gradient norm of the steps that are not read yet.

        Raises DivergedError for one that is not finite, of the first such step.
        """
        if not self._unread:
            return
        values = torch.stack([torch.stack(pair) for pair in self._unread]).tolist()  # one transfer
        self._unread = []
        for loss_sum, norm in values:
            self._read_steps += 1
            self._norm = norm
            self._require_finite(self._read_steps, loss_sum, norm)
            self.state.loss_sum += loss_sum

    def _require_finite(self, step: int, loss_sum: float, norm: float) -> None:
        """Raise DivergedError for a loss or a gradient norm that is not finite.

        In fp16, loss scaling skips steps whose gradient overflows, so MAX_SKIPPED_STEPS consecutive skips are allowed.
        """
        state = self.state
        state.skipped_steps = 0 if math.isfinite(norm) else state.skipped_steps + 1
        max_skipped = MAX_SKIPPED_STEPS if self._scaler.is_enabled() else 0
        if math.isfinite(loss_sum) and state.skipped_steps <= max_skipped:
            return
        what = "gradient" if math.isfinite(loss_sum) else "loss"
        raise DivergedError(
            f"The {what} of step {step} is not finite; saved weights are from before that step. Try a "
            f"lower `lr` (it is {self.config.lr:g}) or more `warmup_steps`."
        )

    def _accumulate(self, objective: Objective, batch: Batch, own: Batch, parts: int) -> tuple[Tensor, dict[str, Any]]:
        """Compute the gradient of the batch over micro-batches and ranks.

        Returns two sums over targets and ranks: of the loss in nats, and of each metric.

        own: the rows of this rank. parts: the number of rows of a window.

        If memory runs out on any rank, the micro-batch is halved and the step is repeated with the same random numbers.
        Raises TinyLMError if memory runs out for one sequence, and with shards for any number, since the other ranks
        are in the middle of an exchange.
        """
        while True:
            rng = capture_rng()
            sums = self.ranks.gather(self._try_to_accumulate(objective, batch, own, parts))
            if all(part is not None for part in sums):
                break
            self._free_memory()
            restore_rng(rng)
            if self.state.micro_batch == 1:
                less = "" if self.config.checkpoint_activations else ", or `checkpoint_activations`"
                raise TinyLMError(
                    f"Out of memory with one sequence at a time; choose a smaller `size` or `context`{less}. "
                    f"{self._save_before_error()}"
                )
            self.state.micro_batch = -(-self.state.micro_batch // 2)
            self.report(
                Notice(
                    f"Out of memory: the micro-batch is now {self.state.micro_batch}; the effective batch is still "
                    f"{len(batch) // parts}."
                )
            )
        losses, all_metrics, missing = zip(*sums, strict=True)
        sum_gradients(self._parameters(), missing, self.ranks)
        metrics: dict[str, Any] = {}
        for found in all_metrics:
            metrics = {name: _sum(metrics.get(name), found.get(name)) for name in metrics | found}
        loss_sum = (
            losses[0] if self.ranks.size == 1 else torch.tensor(sum(losses), dtype=torch.float64, device=self.device)
        )
        return loss_sum, metrics

    def _try_to_accumulate(
        self, objective: Objective, batch: Batch, own: Batch, parts: int
    ) -> tuple[Tensor | float, dict[str, Any], list[int]] | None:
        """The sums of loss and metrics over the rows of this rank, and the indices of parameters without a gradient.
        With several ranks, the loss is a number.

        Returns `None` if memory runs out; with shards, raises TinyLMError.
        """
        try:
            loss_sum, metrics = self._accumulate_once(objective, batch, own, self.state.micro_batch * parts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._sharded:
                raise TinyLMError(
                    f"Out of memory in step {self.state.step + 1}; choose a smaller `micro_batch` (it is "
                    f"{self.state.micro_batch}), `size` or `context`, or start more processes."
                ) from None
            return None
        missing = [index for index, p in enumerate(self._parameters()) if p.grad is None]
        return (loss_sum if self.ranks.size == 1 else loss_sum.item()), metrics, missing

    def _accumulate_once(
        self, objective: Objective, batch: Batch, own: Batch, rows: int
    ) -> tuple[Tensor, dict[str, Any]]:
        loss_sum = torch.zeros((), device=self.device)
        metrics: dict[str, Any] = {}
        model: LanguageModel = self.model if self.graphed is None else self.graphed
        n_targets = batch.n_targets  # of all ranks
        self._scaler.scale(loss_sum)  # creates the scale even if this rank gets no rows
        for part, counts in micro_batches(batch, own, rows, self._sharded, self.ranks):
            with autocast(self.device.type, self.dtype):
                loss = objective(model, part.to(self.device))
            mean = loss.total / n_targets + loss.aux / len(batch)
            self._scaler.scale(mean if counts else 0 * mean).backward()
            if not counts:
                continue
            loss_sum += loss.total.detach()
            for name, value in loss.metrics.items():
                metrics[name] = _sum(metrics.get(name), _scaled(value.tolist(), loss.n_targets))
        return loss_sum, metrics

    def _weights_for_inference(self) -> AbstractContextManager[None]:
        """Context manager in which the model has the averaged weights, if there are any."""
        return contextlib.nullcontext() if self._average is None else self._average.average_parameters()

    def _evaluate(self) -> None:
        state = self.state
        self._read_losses()
        start = time.monotonic()
        with self._weights_for_inference():
            found, best = self._validate()
            state.evals_since_best = 0 if best else state.evals_since_best + 1
            state.last_eval_step = state.step
            self.report(Evaluated(state.step, found.loss, best, self._seconds(), metrics=found.metrics))
        state.eval_seconds = time.monotonic() - start
        self._evaluated_pace = self._pace
        self._throughput.exclude(state.eval_seconds)

    def _evaluate_untrained(self) -> None:
        """Report the loss before the first step, on few tokens, and estimate the duration of an evaluation from it.

        If the machine is so much slower than planned that an evaluation would take more than MAX_EVALUATION_SHARE of a
        time budget, all evaluations have fewer tokens.
        """
        state, budget = self.state, self.config.budget.time
        begin = time.monotonic()
        if budget is not None:
            self._validation_loss(1, self.check_stop)  # one row: loads weights and kernels, and is not timed
        start = time.monotonic()
        found = self._validation_loss(min(FIRST_TOKENS, max(1, self._eval_tokens // 4)), self.check_stop)
        state.last_eval_step = 0
        self.report(Evaluated(0, found.loss, False, self._seconds(), metrics=found.metrics, tokens=found.tokens))
        end = time.monotonic()
        seconds = end - start
        self._throughput.exclude(end - begin)
        state.eval_seconds = seconds * self._targets_in(self._eval_tokens) / found.tokens
        if budget is not None:
            state.eval_tokens = max(1, self._tokens_within(MAX_EVALUATION_SHARE * budget))
            state.eval_seconds = seconds * self._targets_in(self._eval_tokens) / found.tokens

    def _keep_last_step(self) -> None:
        """After a stop, keep the weights of the last step if none were evaluated so far, or if the last ones are kept:
        with a loss on few tokens, or without one.

        The state changes only after it was saved, so that a resumed run continues as if it had not been stopped.
        """
        state = self.state
        is_evaluated = state.best_loss is not None and (
            self.config.keep == "best" or state.step == state.last_eval_step
        )
        if state.step == 0 or is_evaluated:
            return
        with self._weights_for_inference():
            found = self._brief_loss()
            state.val_loss = None if found is None else found.loss
            self.store.save_best(self.model, state.step, state.val_loss)
            if found is not None:
                event = Evaluated(state.step, found.loss, False, self._seconds(), metrics=found.metrics)
                self.report(replace(event, tokens=found.tokens))
        state.last_eval_step = state.step
        if state.best_loss is None:
            state.best_loss, state.best_step = state.val_loss, state.step

    def _brief_loss(self) -> EvaluationLoss | None:
        """The loss on as many tokens as take about half of STOP_SECONDS; `None` if these are less than a row, and if it
        is not finite, or not found within STOP_SECONDS and the memory.
        """
        tokens = self._tokens_within(0.5 * STOP_SECONDS / self._slowdown())
        end = time.monotonic() + STOP_SECONDS

        def check() -> None:
            if self.ranks.first(time.monotonic() > end):
                raise StopTraining

        # Of several ranks, one may fail alone, and the others would wait for it.
        failures = (StopTraining, TinyLMError if self.ranks.size == 1 else DivergedError)
        with contextlib.suppress(*failures):
            return self._validation_loss(tokens, check) if tokens else None
        return None

    def _tokens_within(self, seconds: float) -> int:
        """The `eval_tokens` of an evaluation that is expected to take at most `seconds`; 0 if a row takes longer."""
        share = self.ranks.first(seconds / max(self.state.eval_seconds, 1e-9))
        tokens, targets = int(min(1.0, share) * self._eval_tokens), share * self._targets_in(self._eval_tokens)
        while tokens and self._targets_in(tokens) > targets:  # the tokens may be more than those of the text
            tokens = tokens * 4 // 5
        return tokens

    def _validate(self) -> tuple[EvaluationLoss, bool]:
        """Compute the validation loss, and save the weights for inference if they are better, or if the last ones are
        kept; returns the loss, and whether it is the lowest so far.
        """
        state = self.state
        found = self._validation_loss(self._eval_tokens, self.check_stop)
        best = state.best_loss is None or found.loss < state.best_loss
        if best:
            state.best_loss, state.best_step = found.loss, state.step
        if best or self.config.keep == "last":
            self.store.save_best(self.model, state.step, found.loss)
        state.val_loss = found.loss
        return found, best

    @property
    def _eval_tokens(self) -> int:
        return self.state.eval_tokens or self.config.eval_tokens

    def _targets_in(self, max_tokens: int) -> int:
        """Number of targets that are scored in an evaluation on about `max_tokens`."""
        return sum(batch.n_targets for batch in self._validation_batches(max_tokens))

    def _validation_batches(self, max_tokens: int) -> Iterator[Batch]:
        rows = evaluation_rows(self.state.micro_batch, self.config.checkpoint_activations)
        rows = min(default_batch_size(self.config.sequence_length or self.model.context), rows)
        return self.task.validation_batches(rows, max_tokens)

    def _validation_loss(self, max_tokens: int, check: Callable[[], None]) -> EvaluationLoss:
        """The loss on about `max_tokens` validation tokens. `check` is called after each batch, and may raise
        StopTraining. Raises DivergedError for a loss that is not finite.
        """
        batches = self._validation_batches(max_tokens)
        try:
            with force_eager():
                found = evaluate_loss(
                    self.model,
                    self.task.validation_objective,
                    batches,
                    self.dtype,
                    lambda tokens: check(),
                    self.ranks,
                    sharded=self._sharded,
                )
        finally:
            release_gathered(self.model)
        if not math.isfinite(found.loss):
            raise DivergedError(
                f"The validation loss after step {self.state.step} is not finite; saved weights are from before that "
                f"step. Try a lower `lr` (it is {self.config.lr:g})."
            )
        return found

    def _save(self) -> None:
        state = self.state
        self._read_losses()
        start = time.monotonic()
        if not self._weights_finite():
            raise DivergedError(
                f"After step {state.step}, a weight or the next loss is not finite; the last save is intact. "
                f"Try a lower `lr` (it is {self.config.lr:g})."
            )
        if state.best_loss is None:
            with self._weights_for_inference():
                self.store.save_best(self.model, state.step, None)
        state.seconds = self._seconds()
        state.scaler = self._scaler.state_dict()
        write_seconds = self.store.save_last(self.model, self.optimizer, state)
        self._begun_save = (state.step, state.last_eval_step)
        stall = time.monotonic() - start
        state.save_seconds = max(stall, write_seconds)
        self._throughput.exclude(stall)

    def _save_before_error(self) -> str:
        """Save the last step, if there is memory for it, before an error for which its weights are whole. Returns what
        the message says about the save.
        """
        with contextlib.suppress(TinyLMError):
            if self._is_unsaved:
                self._save()
        step = self._begun_save[0]
        return f"The run is saved up to step {step}." if step >= 0 else "Nothing is saved yet."

    def _weights_finite(self) -> bool:
        """Whether the weights and the loss of the first micro-batch of the next step are finite.

        The loss is not computed if these weights were just validated.
        """
        if not weights_finite(self.model, self.ranks):
            return False
        if self.state.last_eval_step == self.state.step and self._average is None:
            return True
        rng = capture_rng()
        batch, _ = self._batch(self.state.step)
        part = next(batch.split(self.state.micro_batch))
        with torch.no_grad(), force_eager():
            objective = self.task.objective(self._progress)
            losses = batch_losses(self.model, objective, [part], self.dtype, sharded=self._sharded)
            finite = all(math.isfinite(loss.total.item()) for loss in losses)
        restore_rng(rng)
        release_gathered(self.model)
        return finite


def _scaled(value: Any, factor: float) -> Any:
    """The number, or each number of the nested list, times `factor`."""
    return [_scaled(entry, factor) for entry in value] if isinstance(value, list) else value * factor


def _sum(one: Any, other: Any) -> Any:
    """The sum of two numbers, or of two nested lists entry by entry; `None` counts as zero.

    Raises TinyLMError if their shapes differ, as with a saved state of another model.
    """
    if one is None or other is None:
        return other if one is None else one
    if not isinstance(one, list) and not isinstance(other, list):
        return one + other
    if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        raise TinyLMError("The saved training state does not fit the model: its routing metrics have another shape.")
    return [_sum(a, b) for a, b in zip(one, other, strict=True)]


class _Throughput:
    """Training tokens per second since the last `read`, without the time of evaluations and saves."""

    def __init__(self) -> None:
        self._tokens = 0
        self._since = time.monotonic()

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    def exclude(self, seconds: float) -> None:
        self._since += seconds

    def read(self) -> float:
        now = time.monotonic()
        speed = self._tokens / max(now - self._since, 1e-9)
        self._tokens, self._since = 0, now
        return speed
