"""The time of a training run, and what ends a run: the budget or the patience."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from tinylm.config.training import Budget, TrainingConfig
from tinylm.training.state import TrainerState

EXIT_SECONDS = 0.2  # for the process to exit
PACE_STEPS = 5
ROUNDING = 1e-9  # of a fraction of the budget


@dataclass(frozen=True)
class StoppingRule:
    """When to end a run.

    total_steps: the budget in optimizer steps; `None` for a time budget
    patience: evaluations without a lower validation loss after which training ends; `None` for no limit
    generations: their number; patience counts in the last one. joins: whether they are joined at the end
    """

    budget: Budget
    total_steps: int | None
    patience: int | None
    generations: int = 1
    joins: bool = False

    @classmethod
    def of(cls, config: TrainingConfig, steps_per_epoch: float) -> Self:
        """The rule of a training configuration; an epoch has `steps_per_epoch` optimizer steps."""
        steps = config.budget.total_steps(steps_per_epoch)
        return cls(config.budget, steps, config.patience, config.generations, config.join > 1)

    def progress(self, state: TrainerState, seconds: float, slowdown: float = 1.0, step: int | None = None) -> float:
        """The used fraction of the budget after `seconds` of training in all sessions; 1 or more if it is used up.

        Of a time budget, the fraction of the time between the first step and the `reserve` at the end.

        step: optimizer steps taken until then; `None` for those of the state
        """
        if self.budget.time is None:
            return (state.step if step is None else step) / (self.total_steps or 1)
        available = max(self.budget.time - self.reserve(state, slowdown) - state.setup_seconds, 0.01)
        return (seconds - state.setup_seconds) / available

    def reserve(self, state: TrainerState, slowdown: float = 1.0) -> float:
        """Seconds to keep for one more step, an evaluation, a save, joining and the exit, from durations so far.

        slowdown: how many times longer they take now, as when other processes have begun to use the processor
        """
        step_seconds = state.step_seconds / max(state.step, 1)
        saves = (2 if self.joins else 1) * state.save_seconds  # before and after joining
        return slowdown * (step_seconds + 1.1 * (state.eval_seconds + saves) + state.join_seconds) + EXIT_SECONDS

    def patience_exhausted(self, state: TrainerState) -> bool:
        """Whether the last `patience` evaluations of the last generation brought no lower validation loss."""
        is_last = state.generation >= self.generations - 1
        return is_last and self.patience is not None and state.evals_since_best >= self.patience

    def is_unjoined(self, state: TrainerState) -> bool:
        """Whether generations are to be joined after the last step: several, which are not joined yet."""
        return self.joins and state.generation > 0 and state.joined_step != state.step

    def within_generation(self, state: TrainerState, progress: float) -> float:
        """The used fraction, from 0 to 1, of the part of the budget that the current generation has: what was left when
        it began, divided by the number of generations that were left.
        """
        began = self.progress(state, state.generation_seconds, step=state.generation_step) if state.generation else 0.0
        share = (1 - began) / max(1, self.generations - state.generation)
        used = (progress - began) / max(share, 1e-9)
        return 1.0 if used > 1 - ROUNDING else max(0.0, used)

    def finished_by(self, state: TrainerState, seconds: float) -> str | None:
        """The reason that a saved run is finished (patience, time, steps or epochs); `None` if it is not.

        seconds: the training time in all sessions, including the start of this process. A run whose last evaluation is
        missing is not finished, unless its patience or time budget is used up; nor is one that is not joined yet.
        """
        if self.patience_exhausted(state) and not self.is_unjoined(state):
            return "patience"
        if self.progress(state, seconds) < 1:
            return None
        time_is_over = self.budget.time is not None and state.seconds >= self.budget.time
        is_complete = state.last_eval_step == state.step and not self.is_unjoined(state)
        return self.budget.kind if is_complete or time_is_over else None


class Clock:
    """The clock of a run: it measures steps, evaluations and saves, and tells how much of the budget is used.

    The durations that a resumed run needs are in the state.

    started: the moment, by `now`, from which this session counts
    of_first_rank: returns the value of the first rank, since the clocks of ranks differ
    """

    def __init__(
        self,
        rule: StoppingRule,
        state: TrainerState,
        started: float,
        now: Callable[[], float],
        of_first_rank: Callable[[float], float],
    ) -> None:
        self._rule, self._state, self._now, self._of_first_rank = rule, state, now, of_first_rank
        self._start = started - state.seconds  # so that `seconds` includes earlier sessions
        self._progress = 0.0  # the largest so far
        self._step_start = 0.0
        self._pace: float | None = None  # seconds per step, mean of about the last PACE_STEPS
        self._evaluated_pace: float | None = None  # at the last evaluation
        self._tokens, self._tokens_since = 0, now()  # of `tokens_per_second`

    @property
    def seconds(self) -> float:
        """The training time in all sessions."""
        return self._now() - self._start

    @property
    def slowdown(self) -> float:
        """How many times longer steps take now than at the last evaluation; at least 1."""
        return max(1.0, self._pace / self._evaluated_pace) if self._pace and self._evaluated_pace else 1.0

    def progress(self) -> float:
        """The used fraction of the budget; 1 or more if it is used up.

        It never decreases, even if the time reserved for the last evaluation and save is estimated lower than before.
        """
        self._progress = max(self._progress, self._used(self.seconds))
        return self._progress

    def middle(self, progress: float) -> float:
        """The progress at the middle of the step that began at `progress`; neither 0 nor 1."""
        if self._rule.total_steps is not None:
            return progress + 0.5 / self._rule.total_steps
        return (progress + min(1.0, self.progress())) / 2

    def ends_within(self, seconds: float) -> bool:
        """Whether a budget of time is used up in so many seconds."""
        return self._rule.total_steps is None and self._used(self.seconds + seconds) >= 1

    def _used(self, seconds: float) -> float:
        used = self._rule.progress(self._state, seconds, self.slowdown)
        return used if self._rule.total_steps is not None else self._of_first_rank(used)

    def begin_step(self) -> None:
        """Measure a step from now on."""
        self._step_start = self._now()

    def end_step(self, tokens: int) -> float:
        """Count the step, of so many tokens. Returns its duration in seconds."""
        seconds = self._now() - self._step_start
        self._state.step_seconds += seconds
        self._pace = seconds if self._pace is None else self._pace + (seconds - self._pace) / PACE_STEPS
        self._tokens += tokens
        return seconds

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context manager that measures an evaluation, unless it raises an exception."""
        start = self._now()
        yield
        self._state.eval_seconds = self._without_tokens(start)
        self._evaluated_pace = self._pace

    @contextlib.contextmanager
    def prediction(self) -> Iterator[None]:
        """Context manager that measures the predictions of a teacher."""
        start = self._now()
        yield
        self._state.prediction_seconds = self._without_tokens(start)

    @contextlib.contextmanager
    def save(self) -> Iterator[None]:
        """Context manager that measures a save, which sets `save_seconds` to the expected time of its writer."""
        start = self._now()
        yield
        self._state.save_seconds = max(self._state.save_seconds, self._without_tokens(start))

    def _without_tokens(self, start: float) -> float:
        seconds = self._now() - start
        self._tokens_since += seconds
        return seconds

    def tokens_per_second(self) -> float:
        """The speed of training since the last call, without the time of evaluations and saves."""
        now = self._now()
        speed = self._tokens / max(now - self._tokens_since, 1e-9)
        self._tokens, self._tokens_since = 0, now
        return speed
