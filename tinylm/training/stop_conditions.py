"""When a run ends: its budget is used up, or the validation loss has stopped improving.

A time budget covers all sessions of a run, each from the start of its process to its exit. Training therefore ends
while there is time left for one more step, an evaluation, a save and the exit.
"""

from dataclasses import dataclass
from typing import Self

from tinylm.config.training import Budget, TrainingConfig
from tinylm.training.state import TrainerState

EXIT_SECONDS = 0.2  # for the process to exit


@dataclass(frozen=True)
class StoppingRule:
    """When to end a run.

    total_steps: the budget in optimizer steps; `None` for a time budget
    patience: evaluations without a lower validation loss after which training ends; `None` for no limit
    """

    budget: Budget
    total_steps: int | None
    patience: int | None

    @classmethod
    def of(cls, config: TrainingConfig, steps_per_epoch: float) -> Self:
        """The rule of a training configuration; an epoch has `steps_per_epoch` optimizer steps."""
        return cls(config.budget, config.budget.total_steps(steps_per_epoch), config.patience)

    def progress(self, state: TrainerState, seconds: float, slowdown: float = 1.0) -> float:
        """The used fraction of the budget after `seconds` of training in all sessions; 1 or more if it is used up.

        Of a time budget, the fraction of the time between the first step and the `reserve` at the end.
        slowdown: as in `reserve`
        """
        if self.total_steps is not None:
            return state.step / self.total_steps
        assert self.budget.time is not None
        available = max(self.budget.time - self.reserve(state, slowdown) - state.setup_seconds, 0.01)
        return (seconds - state.setup_seconds) / available

    def reserve(self, state: TrainerState, slowdown: float = 1.0) -> float:
        """Seconds to keep for one more step, an evaluation, a save and the exit, from their durations so far.

        slowdown: how many times longer they take now, as when other processes have begun to use the processor
        """
        step_seconds = state.step_seconds / max(state.step, 1)
        return slowdown * (step_seconds + 1.1 * (state.eval_seconds + state.save_seconds)) + EXIT_SECONDS

    def patience_exhausted(self, state: TrainerState) -> bool:
        """Whether the last `patience` evaluations brought no lower validation loss."""
        return self.patience is not None and state.evals_since_best >= self.patience

    def finished_by(self, state: TrainerState, seconds: float) -> str | None:
        """The reason that a saved run is finished (patience, time, steps or epochs); `None` if it is not.

        `seconds` is the training time up to now in all sessions, including the start of this process. A run whose last
        evaluation is missing is not finished, unless its patience or time budget is used up.
        """
        if self.patience_exhausted(state):
            return "patience"
        if self.progress(state, seconds) < 1:
            return None
        time_is_over = self.budget.time is not None and state.seconds >= self.budget.time
        return self.budget.kind if state.last_eval_step == state.step or time_is_over else None
