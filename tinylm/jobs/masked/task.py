"""The task of an encoder: predict masked tokens in windows of text (Devlin et al. 2019)."""

import functools
from collections.abc import Iterator

import numpy as np
import torch

from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
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


class MaskedWindows:
    """Training batches of the windows of `Windows`, masked at random. Batch number n depends only on the seed and n."""

    def __init__(
        self, tokens: Tokens, context: int, batch_size: int, seed: int, end_id: int, mask_id: int, vocab_size: int
    ) -> None:
        self._windows = Windows(tokens, context, batch_size, seed, end_id)
        self._seed = seed
        self._mask_id = mask_id
        self._vocab_size = vocab_size

    def batch(self, number: int) -> Batch:
        """Batch number `number`: ids, targets (the original ids) and mask of (batch_size, context)."""
        rng = np.random.Generator(np.random.PCG64([self._seed, number, self._mask_id]))
        return _masked_batch(self._windows.batch(number).ids.numpy(), rng, self._mask_id, self._vocab_size)


def masked_evaluation_batches(
    tokens: Tokens, context: int, rows: int, mask_id: int, vocab_size: int, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield batches of at most `rows` masked windows that do not overlap. The masks do not depend on `rows`.

    With `max_tokens`, yields a fixed selection of evenly spaced windows with about that many tokens in total. The last
    token is in no window, as in `evaluation_batches`, where it is only a target.
    """
    number = 0
    for batch in evaluation_batches(tokens, context, rows, max_tokens=max_tokens):
        parts = []
        for row in batch.ids.numpy():
            parts.append(_masked_batch(row[None], np.random.Generator(np.random.PCG64([number])), mask_id, vocab_size))
            number += 1
        assert all(part.mask is not None for part in parts)
        yield Batch(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.targets for part in parts]),
            torch.cat([part.mask for part in parts if part.mask is not None]),
        )


def _masked_batch(ids: np.ndarray, rng: np.random.Generator, mask_id: int, vocab_size: int) -> Batch:
    inputs, selected = mask_tokens(ids, rng, mask_id, vocab_size)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(ids), torch.from_numpy(selected))


def masked_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum over the masked positions of log p(token | corrupted window) (Devlin et al. 2019)."""
    return scored_loss(model, model(batch.ids), batch, smoothing)


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
