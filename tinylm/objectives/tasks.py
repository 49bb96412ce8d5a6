"""Tasks: each joins a dataset with the objectives of training and of validation.

tinylm/evaluation/task_kinds.py lists them.

The constructors raise TinyLMError for a text that is too short or of which nothing fits the context.
"""

import functools
from collections.abc import Iterator
from typing import Protocol

import torch

from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.errors import UsageError
from tinylm.objectives.loss import (
    LanguageModel,
    Loss,
    Objective,
    masked_token,
    next_token,
    next_two_tokens,
    sequence_to_sequence,
)
from tinylm.text.batches import (
    Batch,
    MaskedWindows,
    Windows,
    evaluation_batches,
    masked_evaluation_batches,
    undo_merges,
)
from tinylm.text.chat_tokens import ChatTokens, chat_evaluation_batches, chat_rows
from tinylm.text.pairs import PairTokens, pair_evaluation_batches
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer

MTP_END = 0.6  # decision 039: progress from which only the next token is predicted
BPE_DROPOUT_END = 0.6  # decision 044: progress from which the text is encoded as usual


class Task(Protocol):
    """A dataset with its objectives.

    validation_objective: its mean is the validation loss.
    steps_per_epoch: optimizer steps per pass over the training data.
    """

    validation_objective: Objective
    steps_per_epoch: float

    def objective(self, progress: float) -> Objective:
        """The function that is minimised in training, at `progress` from 0 to 1."""
        ...

    def batch(self, number: int) -> Batch:
        """The training batch `number`, from 0. The same number gives the same batch, so that resuming is exact."""
        ...

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        """Validation batches of at most `rows` rows, the same at each call.

        max_tokens: approximate number of targets in total; of masked windows, of their tokens
        """
        ...


class NextToken:
    """Predict each token from the tokens before it, in windows of `model.context` tokens.

    The token after the next counts with `mtp_weight`, which falls linearly to 0 at MTP_END. Merges of BPE are undone
    with the probability `bpe_dropout`, which falls linearly to 0 at BPE_DROPOUT_END.
    """

    validation_objective: Objective = staticmethod(next_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing = training.label_smoothing
        self._mtp_weight = training.mtp_weight
        self._bpe_dropout = training.bpe_dropout
        self._merges = torch.from_numpy(tokenizer.merges())
        self._val = tokens.val
        self._context = model.context
        self.batch = Windows(
            tokens.train, model.context, training.batch_size, training.seed, tokenizer.end_of_text_id
        ).batch
        self.steps_per_epoch = len(tokens.train) / (training.batch_size * model.context)

    def objective(self, progress: float) -> Objective:
        """As `Task.objective`."""
        objective: Objective = functools.partial(next_token, smoothing=self._smoothing)
        second_weight = self._mtp_weight * (1 - progress / MTP_END)
        if second_weight > 0:
            objective = functools.partial(next_two_tokens, smoothing=self._smoothing, second_weight=second_weight)
        rate = self._bpe_dropout * (1 - progress / BPE_DROPOUT_END)
        return objective if rate <= 0 else functools.partial(self._with_undone_merges, objective, rate)

    def _with_undone_merges(self, objective: Objective, rate: float, model: LanguageModel, batch: Batch) -> Loss:
        self._merges = self._merges.to(batch.ids.device)
        return objective(model, undo_merges(batch, self._merges, rate))

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        """As `Task.validation_batches`."""
        return evaluation_batches(self._val, self._context, rows, max_tokens=max_tokens)


class MaskedToken:
    """Predict the tokens at masked positions from the corrupted window of `model.context` tokens."""

    validation_objective: Objective = staticmethod(masked_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing = training.label_smoothing
        self._val = tokens.val
        self._context = model.context
        self._masking = {"mask_id": tokenizer.mask_id, "vocab_size": tokenizer.vocab_size}
        self.batch = MaskedWindows(
            tokens.train, model.context, training.batch_size, training.seed, tokenizer.end_of_text_id, **self._masking
        ).batch
        self.steps_per_epoch = len(tokens.train) / (training.batch_size * model.context)

    def objective(self, progress: float) -> Objective:
        """As `Task.objective`."""
        return functools.partial(masked_token, smoothing=self._smoothing)

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        """As `Task.validation_batches`."""
        return masked_evaluation_batches(self._val, self._context, rows, **self._masking, max_tokens=max_tokens)


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


class Chat:
    """Predict each scored token of a conversation from the tokens before it."""

    tokens_type: type[ChatTokens] = ChatTokens
    validation_objective: Objective = staticmethod(next_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing = training.label_smoothing
        self._context = model.context
        self._packed = training.pack
        train, self._val = self.tokens_type(tokens.train), self.tokens_type(tokens.val)
        for part, name in ((train, "training"), (self._val, "validation")):
            part.require_examples(model.context, name)
        rows = chat_rows(train, model.context, training.pack)
        batches = rows.training_batches(training.batch_size, training.seed)
        self.batch = batches.batch
        self.steps_per_epoch = float(batches.batches_per_epoch)

    def objective(self, progress: float) -> Objective:
        """As `Task.objective`."""
        return functools.partial(next_token, smoothing=self._smoothing)

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        """As `Task.validation_batches`."""
        return chat_evaluation_batches(self._val, self._context, rows, self._packed, max_tokens)
