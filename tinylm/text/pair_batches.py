"""Batches of encoded pairs for an encoder-decoder."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinylm.errors import TinyLMError
from tinylm.text.batches import Batch, ShuffledBatches
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.token_files import TokenFolder


class PairTokens:
    """Pairs in a non-empty array of token ids, in which the end-of-text id separates all sources and targets.

    In batches, a source is followed by the end-of-text id, and a target is preceded and followed by it. `lengths`,
    (N, 2), are the numbers of tokens of source and target without end-of-text ids. Raises TinyLMError if there are not
    as many targets as sources.
    """

    def __init__(self, tokens: Tokens, end_of_text_id: int) -> None:
        tokens = np.asarray(tokens)
        ends = np.flatnonzero(tokens == end_of_text_id)
        if len(tokens) and (not len(ends) or ends[-1] != len(tokens) - 1):
            ends = np.append(ends, len(tokens))  # there is no end-of-text id after the last target
        starts = np.append(0, ends[:-1] + 1)
        if len(ends) % 2:
            raise TinyLMError(f"The encoded text is damaged: its {len(ends)} documents are not pairs.")
        self._tokens = tokens
        self._end_of_text_id = end_of_text_id
        self._starts = starts.reshape(-1, 2)
        self.lengths = (ends - starts).reshape(-1, 2)

    @property
    def contexts(self) -> np.ndarray:
        """The context length that each pair needs, (N,): its longer side and an end-of-text id."""
        return (self.lengths + 1).max(axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def source(self, index: int) -> np.ndarray:
        """The token ids of a source, (S,)."""
        return self._side(index, 0)

    def target(self, index: int) -> np.ndarray:
        """The token ids of a target, (T,)."""
        return self._side(index, 1)

    def _side(self, index: int, side: int) -> np.ndarray:
        start = self._starts[index, side]
        return self._tokens[start : start + self.lengths[index, side]].astype(np.int64)

    def fitting(self, context: int) -> np.ndarray:
        """The indices, (M,), of the pairs that fit into a context of `context` tokens."""
        return np.flatnonzero(self.contexts <= context)

    def training_batches(self, context: int, batch_size: int, seed: int) -> ShuffledBatches:
        """Batches of at most `batch_size` pairs that fit into the context, with similar target and source lengths."""
        return ShuffledBatches(self.fitting(context), self.batch, batch_size, seed, sort_keys=self.lengths.T)

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """A batch of the pairs with the given indices, (B,), padded with end-of-text ids, which the mask excludes."""
        end = [self._end_of_text_id]
        sources = [np.append(self.source(i), end) for i in indices]
        targets = [np.concatenate((end, self.target(i), end)) for i in indices]
        source, source_lengths = pad_rows(sources, self._end_of_text_id)  # (B, S), (B,)
        ids, lengths = pad_rows(targets, self._end_of_text_id)  # (B, T + 1), (B,)
        mask = torch.arange(ids.shape[1] - 1) < (lengths - 1).unsqueeze(1)  # (B, T)
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask, source, source_lengths)


def pad_rows(rows: Sequence[np.ndarray], padding: int) -> tuple[Tensor, Tensor]:
    """Pad at least one row of token ids on the right: (B, T) of int64, and the lengths of the rows, (B,)."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), padding)
    for row, values in zip(ids, rows, strict=True):
        row[: len(values)] = torch.from_numpy(values)
    return ids, lengths


class PairContexts(NamedTuple):
    """The context lengths that the training pairs and the validation pairs need, (N,) each."""

    train: np.ndarray
    val: np.ndarray

    @classmethod
    def from_tokens(cls, tokens: TokenFolder, end_of_text_id: int) -> "PairContexts":
        """The context lengths that the pairs in a token folder need. Raises TinyLMError as `PairTokens` does."""
        return cls(*(PairTokens(part, end_of_text_id).contexts for part in (tokens.train, tokens.val)))


def pair_evaluation_batches(
    pairs: PairTokens, context: int, batch_size: int, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield batches of the pairs that fit into the context, sorted by target length.

    With `max_tokens`, yields a fixed selection of evenly spaced pairs with about that many target tokens in total,
    end-of-text ids included.
    """
    indices = pairs.fitting(context)
    total = int((pairs.lengths[indices, 1] + 1).sum())
    if max_tokens is not None and max_tokens < total:
        indices = indices[np.linspace(0, len(indices) - 1, max(1, len(indices) * max_tokens // total)).astype(int)]
    indices = indices[np.argsort(pairs.lengths[indices, 1], kind="stable")]
    for first in range(0, len(indices), batch_size):
        yield pairs.batch(indices[first : first + batch_size])
