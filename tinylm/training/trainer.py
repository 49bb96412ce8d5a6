"""The training loop. It is independent of the architecture, prints nothing, and reports its progress as events."""

import contextlib
import functools
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tinylm.config.training import TrainingConfig, window_parts
from tinylm.errors import DivergedError, TinyLMError, memory_errors
from tinylm.evaluation.loop import EvaluationLoss, batch_losses
from tinylm.jobs.job import Task
from tinylm.kernels.graphs import force_eager
from tinylm.machine.device import autocast, empty_cache, mark
from tinylm.planning.hyperparameters import join_tokens
from tinylm.planning.recipes import MAX_EVALUATION_SHARE, MAX_JOIN_SHARE
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.text.batches import prefetch
from tinylm.training.clock import Clock, StoppingRule
from tinylm.training.events import Evaluated, Event, GenerationBegan, Joining, Logged, Notice, Stepped
from tinylm.training.execution import GraphedModel
from tinylm.training.generations import Generations
from tinylm.training.optimizer import WeightAverage, allocate_state, learning_rate
from tinylm.training.parallel import full, is_sharded, micro_batches, release_gathered, sum_gradients, weights_finite
from tinylm.training.state import Sums, TrainerState, add_metrics, capture_rng, restore_rng
from tinylm.training.validation import Validation
from tinylm.transformer.architectures import Transformer

STEPS_AHEAD = 2  # keeps a GPU busy; time budgets are measured on the clock of Python
MAX_SKIPPED_STEPS = 30  # consecutive; the loss scale of fp16, halved each time from 65,536, is then below 1e-4
FIRST_TOKENS = 4096  # about as many are scored before the first step
STOP_SECONDS = 2.0  # an evaluation after a stop: it is planned to take half of them


class Store(Protocol):
    """The place where a trainer saves a run. The methods raise TinyLMError if the run cannot be written.

    saved_step: the step of the last complete save by `save_for_resuming`, -1 before the first
    save_for_inference: the weights of the lowest validation loss so far or, if the last ones are kept, those of the
        last evaluation; before the first one, those of the last save, without a `val_loss`
    save_for_resuming: weights, optimizer and state. Files may be written after it returns, from copies of the tensors.
        Returns the expected duration of the next write, in seconds.
    """

    @property
    def saved_step(self) -> int: ...
    def save_for_inference(self, model: Transformer, step: int, val_loss: float | None) -> None: ...
    def save_for_resuming(self, model: Transformer, optimizer: torch.optim.Optimizer, state: TrainerState) -> float: ...


class StopTraining(Exception):
    """Raised by `check_stop` to end training. The current evaluation is abandoned, and the last step is saved."""


