"""The task of an encoder-decoder: predict a target, given its source."""

import functools
from collections.abc import Iterator

from torch import Tensor

from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.errors import UsageError
from tinylm.jobs.pairs.corpus import PairTokens, pair_evaluation_batches
from tinylm.objectives.loss import LanguageModel, Loss, Objective, scored_loss, target_losses
from tinylm.text.batches import Batch
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer


def sequence_to_sequence(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | source, targets before it) over the scored targets, with teacher forcing."""
    return scored_loss(model, model(batch.ids, batch.source, batch.source_lengths, batch.mask), batch, smoothing)


def sequence_to_sequence_losses(model: LanguageModel, batch: Batch) -> Tensor:
    """The terms of `sequence_to_sequence`: -log p of each scored target in nats, (N,), row by row."""
    return target_losses(model, model(batch.ids, batch.source, batch.source_lengths, batch.mask), batch)


class SequenceToSequence:
    """Predict each token of a target from the source and the target tokens before it."""

    validation_objective: Objective = staticmethod(sequence_to_sequence)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing = training.label_smoothing
        self._context = model.context
        self._val = PairTokens(tokens.val, tokenizer.end_of_text_id)
        train = PairTokens(tokens.train, tokenizer.end_of_text_id)
        for part, pairs in (("training", train), ("validation", self._val)):
            if not len(pairs.fitting(model.context)):
                raise UsageError(
                    f"No {part} pair fits the context of {model.context} tokens; the shortest needs "
                    f"{pairs.contexts.min()}."
                )
        batches = train.training_batches(model.context, training.batch_size, training.seed)
        self.batch = batches.batch
        self.steps_per_epoch = float(batches.batches_per_epoch)

    def objective(self, progress: float) -> Objective:
        """As `Task.objective`."""
        return functools.partial(sequence_to_sequence, smoothing=self._smoothing)

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        """As `Task.validation_batches`."""
        return pair_evaluation_batches(self._val, self._context, rows, max_tokens)
