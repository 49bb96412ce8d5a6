"""The task of an encoder: predict masked tokens in windows of text (Devlin et al. 2019)."""

import functools
from collections.abc import Iterator

import numpy as np
import torch

from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.jobs.job import Task
from tinylm.objectives.loss import LanguageModel, Loss, Objective, scored_loss
from tinylm.text.batches import Batch, Windows, evaluation_batches
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer

TARGET_SHARE = 0.15  # share of the tokens that are targets
MASK_SHARE = 0.8  # share of the targets that are replaced by the mask token
RANDOM_SHARE = 0.1  # share of the targets that are replaced by a random token; the other targets are unchanged


def mask_tokens(
    ids: np.ndarray, rng: np.random.Generator, mask_id: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Select at least one target among `ids`, (...), and replace most targets by the mask token or random tokens.

    Returns the model's input, (...) of int64, and a boolean array, (...), that is True for targets. `ids` must not be
    empty.
    """
    selected = rng.random(ids.shape) < TARGET_SHARE
    if not selected.any():
        selected.flat[rng.integers(ids.size)] = True
    draw = rng.random(ids.shape)
    inputs = np.where(selected & (draw < MASK_SHARE), mask_id, ids)
    randomised = selected & (draw >= MASK_SHARE) & (draw < MASK_SHARE + RANDOM_SHARE)
    return np.where(randomised, rng.integers(0, vocab_size, ids.shape), inputs), selected


def masked_evaluation_batches(
    tokens: Tokens, context: int, rows: int, mask_id: int, vocab_size: int, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield batches of at most `rows` masked windows that do not overlap. The masks do not depend on `rows`.

    With `max_tokens`, yields a fixed selection of evenly spaced windows with about that many tokens in total. The last
    token is in no window, as in `evaluation_batches`, where it is only a target.
    """
    number = 0
    for batch in evaluation_batches(tokens, context, rows, max_tokens=max_tokens):
        masked = []
        for row in batch.ids.numpy():
            masked.append(mask_tokens(row, np.random.Generator(np.random.PCG64([number])), mask_id, vocab_size))
            number += 1
        inputs, selected = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*masked, strict=True))
        yield Batch(inputs, batch.ids, selected)


def masked_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum over the masked positions of log p(token | corrupted window) (Devlin et al. 2019)."""
    return scored_loss(model, model(batch.ids), batch, smoothing)


class MaskedToken(Task):
    """Predict the tokens at masked positions from the corrupted window of `model.context` tokens."""

    validation_objective: Objective = staticmethod(masked_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing, self._seed = training.label_smoothing, training.seed
        self._val, self._context = tokens.val, model.context
        self._masking = {"mask_id": tokenizer.mask_id, "vocab_size": tokenizer.vocab_size}
        end = tokenizer.end_of_text_id
        self._windows = Windows(tokens.train, model.context, training.batch_size, training.seed, end)
        self.steps_per_epoch = len(tokens.train) / (training.batch_size * model.context)

    def objective(self, progress: float) -> Objective:
        return functools.partial(masked_token, smoothing=self._smoothing)

    def batch(self, number: int) -> Batch:
        ids = self._windows.batch(number).ids
        rng = np.random.Generator(np.random.PCG64([self._seed, number, self._masking["mask_id"]]))
        inputs, selected = mask_tokens(ids.numpy(), rng, **self._masking)
        return Batch(torch.from_numpy(inputs), ids, torch.from_numpy(selected))

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        return masked_evaluation_batches(self._val, self._context, rows, **self._masking, max_tokens=max_tokens)
