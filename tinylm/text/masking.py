"""Text in which some tokens are covered, for a model that guesses them (Devlin et al. 2019)."""

from collections.abc import Iterator

import numpy as np
import torch

from tinylm.text.dataset import Batch, Windows, evaluation_batches

SELECTED = 0.15  # of all tokens are to be guessed
MASKED, RANDOM = 0.8, 0.1  # of those are covered, or made another token; the rest are left as they are


def cover(ids: np.ndarray, rng: np.random.Generator, mask: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """What the model is shown of some ids (any shape), and which it is asked for: at least one."""
    selected = rng.random(ids.shape) < SELECTED
    if not selected.any():
        selected.flat[rng.integers(ids.size)] = True
    kind = rng.random(ids.shape)
    shown = np.where(selected & (kind < MASKED), mask, ids)
    replaced = selected & (kind >= MASKED) & (kind < MASKED + RANDOM)
    return np.where(replaced, rng.integers(0, vocab_size, ids.shape), shown), selected


class MaskedWindows:
    """Training windows with tokens covered anew each time. Batch number n depends on the seed and n alone."""

    def __init__(
        self, tokens: np.ndarray, context: int, batch_size: int, seed: int, mask: int, vocab_size: int
    ) -> None:
        self._windows = Windows(tokens, context, batch_size, seed)
        self._seed = seed
        self._mask = mask
        self._vocab_size = vocab_size

    def batch(self, number: int) -> Batch:
        rng = np.random.Generator(np.random.PCG64([self._seed, number, self._mask]))
        return _covered(self._windows.batch(number).ids.numpy(), rng, self._mask, self._vocab_size)


def masked_evaluation_batches(
    tokens: np.ndarray, context: int, rows: int, mask: int, vocab_size: int, most: int | None = None
) -> Iterator[Batch]:
    """Windows that do not overlap, with tokens covered in the same places whatever the number of rows.

    With `most`, evenly spread windows of about so many tokens. The text's last token is in no window.
    """
    number = 0
    for batch in evaluation_batches(tokens, context, rows, most=most):
        parts = []
        for row in batch.ids.numpy():
            parts.append(_covered(row[None], np.random.Generator(np.random.PCG64([number])), mask, vocab_size))
            number += 1
        assert all(part.mask is not None for part in parts)
        yield Batch(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.targets for part in parts]),
            torch.cat([part.mask for part in parts if part.mask is not None]),
        )


def _covered(ids: np.ndarray, rng: np.random.Generator, mask: int, vocab_size: int) -> Batch:
    shown, selected = cover(ids, rng, mask, vocab_size)
    return Batch(torch.from_numpy(shown), torch.from_numpy(ids), torch.from_numpy(selected))