class _OutOfMemory(Exception):
    """On any rank in the passes of a step, before a weight has changed."""


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains until the budget is used up, the validation loss stops improving, or `check_stop` raises StopTraining.

    The weights for inference are trained ones, whenever training ends: the loss before the first step is never the
    best, and until an evaluation has found the best, every save replaces them by the current ones. With
    `config.average`, they are averages of the weights, and these are validated.

    task: provides the batches and the objective
    state: updated in place
    started: the moment from which the training time of this process counts. now: the clock of that moment
    dtype: number format of the forward and backward pass, under autocast: fp32, bf16 or fp16
    ranks: the processes that train the model together, each with a replica or a shard of it
    graphed: the model with CUDA graphs, which steps use; `None` without
    generations: how the weights of one are kept for the next one, and are renewed; `None` for a run of one
    report: receives every event
    check_stop: called between steps and between evaluation batches; raises StopTraining to end training
    step_done: called after each step with its tokens and its duration in seconds
    mark: see `tinylm.machine.device`
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
    generations: Generations | None = None
    report: Callable[[Event], None] = lambda event: None
    check_stop: Callable[[], None] = lambda: None
    step_done: Callable[[int, float], None] = lambda tokens, seconds: None
    now: Callable[[], float] = time.monotonic
    mark: Callable[[torch.device], Callable[[], None] | None] = mark

    def __post_init__(self) -> None:
        config, state = self.config, self.state
        self.device = self.model.device
        self._set_task(self.task)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._average = WeightAverage(self.optimizer, config.average) if config.average else None
        self._weights_for_inference = self._average.average_parameters if self._average else contextlib.nullcontext
        self._sharded = is_sharded(self.model)
        self._rule = StoppingRule.of(config, self.task.steps_per_epoch)
        self._clock = Clock(self._rule, state, self.started, self.now, self.ranks.first)
        self._validation = Validation(self.model, self.task, config, state, self.dtype, self.ranks)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == "fp16")
        if state.scaler:
            self._scaler.load_state_dict(state.scaler)
        self._scaler.scale(torch.zeros((), device=self.device))  # creates the scale, for a rank that gets no rows
        # Step, last_eval_step and joined_step of the last save that was begun.
        self._begun_save = (state.step, state.last_eval_step, state.joined_step) if state.step else (-1, -1, 0)
        # Without loss scaling, which needs each gradient norm, losses and norms stay on a GPU until a log line, an
        # evaluation or a save, and up to STEPS_AHEAD steps are started ahead.
        self._runs_ahead = self.mark(self.device) is not None and self.ranks.size == 1 and not self._scaler.is_enabled()
        self._started_steps: deque[Callable[[], None]] = deque()  # each waits for the end of a step
        self._unread: list[tuple[int, tuple[Tensor, Tensor]]] = []  # number, and loss and gradient norm, of steps
        self._norm = 0.0  # of the gradient of the last step that was read, before clipping

    def _set_task(self, task: Task) -> None:
        self.task, self._batch = task, prefetch(task.batch, self.device, self.ranks)

    def run(self) -> str:
        """Train, evaluate and save at their intervals and at the end.

        Returns why training ended: steps, epochs, time, patience, or signal. A signal before the end of the first step
        leaves nothing; `state` then has step 0.

        Raises DivergedError for a loss, gradient or weight that is not finite, after which nothing is saved, and
        TinyLMError if memory runs out at a micro-batch of one sequence (with shards, at any) or in the optimizer, and
        if the run cannot be written.
        """
        self.model.train()
        self._allocate_optimizer()
        try:
            ended_by = self._loop()
            if self.state.last_eval_step != self.state.step:
                self._evaluate()
            if self.generations is not None and self._rule.is_unjoined(self.state):
                self._join_generations(self.generations)
        except StopTraining:
            ended_by = "signal"
        self._save()
        if ended_by == "signal":
            self._keep_last_step()
        return ended_by

    def _loop(self) -> str:
        config, state = self.config, self.state
        while True:
            # Evaluate and save at their intervals
            if state.step == 0:
                self._evaluate_untrained()
            elif (state.step - state.generation_step) % config.eval_every == 0 and state.last_eval_step != state.step:
                self._evaluate()
            if state.step:  # also after the first step: a save makes the run, which has no untrained weights
                is_first = self._begun_save[0] < 0 and self._clock.progress() < 1
                is_due = is_first or state.step % config.save_every == 0
                # None that would not be written before a time budget ends: the last save would have to wait for it
                if is_due and not self._clock.ends_within(state.save_seconds):
                    self._save()

            # End the run
            if self._rule.patience_exhausted(state):
                return "patience"
            progress = self._clock.progress() if state.step else 0.0  # one step at least, also after a long start
            if progress >= 1:
                return config.budget.kind
            self.check_stop()  # raises StopTraining

            # Begin a generation, or continue one that was resumed
            if self.generations is not None and self._prepare_generation(self.generations, progress):
                continue

            # Train
            self._step_within_memory(progress)

    def _prepare_generation(self, generations: Generations, progress: float) -> bool:
        """Begin the next generation if the current one has had its part of the budget, and compute what a teacher
        predicts, where it is not known. Returns whether that took time.
        """
        state = self.state
        number = state.generation
        has_ended = self._rule.within_generation(state, progress) == 1 and number < self.config.generations - 1
        begins = has_ended and not self._clock.ends_within(state.prediction_seconds)
        if not begins and (number == 0 or self.task is not generations.task):
            return False

        # At the end of a generation, keep its weights for inference
        if begins:
            if state.last_eval_step != state.step:
                self._evaluate()
            self._save()  # a run that is stopped before the next save begins here
            number += 1
            self.report(GenerationBegan(number + 1, self.config.generations, state.step))

        # What they predict
        self._set_task(generations.task)  # frees the predictions of the teacher before
        with self._clock.prediction():
            self._set_task(generations.task_of(number, self.dtype, self.check_stop))

        # New weights, and a new optimizer
        if begins and self._clock.progress() < 1:
            generations.renew_weights(number)
            self.optimizer.state.clear()
            self._allocate_optimizer()
            state.generation, state.generation_step, state.generation_seconds = number, state.step, self._clock.seconds
            state.generation_loss, state.evals_since_best = None, 0
            state.loss_sum, state.n_targets, state.metrics = 0.0, 0, {}
        return True

    def _join_generations(self, generations: Generations) -> None:
        """Join the best generations into one model, and save it for inference if it is better than all before, or if
        the last weights are kept. If that fails, the best generation is kept, and a resumed run tries again.
        """
        state = self.state
        self._save()  # a run that is stopped in the following begins here
        self._set_task(generations.task)  # frees the predictions of a teacher
        # One that has begun, but was not validated, has no weights
        last = state.generation if state.generation_loss is not None else state.generation - 1
        try:
            numbers = generations.best(last)
            if len(numbers) == 1:
                state.joined_step, state.joined_loss = state.step, state.val_loss
                self.report(Notice("The other generations are much worse than the best one, which is kept alone."))
                return
            self.report(Joining(len(numbers)))
            with memory_errors():
                joined = generations.join(numbers, self.dtype, self.check_stop)
                validation = replace(self._validation, model=joined, members=len(numbers))
                found = validation.loss(validation.tokens, self.check_stop)
        except (MemoryError, TinyLMError) as error:
            reason = "out of memory." if isinstance(error, MemoryError) else error
            self.report(Notice(f"The generations are not joined, and the best one is kept: {reason}"))
            return
        best = state.best_loss is None or found.loss < state.best_loss
        if best:
            state.best_loss, state.best_step = found.loss, state.step
        if best or self.config.keep == "last":
            self.store.save_for_inference(joined, state.step, found.loss)
        state.joined_step, state.joined_loss = state.step, found.loss
        self._report_evaluation(found, best, joined=len(numbers))

    def _step_within_memory(self, progress: float) -> None:
        """Take a step. If memory runs out, halve the micro-batch and repeat the step with the same random numbers.

        Raises TinyLMError if memory runs out for one sequence, after it has saved the steps before.
        """
        state = self.state
        self._clock.begin_step()
        while True:
            rng = capture_rng()
            try:
                return self._step(progress)
            except _OutOfMemory:
                pass  # it refers to the tensors of the failed pass, which are freed after this block
            self._free_memory()
            restore_rng(rng)
            if state.micro_batch == 1:
                with contextlib.suppress(TinyLMError):  # also of memory
                    self._save()
                step = self._begun_save[0]
                less = "" if self.config.checkpoint_activations else ", or `checkpoint_activations`"
                saved = f"The run is saved up to step {step}." if step >= 0 else "Nothing is saved yet."
                raise TinyLMError(
                    f"Out of memory with one sequence at a time; choose a smaller `size` or `context`{less}. {saved}"
                )
            state.micro_batch = -(-state.micro_batch // 2)
            batch, _ = self._batch(state.step)
            effective = f"the effective batch is still {len(batch)}"
            self.report(Notice(f"Out of memory: the micro-batch is now {state.micro_batch}; {effective}."))

    def _step(self, progress: float) -> None:
        """Update the weights with the gradient of the next batch. Raises _OutOfMemory before the weights change."""
        config, state = self.config, self.state

        # The batch, of all ranks and of this one
        within = self._rule.within_generation(state, progress)
        sequences = window_parts(state.step, within, config.sequence_growth)  # per window
        batch, rank_rows = (windows.split_windows(sequences) for windows in self._batch(state.step))
        self.ranks.seed(config.seed, state.step)
        objective = self.task.objective(within)

        # Loss and gradient, in micro-batches
        with self._passes_of_all_ranks() as sums:  # at its end, gradients are sums over the ranks
            rows, n_targets = state.micro_batch * sequences, batch.n_targets
            for micro_batch, counts in micro_batches(batch, rank_rows, rows, self._sharded, self.ranks):
                with autocast(self.device.type, self.dtype):
                    loss = objective(self.graphed or self.model, micro_batch.to(self.device))
                mean = loss.total / n_targets + loss.aux / len(batch)
                self._scaler.scale(mean if counts else 0 * mean).backward()
                if counts:  # not the repeated rows of a rank that has too few
                    sums.add(loss)

        # Clip and step
        lr = learning_rate(self._rule.within_generation(state, self._clock.middle(progress)), config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._scaler.unscale_(self.optimizer)
        with self._memory_for_update():
            norm = full(torch.nn.utils.clip_grad_norm_(self._parameters, config.grad_clip or math.inf))
            self._unread.append((state.step + 1, (sums.loss, norm)))
            if not self._runs_ahead:
                self._read_losses()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            if self._average is not None and math.isfinite(self._norm):  # else fp16 has skipped it
                self._average.update(state.step + 1 - state.generation_step)
        if self._runs_ahead and (end_of_step := self.mark(self.device)) is not None:
            self._started_steps.append(end_of_step)
            if len(self._started_steps) > STEPS_AHEAD:
                self._started_steps.popleft()()  # wait until it has ended

        # Count and report
        state.step += 1
        state.n_targets += n_targets
        state.metrics = add_metrics({name: state.metrics.get(name) for name in sums.metrics}, sums.metrics)
        seconds = self._clock.end_step(batch.n_tokens)
        self.step_done(batch.n_tokens, seconds)
        self.report(Stepped(state.step, progress, state.generation + 1))
        if state.step % config.log_every == 0:
            self._log(progress, lr)

    def _read_losses(self) -> None:
        """Read loss and gradient norm of the steps that are not read yet.

        Raises DivergedError for the first of them that is not finite. In fp16, loss scaling skips steps whose gradient
        overflows, so MAX_SKIPPED_STEPS consecutive skips are allowed.
        """
        state, max_skipped = self.state, MAX_SKIPPED_STEPS if self._scaler.is_enabled() else 0
        unread, self._unread = self._unread, []
        values = torch.stack([torch.stack(pair) for _, pair in unread]).tolist() if unread else []  # one transfer
        for (number, _), (loss_sum, norm) in zip(unread, values, strict=True):
            self._norm = norm
            state.skipped_steps = 0 if math.isfinite(norm) else state.skipped_steps + 1
            if not math.isfinite(loss_sum) or state.skipped_steps > max_skipped:
                what = "gradient" if math.isfinite(loss_sum) else "loss"
                raise DivergedError(
                    f"The {what} of step {number} is not finite; saved weights are from before that step. Try a "
                    f"lower `lr` (it is {self.config.lr:g}) or more `warmup_steps`."
                )
            state.loss_sum += loss_sum

    def _log(self, progress: float, lr: float) -> None:
        """Report the means since the last log line, and reset the sums."""
        self._read_losses()
        state = self.state
        event = Logged(
            step=state.step,
            progress=progress,
            loss=state.loss_sum / state.n_targets,
            lr=lr,
            grad_norm=self._norm if math.isfinite(self._norm) else None,
            tokens_per_second=self._clock.tokens_per_second(),
            seconds=self._clock.seconds,
            metrics=add_metrics({}, state.metrics, 1 / state.n_targets),
        )
        state.loss_sum, state.n_targets, state.metrics = 0.0, 0, {}
        self.report(event)

    # Memory

    def _allocate_optimizer(self) -> None:
        """Allocate the optimizer's state before any weight changes. Raises TinyLMError if memory runs out."""
        for freed in (False, True):
            try:
                with memory_errors():
                    allocate_state(self.optimizer)
                    break
            except MemoryError:
                if freed:
                    raise TinyLMError(
                        "Out of memory for the optimizer's state, before the first step; choose a smaller `size`."
                    ) from None
            self._free_memory()

    def _free_memory(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.graphed is not None:
            self.graphed.release_graphs()  # no smaller micro-batch has one of their shapes
        gc.collect()  # with Python 3.13, the error and the tensors of its frames are in a cycle of references
        empty_cache(self.device)

    @contextlib.contextmanager
    def _passes_of_all_ranks(self) -> Iterator[Sums]:
        """Context manager for the passes of a step. At its end, the sums and the gradients are those of all ranks.

        If memory runs out on any rank, raises _OutOfMemory on all, and with shards TinyLMError, since the other ranks
        are in the middle of an exchange.
        """
        sums, found = Sums(torch.zeros((), device=self.device)), None
        try:
            with memory_errors():
                yield sums
                missing = [index for index, p in enumerate(self._parameters) if p.grad is None]
                found = (sums.loss if self.ranks.size == 1 else sums.loss.item(), sums.metrics, missing)
        except MemoryError:
            if self._sharded:
                raise TinyLMError(
                    f"Out of memory in step {self.state.step + 1}; choose a smaller `micro_batch` (it is "
                    f"{self.state.micro_batch}), `size` or `context`, or start more processes."
                ) from None
        of_ranks = self.ranks.gather(found)
        if None in of_ranks:
            raise _OutOfMemory
        losses, metrics, all_missing = zip(*of_ranks, strict=True)
        sum_gradients(self._parameters, all_missing, self.ranks)
        if self.ranks.size > 1:
            sums.loss = torch.tensor(sum(losses), dtype=torch.float64, device=self.device)
            sums.metrics = functools.reduce(add_metrics, metrics)

    @contextlib.contextmanager
    def _memory_for_update(self) -> Iterator[None]:
        """Context manager for the update of the weights. If memory runs out, some may be updated and others not, so it
        raises TinyLMError, and they are not saved.
        """
        try:
            with memory_errors():
                yield
        except MemoryError:
            step = self.store.saved_step
            saved = f"the run is saved up to step {step}" if step >= 0 else "nothing is saved yet"
            raise TinyLMError(
                f"Out of memory in the optimizer, in step {self.state.step + 1}; {saved}. Free memory and resume, "
                "or choose a smaller `size`."
            ) from None

    # Evaluations

    def _evaluate_untrained(self) -> None:
        """Report the loss before the first step, on few tokens, and estimate the duration of an evaluation from it.

        If the machine is so much slower than planned that an evaluation would take more than MAX_EVALUATION_SHARE of a
        time budget, all evaluations have fewer tokens.
        """
        state, validation, budget = self.state, self._validation, self.config.budget.time
        if budget is not None:
            with self._clock.evaluation():  # of one row, which loads weights and kernels; its duration is replaced
                validation.loss(1, self.check_stop)
        with self._clock.evaluation():
            found = validation.loss(min(FIRST_TOKENS, max(1, validation.tokens // 4)), self.check_stop)
            state.last_eval_step = 0
            self._report_evaluation(found, tokens=found.tokens)
        seconds, targets = state.eval_seconds / found.tokens, validation.n_targets(validation.tokens)
        state.eval_seconds = seconds * targets
        if budget is not None:
            state.eval_tokens = max(1, validation.tokens_within(MAX_EVALUATION_SHARE * budget))
            targets = validation.n_targets(validation.tokens)
            state.eval_seconds = seconds * targets
        joining = seconds * join_tokens(self.config.join, targets)
        state.join_seconds = joining if budget is None else min(joining, MAX_JOIN_SHARE * budget)
        state.setup_seconds = self._clock.seconds

    def _evaluate(self) -> None:
        """Compute the validation loss, and save the weights for inference if they are better than all before, or if the
        last ones are kept.
        """
        state = self.state
        self._read_losses()
        with self._clock.evaluation(), self._weights_for_inference():
            found = self._validation.loss(self._validation.tokens, self.check_stop)
            best = state.best_loss is None or found.loss < state.best_loss
            if best:
                state.best_loss, state.best_step = found.loss, state.step
            if best or self.config.keep == "last":
                self.store.save_for_inference(self.model, state.step, found.loss)
            state.val_loss, state.last_eval_step = found.loss, state.step
            is_lower = state.generation_loss is None or found.loss < state.generation_loss
            state.generation_loss = found.loss if is_lower else state.generation_loss
            state.evals_since_best = 0 if is_lower else state.evals_since_best + 1
            if is_lower and self.generations is not None:
                self.generations.keep_best(state.generation, state.step, found.loss)
            self._report_evaluation(found, best)

    def _report_evaluation(self, found: EvaluationLoss, best: bool = False, **fields: int) -> None:
        seconds = self._clock.seconds
        self.report(Evaluated(self.state.step, found.loss, best, seconds, metrics=found.metrics, **fields))

    def _keep_last_step(self) -> None:
        """After a stop, keep the weights of the last step if none were evaluated so far, or if the last ones are kept:
        with a loss on few tokens, or without one.

        The state changes only after it was saved, so that a resumed run continues as if it had not been stopped.
        """
        state = self.state
        is_kept = self.config.keep == "best" or state.step == state.last_eval_step
        if state.step == 0 or (is_kept and state.best_loss is not None):
            return
        with self._weights_for_inference():
            found = self._validation.loss_within(STOP_SECONDS, self._clock)
            state.val_loss = None if found is None else found.loss
            self.store.save_for_inference(self.model, state.step, state.val_loss)
            if found is not None:
                self._report_evaluation(found, tokens=found.tokens)
        state.last_eval_step = state.step
        if state.best_loss is None:
            state.best_loss, state.best_step = state.val_loss, state.step

    # Saves

    def _save(self) -> None:
        """Save the last step and its evaluation, unless they are saved."""
        state = self.state
        if state.step == 0 or self._begun_save == (state.step, state.last_eval_step, state.joined_step):
            return
        self._read_losses()
        with self._clock.save():
            if not self._weights_finite():
                raise DivergedError(
                    f"After step {state.step}, a weight or the next loss is not finite; the last save is intact. "
                    f"Try a lower `lr` (it is {self.config.lr:g})."
                )
            if state.best_loss is None:
                with self._weights_for_inference():
                    self.store.save_for_inference(self.model, state.step, None)
            state.seconds = self._clock.seconds
            state.scaler = self._scaler.state_dict()
            state.save_seconds = self.store.save_for_resuming(self.model, self.optimizer, state)
            self._begun_save = (state.step, state.last_eval_step, state.joined_step)

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
        micro_batch = next(batch.split(self.state.micro_batch))
        objective = self.task.objective(self._rule.within_generation(self.state, self._clock.progress()))
        with torch.no_grad(), force_eager():
            losses = batch_losses(self.model, objective, [micro_batch], self.dtype, sharded=self._sharded)
            finite = all(math.isfinite(loss.total.item()) for loss in losses)
        restore_rng(rng)
        release_gathered(self.model)
        return finite
