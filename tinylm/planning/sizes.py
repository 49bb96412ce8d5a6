"""What planning asks about the encoded data of a job: the sizes of its texts, and the defaults that depend on them."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tinylm.config.run import DataConfig
from tinylm.errors import UsageError
from tinylm.planning import recipes

PARTS = ("training", "validation")


@dataclass(frozen=True)
class Rows:
    """The training sequences of an epoch.

    count: number of sequences
    tokens: mean tokens per sequence, without padding; of a pair, source and target together
    longest: maximum tokens per sequence, with the padding of packed rows; of a pair, as for `tokens`
    constant: whether all sequences have the same length, with padding
    continues: whether a batch can span two epochs; otherwise, the last batch of an epoch may be smaller
    """

    count: float
    tokens: float
    longest: int
    constant: bool
    continues: bool = False

    def steps_per_epoch(self, batch_size: int) -> float:
        """Optimizer steps per pass over the training data."""
        steps = self.count / batch_size
        return steps if self.continues else max(1.0, float(math.ceil(steps)))


class Sizes:
    """The sizes of encoded data: here of plain text, in windows of the length of the context. Jobs on other data
    override what differs.

    lr_factor, new_lr_factor: of the learning rate of the recipe, for models that are trained further and for new ones
    dropout: its rule for new models of any preset; `None` for that of the preset
    min_steps_per_epoch: so many batches have all the data together, if there are so many examples
    unvalidated: passes and least steps of a run without a chosen budget that validation cannot end
    is_brief: whether no run of the job can be ended by validation, whose loss falls while the model becomes worse
    min_validation_records: with fewer, the validation loss does not show which weights are better

    data: the encoded data. pack: the user's choice of `TrainingConfig.pack`; `None` without one.
    """

    lr_factor: ClassVar[float] = 1.0
    new_lr_factor: ClassVar[float] = 1.0
    dropout: ClassVar[recipes.DropoutRule | None] = None
    min_steps_per_epoch: ClassVar[int] = 1
    unvalidated: ClassVar[tuple[int, int]] = (recipes.UNVALIDATED_EPOCHS, recipes.UNVALIDATED_STEPS)
    is_brief: ClassVar[bool] = False
    min_validation_records: ClassVar[int] = recipes.MIN_VALIDATION_RECORDS

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        """The context of a new model: here the default, or if that is too long, one less than the training tokens.

        context: the default of its size; a notice is appended if it is shortened
        """
        available = data.train_tokens - 1  # the last token is a target only
        if context > available:
            notices.append(
                f"The training text has only {data.train_tokens:,} tokens: the context is shortened to {available}."
            )
        return min(context, available)

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        """Sentences about data that are cut or left out.

        is_new: whether the model is new, so that its context can change

        Raises UsageError for text shorter than a window, and if nothing is scored within the context. (If no pair
        fits, the task raises it.)
        """
        available = data.train_tokens - 1
        if context > available:
            shorter = f", or a `context` of at most {available}" if is_new else ""
            raise UsageError(
                f"The training text has {data.train_tokens} tokens, and a context of {context} needs {context + 1}; "
                f"give more text{shorter}."
            )
        return []

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        """The training sequences for a model with this context, which `check_context` accepts."""
        return Rows(data.train_tokens / context, context, context, constant=True, continues=True)

    def validation_size(self, data: DataConfig, context: int) -> tuple[int, int]:
        """Number of targets in the validation data, as `TrainingConfig.eval_tokens` counts them, and of all tokens."""
        return data.val_tokens, data.val_tokens

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        """Defaults of TrainingConfig for these data."""
        return {}


def fitting_context(train: np.ndarray, val: np.ndarray) -> int:
    """A context that fits nearly all examples; fitting a few very long ones would take most of the memory.

    train, val: (N,) and (M,), the context that each example needs
    """
    usual = int(np.quantile(train, recipes.CONTEXT_QUANTILE, method="higher"))
    longest = max(int(part.max()) for part in (train, val))
    context, multiple = min(longest, recipes.CONTEXT_FACTOR * usual), recipes.CONTEXT_MULTIPLE
    return max(recipes.MIN_CONTEXT, math.ceil(context / multiple) * multiple)
