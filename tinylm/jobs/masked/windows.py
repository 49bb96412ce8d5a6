"""Windows of text with masked tokens, for training and for evaluation (Devlin et al. 2019)."""

from collections.abc import Iterator

import numpy as np
import torch

from tinylm.text.batches import Batch, Windows, evaluation_batches
from tinylm.text.sharded_tokens import Tokens

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
