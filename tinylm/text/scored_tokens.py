"""Encoded records of which some tokens are scored, and batches of them: several in each row without attention between
them, or one with padding.

In an array of codes, a token is 4 id + 2 scored + first, where `first` marks the first token of a record. An example,
which is trained on as a whole, is a record, or several that are compared, as those of preferences are.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch

from tinylm.errors import TinyLMError
from tinylm.text.batches import Batch, ShuffledBatches
from tinylm.text.token_files import Tokens

CODES_PER_ID = 4
SCORED, FIRST = 2, 1
PADDING = 0  # any id works: padding is not scored, and other tokens do not attend to it
MIN_PACKED_ROW = 512  # tokens, or those of the longest example; longer rows have less padding, but attention costs more
MIN_PACKED_EXAMPLES = 3  # per row, on average: with fewer, packed rows are slower (docs/fine-tuning.md)


def ids_of(codes: np.ndarray) -> np.ndarray:
    """The token ids of codes: (N,) -> (N,)."""
    return codes // CODES_PER_ID


class ScoredTokens:
    """The records in an array of codes. The first token of a record is not scored, whatever its flag.

    lengths: (N,), tokens of each record. first_scored: (N,), index of its first scored token; its length if no
    token is scored. n_scored: number of scored tokens. batch_type: of the batches of `ScoredRows`. packs: whether
    records can share rows.

    Raises TinyLMError if a non-empty array does not begin with the first token of a record.
    """

    batch_type: ClassVar[type[Batch]] = Batch
    packs: ClassVar[bool] = True

    def __init__(self, tokens: Tokens) -> None:
        codes = np.asarray(tokens)
        self._codes = codes
        self._starts = np.flatnonzero(codes & FIRST)
        if len(codes) and (not len(self._starts) or self._starts[0]):
            raise TinyLMError("The encoded text is damaged: it does not begin with a record.")
        self.lengths = np.diff(self._starts, append=len(codes))
        scored = np.flatnonzero(codes & SCORED)
        scored = scored[(codes[scored] & FIRST) == 0]
        self.n_scored = len(scored)
        following = np.append(scored, len(codes))[np.searchsorted(scored, self._starts)]
        self.first_scored = np.minimum(following - self._starts, self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int, inputs: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The ids, (T,) of int64, and the scored flags, (T,) of bool, of a record. Ignore the first flag.

        inputs: number of input tokens, which are cut and have one target more; `None` for all
        """
        start = self._starts[index]
        length = self.lengths[index] if inputs is None else inputs + 1
        codes = np.asarray(self._codes[start : start + length], dtype=np.int64)
        return ids_of(codes), (codes & SCORED) > 0

    def scored_ids(self, context: int) -> np.ndarray:
        """The ids, (M,), of all scored tokens that a model with this context length predicts."""
        parts = [np.zeros(0, dtype=np.int64)]
        for index in self.examples(context).ravel():
            ids, scored = (part[1 : context + 1] for part in self.tokens(index))
            parts.append(ids[scored])
        return np.concatenate(parts)

    def inputs(self, context: int) -> np.ndarray:
        """The number of input tokens of each record, (N,): all but the last token, and at most `context`."""
        return np.minimum(self.lengths - 1, context)

    def has_target(self, context: int) -> np.ndarray:
        """Whether each record has a scored token in its first `context` + 1 tokens, (N,)."""
        return (self.first_scored < self.lengths) & (self.first_scored <= context)

    def examples(self, context: int) -> np.ndarray:
        """The indices of the records of each example that can be trained on, (M, 1): those with a target."""
        return np.flatnonzero(self.has_target(context))[:, np.newaxis]

    def require_examples(self, context: int, name: str) -> None:
        """Raise UsageError if there is no example in the context. name: such as "training"."""

    def describe_left_out(self, context: int, name: str) -> list[str]:
        """Sentences about records that are cut or left out. name: such as "training"."""
        return []


