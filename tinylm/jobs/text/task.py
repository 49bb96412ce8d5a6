"""The task of a decoder: predict the next token of a text."""

import functools
from collections.abc import Iterator

import torch

from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.jobs.job import Task
from tinylm.objectives.loss import (
    LanguageModel,
    Loss,
    Objective,
    next_token,
    next_two_tokens,
)
from tinylm.text.batches import (
    Batch,
    Windows,
    evaluation_batches,
    undo_merges,
)
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer

MTP_END = 0.6  # decision 039: progress from which only the next token is predicted
BPE_DROPOUT_END = 0.6  # decision 044: progress from which the text is encoded as usual


class NextToken(Task):
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
        end = tokenizer.end_of_text_id
        self._batches = Windows(tokens.train, model.context, training.batch_size, training.seed, end)
        self.steps_per_epoch = len(tokens.train) / (training.batch_size * model.context)

    def objective(self, progress: float) -> Objective:
        objective: Objective = functools.partial(next_token, smoothing=self._smoothing)
        second_weight = self._mtp_weight * (1 - progress / MTP_END)
        if second_weight > 0:
            objective = functools.partial(next_two_tokens, smoothing=self._smoothing, second_weight=second_weight)
        rate = self._bpe_dropout * (1 - progress / BPE_DROPOUT_END)
        return objective if rate <= 0 else functools.partial(self._with_undone_merges, objective, rate)

    def _with_undone_merges(self, objective: Objective, rate: float, model: LanguageModel, batch: Batch) -> Loss:
        self._merges = self._merges.to(batch.ids.device)
        return objective(model, undo_merges(batch, self._merges, rate))

    def batch(self, number: int) -> Batch:
        return self._batches.batch(number)

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        return evaluation_batches(self._val, self._context, rows, max_tokens=max_tokens)
