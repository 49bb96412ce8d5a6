"""Batches of conversations: several in each row without attention between them, or one in each row with padding."""

import bisect
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tinylm.errors import UsageError
from tinylm.text.batches import Batch, ShuffledBatches
from tinylm.text.chat_corpus import ChatTokens
from tinylm.text.token_files import TokenFolder

PADDING = 0  # any id works: padding is not scored, and other tokens do not attend to it
MIN_PACKED_ROW = 512  # tokens, or the context if shorter; longer rows have less padding, but attention costs more
MIN_PACKED_CONVERSATIONS = 3  # per row, on average: with fewer, packed rows are slower (docs/fine-tuning.md)


class ChatParts(NamedTuple):
    """The training conversations and the validation conversations of a run."""

    train: ChatTokens
    val: ChatTokens

    @classmethod
    def from_tokens(cls, tokens: TokenFolder) -> "ChatParts":
        """The conversations in a token folder."""
        return cls(ChatTokens(tokens.train), ChatTokens(tokens.val))


def require_usable(tokens: ChatTokens, context: int, name: str) -> None:
    """Raise UsageError if no conversation is usable in the context (`ChatTokens.usable`). name: such as "training"."""
    if len(tokens.usable(context)):
        return
    if tokens.unscored == len(tokens):
        raise UsageError(f"Nothing is scored in the {name} conversations: none has an answer of the assistant.")
    least = int(tokens.first_scored[tokens.first_scored < tokens.lengths].min())
    raise UsageError(
        f"No {name} conversation has a scored token within the context of {context} tokens; the first scored "
        f"token comes after {least} others."
    )


def describe_left_out(tokens: ChatTokens, context: int, name: str) -> list[str]:
    """Sentences about conversations that are cut or have no scored token. name: such as "training"."""
    sentences = []
    if tokens.unscored:
        sentences.append(
            f"{tokens.unscored:,} of {len(tokens):,} {name} conversations are left out: nothing in them is scored."
        )
    cut = int((tokens.lengths - 1 > context).sum())
    if cut:
        lost = len(tokens) - tokens.unscored - len(tokens.usable(context))
        sentences.append(
            f"{cut:,} of {len(tokens):,} {name} conversations are cut to the context of {context} tokens (the longest "
            f"has {tokens.lengths.max() - 1}); {lost:,} of them lose all answers and are left out."
        )
    return sentences


class ChatRows:
    """Rows of conversations for a model with a given context. Conversations without a scored token are left out; at
    least one must have a scored token (`require_usable`).

    Conversations longer than the context are cut at their end. With `packed`, several conversations share a row of
    `width` tokens, so that the rows have little padding; otherwise there is one per row, padded to the longest of the
    batch.

    indices: of the conversations, which must be usable; `None` for all that are. width: tokens of a packed row, or of
    the longest row. rows: the indices of the conversations of each row. lengths: (R,), tokens per row without padding.
    """

    def __init__(self, tokens: ChatTokens, context: int, packed: bool, indices: np.ndarray | None = None) -> None:
        self._tokens = tokens
        self._context = context
        self._packed = packed
        self._inputs = tokens.inputs(context)
        chosen = tokens.usable(context) if indices is None else indices
        longest = int(self._inputs[chosen].max())
        self.width = _packed_width(longest, context) if packed else longest
        self.rows = (
            pack(chosen, self._inputs, self.width) if packed else [chosen[i : i + 1] for i in range(len(chosen))]
        )
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
                tokens, scored = (part[: stop - start + 1] for part in self._tokens.tokens(index))
                ids[row, start:stop], targets[row, start:stop] = tokens[:-1], tokens[1:]
                mask[row, start:stop], segments[row, start:stop] = scored[1:], segment
                start = stop
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(targets),
            torch.from_numpy(mask),
            segments=torch.from_numpy(segments) if self._packed else None,
            lengths=None if self._packed else torch.from_numpy(self.lengths[numbers]),
        )


def _packed_width(longest: int, context: int) -> int:
    return min(context, max(longest, MIN_PACKED_ROW))


def worth_packing(tokens: ChatTokens, context: int) -> bool:
    """Whether a packed row holds enough conversations to be faster than one conversation per row."""
    inputs = tokens.inputs(context)[tokens.usable(context)]
    if not len(inputs):
        return False
    return _packed_width(int(inputs.max()), context) >= MIN_PACKED_CONVERSATIONS * float(inputs.mean())


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


@functools.lru_cache(maxsize=2)
def chat_rows(tokens: ChatTokens, context: int, packed: bool) -> ChatRows:
    """The rows of all usable conversations, cached for the plan and the task. At least one must be usable."""
    return ChatRows(tokens, context, packed)


def chat_evaluation_batches(
    tokens: ChatTokens, context: int, rows: int, packed: bool, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield batches of at most `rows` rows with the usable conversations, each once. At least one must be usable.

    With `max_tokens`, yields a fixed selection of evenly spaced conversations with about that many scored tokens.
    """
    indices = tokens.usable(context)
    if max_tokens is not None and max_tokens < tokens.n_scored:
        count = max(1, len(indices) * max_tokens // tokens.n_scored)
        indices = indices[np.linspace(0, len(indices) - 1, count).astype(int)]
    examples = ChatRows(tokens, context, packed, indices)
    order = np.argsort(examples.lengths, kind="stable")
    for first in range(0, len(order), rows):
        yield examples.batch(order[first : first + rows])