class ScoredRows:
    """Rows of examples for a model with a given context; at least one must be usable (`ScoredTokens.require_examples`).

    Records longer than the context are cut at their end. With `packed`, several examples share a row of `width`
    tokens, so that the rows have little padding; otherwise there is one per row, padded to the longest of the batch.

    examples: (M, G), as from `ScoredTokens.examples`; `None` for all. width: tokens of a packed row, or of the longest
    row. rows: the indices of the records of each row. lengths: (R,), tokens per row without padding.
    """

    def __init__(self, tokens: ScoredTokens, context: int, packed: bool, examples: np.ndarray | None = None) -> None:
        self._tokens = tokens
        self._packed = packed
        self._inputs = tokens.inputs(context)
        examples = tokens.examples(context) if examples is None else examples
        self._has_segments = packed or examples.shape[1] > 1
        sizes = self._inputs[examples].sum(axis=1)  # (M,)
        self.width = max(int(sizes.max()), packed_width(context)) if packed else int(sizes.max())
        rows = pack(np.arange(len(sizes)), sizes, self.width) if packed else [[index] for index in range(len(sizes))]
        self.rows = [examples[row].ravel() for row in rows]
        self.lengths = np.array([self._inputs[row].sum() for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all rows, without padding."""
        return int(self.lengths.sum())

    def training_batches(self, batch_size: int, seed: int) -> ShuffledBatches:
        """Batches of at most `batch_size` rows, of similar length unless they are packed."""
        sort_keys = None if self._packed else self.lengths[np.newaxis]
        return ShuffledBatches(np.arange(len(self)), self.batch, batch_size, seed, sort_keys)

    def batch(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        """A batch of the rows with these numbers: (B, width) if packed, or else (B, T) for T tokens in the longest."""
        width = self.width if self._packed else int(self.lengths[numbers].max())
        shape = (len(numbers), width)
        ids, targets, segments = np.full(shape, PADDING), np.full(shape, PADDING), np.zeros(shape, dtype=np.int64)
        mask = np.zeros(shape, dtype=bool)
        for row, number in enumerate(numbers):
            start = 0
            for segment, index in enumerate(self.rows[number], start=1):
                stop = start + self._inputs[index]
                tokens, scored = self._tokens.tokens(index, int(self._inputs[index]))
                ids[row, start:stop], targets[row, start:stop] = tokens[:-1], tokens[1:]
                mask[row, start:stop], segments[row, start:stop] = scored[1:], segment
                start = stop
        return self._tokens.batch_type(
            torch.from_numpy(ids),
            torch.from_numpy(targets),
            torch.from_numpy(mask),
            segments=torch.from_numpy(segments) if self._has_segments else None,
            lengths=None if self._has_segments else torch.from_numpy(self.lengths[numbers]),
        )


def packed_width(context: int) -> int:
    """The least width of packed rows."""
    return min(context, MIN_PACKED_ROW)


def worth_packing(tokens: ScoredTokens, context: int) -> bool:
    """Whether a packed row holds enough examples to be faster than one example per row."""
    sizes = tokens.inputs(context)[tokens.examples(context)].sum(axis=1)
    if not tokens.packs or not len(sizes):
        return False
    return max(int(sizes.max()), packed_width(context)) >= MIN_PACKED_EXAMPLES * float(sizes.mean())


def pack(indices: np.ndarray, lengths: np.ndarray, width: int) -> list[np.ndarray]:
    """Distribute items over few rows of `width`: best fit in order of decreasing length.

    Each item goes into the row with the least sufficient room (Johnson 1974). `lengths`: (N,), of all items, from 1 to
    `width`. `indices`: (M,), of the items to distribute. Returns the indices of the items of each row.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # numbers of the rows, by number of free tokens
    rooms: list[int] = []  # the keys of `by_room`, sorted
    for index in indices[np.argsort(-lengths[indices], kind="stable")]:
        length = int(lengths[index])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            rows.append([])
            number, room = len(rows) - 1, width
        else:
            room = rooms[at]
            number = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        rows[number].append(int(index))
        if room - length not in by_room:
            by_room[room - length] = []
            bisect.insort(rooms, room - length)
        by_room[room - length].append(number)
    return [np.array(row) for row in rows]


def scored_evaluation_batches(
    tokens: ScoredTokens, context: int, rows: int, packed: bool, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield batches of at most `rows` rows with the usable examples, each once. At least one must be usable.

    With `max_tokens`, yields a fixed selection of evenly spaced examples with about that many scored tokens.
    """
    examples = tokens.examples(context)
    if max_tokens is not None and max_tokens < tokens.n_scored:
        count = max(1, len(examples) * max_tokens // tokens.n_scored)
        examples = examples[np.linspace(0, len(examples) - 1, count).astype(int)]
    chosen = ScoredRows(tokens, context, packed, examples)
    order = np.argsort(chosen.lengths, kind="stable")
    for first in range(0, len(order), rows):
        yield chosen.batch(order[first : first + rows])
