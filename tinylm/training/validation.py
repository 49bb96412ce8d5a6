"""The validation loss of a model in training, on as many tokens as there is time for."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinylm.config.training import TrainingConfig
from tinylm.errors import DivergedError, TinyLMError
from tinylm.evaluation.loop import EvaluationLoss, default_batch_size, evaluate_loss
from tinylm.jobs.job import Task
from tinylm.kernels.graphs import force_eager
from tinylm.planning.memory import evaluation_rows
from tinylm.text.batches import Batch
from tinylm.training.clock import Clock
from tinylm.training.parallel import is_sharded, release_gathered
from tinylm.training.state import TrainerState
from tinylm.transformer.architectures import Transformer

if TYPE_CHECKING:
    from tinylm.system.ranks import Ranks


@dataclass(frozen=True, eq=False)
class Validation:
    """Evaluates the model of a trainer. The parameters are fields of `Trainer`."""

    model: Transformer
    task: Task
    config: TrainingConfig
    state: TrainerState
    dtype: str
    ranks: "Ranks"

    @property
    def tokens(self) -> int:
        """Tokens of an evaluation: those of the configuration, or fewer if a time budget allows no more."""
        return self.state.eval_tokens or self.config.eval_tokens

    def n_targets(self, max_tokens: int) -> int:
        """Number of targets that are scored in an evaluation on about `max_tokens`."""
        return sum(batch.n_targets for batch in self._batches(max_tokens))

    def _batches(self, max_tokens: int) -> Iterator[Batch]:
        rows = evaluation_rows(self.state.micro_batch, self.config.checkpoint_activations)
        rows = min(default_batch_size(self.config.sequence_length or self.model.context), rows)
        return self.task.validation_batches(rows, max_tokens)

    def loss(self, max_tokens: int, check: Callable[[], None]) -> EvaluationLoss:
        """The loss on about `max_tokens`. `check` is called after each batch, and may raise an exception.

        Raises DivergedError for a loss that is not finite.
        """
        batches, objective = self._batches(max_tokens), self.task.validation_objective
        try:
            with force_eager():
                found = evaluate_loss(
                    self.model,
                    objective,
                    batches,
                    self.dtype,
                    lambda tokens: check(),
                    self.ranks,
                    sharded=is_sharded(self.model),
                )
        finally:
            release_gathered(self.model)
        if not math.isfinite(found.loss):
            raise DivergedError(
                f"The validation loss after step {self.state.step} is not finite; saved weights are from before that "
                f"step. Try a lower `lr` (it is {self.config.lr:g})."
            )
        return found

    def tokens_within(self, seconds: float) -> int:
        """The `max_tokens` of an evaluation that is expected to take at most `seconds`; 0 if a row takes longer."""
        share = self.ranks.first(seconds / max(self.state.eval_seconds, 1e-9))
        tokens, n_targets = int(min(1.0, share) * self.tokens), share * self.n_targets(self.tokens)
        while tokens and self.n_targets(tokens) > n_targets:  # the tokens may be more than those of the text
            tokens = tokens * 4 // 5
        return tokens

    def loss_within(self, seconds: float, clock: Clock) -> EvaluationLoss | None:
        """The loss on as many tokens as are expected to take half of `seconds`; `None` if these are less than a row,
        and if the loss is not finite, or not found within `seconds` and the memory.
        """
        tokens = self.tokens_within(0.5 * seconds / clock.slowdown)
        end = clock.seconds + seconds

        def check() -> None:
            if self.ranks.first(clock.seconds > end):
                raise TimeoutError

        # Of several ranks, one may fail alone, and the others would wait for it.
        failures = (TimeoutError, TinyLMError if self.ranks.size == 1 else DivergedError)
        with contextlib.suppress(*failures):
            return self.loss(tokens, check) if tokens else None
        return None
