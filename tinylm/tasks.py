"""What each architecture learns and how it is scored: its batches by number, and its objectives."""

import functools
from collections.abc import Iterator
from typing import Protocol

from tinylm.config import ModelConfig, TrainingConfig
from tinylm.errors import UsageError
from tinylm.objective import Objective, masked_token, next_token, sequence_to_sequence
from tinylm.text.dataset import Batch, TokenFolder, Windows, evaluation_batches
from tinylm.text.masking import MaskedWindows, masked_evaluation_batches
from tinylm.text.pairs import PairBatches, PairTokens, evaluation_pairs
from tinylm.text.tokenizer import Tokenizer


class Task(Protocol):
    """`objective` is what is trained, `score` what tells how good the model is."""

    objective: Objective
    score: Objective
    steps_per_epoch: float

    def batch(self, number: int) -> Batch:
        """The same for the same number, so that a resumed run reads on where it stopped."""
        ...

    def validation(self, rows: int, most: int) -> Iterator[Batch]:
        """Always the same batches of at most so many rows, of about `most` tokens in all."""
        ...


class NextToken:
    """Each token from those before it, in windows of the text."""

    score: Objective = staticmethod(next_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self.objective: Objective = functools.partial(next_token, smoothing=training.label_smoothing)
        self._val = tokens.val
        self._context = model.context
        self.batch = Windows(tokens.train, model.context, training.batch_size, training.seed).batch
        self.steps_per_epoch = len(tokens.train) / (training.batch_size * model.context)

    def validation(self, rows: int, most: int) -> Iterator[Batch]:
        return evaluation_batches(self._val, self._context, rows, most=most)


class MaskedToken:
    """Covered tokens from the rest of a window of the text."""

    score: Objective = staticmethod(masked_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self.objective: Objective = functools.partial(masked_token, smoothing=training.label_smoothing)
        self._val = tokens.val
        self._context = model.context
        self._covering = {"mask": tokenizer.mask, "vocab_size": tokenizer.vocab_size}
        self.batch = MaskedWindows(
            tokens.train, model.context, training.batch_size, training.seed, **self._covering
        ).batch
        self.steps_per_epoch = len(tokens.train) / (training.batch_size * model.context)

    def validation(self, rows: int, most: int) -> Iterator[Batch]:
        return masked_evaluation_batches(self._val, self._context, rows, **self._covering, most=most)


class Translation:
    """A target from its source."""

    score: Objective = staticmethod(sequence_to_sequence)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self.objective: Objective = functools.partial(sequence_to_sequence, smoothing=training.label_smoothing)
        self._context = model.context
        self._val = PairTokens(tokens.val, tokenizer.end_of_text)
        train = PairTokens(tokens.train, tokenizer.end_of_text)
        for part, pairs in (("training", train), ("validation", self._val)):
            if not len(pairs.fitting(model.context)):
                raise UsageError(
                    f"No pair for {part} fits the context of {model.context} tokens; the shortest needs "
                    f"{pairs.contexts.min()}."
                )
        batches = PairBatches(train, model.context, training.batch_size, training.seed)
        self.batch = batches.batch
        self.steps_per_epoch = float(batches.per_epoch)

    def validation(self, rows: int, most: int) -> Iterator[Batch]:
        return evaluation_pairs(self._val, self._context, rows, most)


TASKS: dict[str, type[NextToken] | type[MaskedToken] | type[Translation]] = {
    "decoder": NextToken,
    "encoder": MaskedToken,
    "encoder-decoder": Translation,
}


def make_task(tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> Task:
    return TASKS[model.architecture](tokens, tokenizer, model, training)
