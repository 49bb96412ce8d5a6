"""Encoded conversations: token ids with flags for scored tokens and for the first token of a conversation.

In an array of codes, a token is 4 id + 2 scored + first, where `first` marks the first token of a conversation.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from tinylm.errors import TinyLMError
from tinylm.text.answer_spans import ScoredText
from tinylm.text.parallel_encoding import TextBatch
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.token_files import BATCH_CHARACTERS, Encoding
from tinylm.text.tokenizer import Tokenizer

CODES_PER_ID = 4
SCORED, FIRST = 2, 1


def encode_example(example: ScoredText, tokenizer: Tokenizer) -> np.ndarray:
    """The codes of a rendered conversation: (N,) of uint32. A token is scored if it starts inside a span.

    Raises UsageError for characters without an id, and TinyLMError if the `tokenizers` library fails.
    """
    ids, starts = tokenizer.encode_with_special(example.text)
    codes = CODES_PER_ID * ids.astype(np.uint32)
    for span in example.spans:
        first, last = np.searchsorted(starts, [span.start, span.stop])
        codes[first:last] |= SCORED
    codes[:1] |= FIRST
    return codes


def _example_batches(examples: Iterator[ScoredText], tokenizer: Tokenizer) -> Iterator[TextBatch]:
    """Yield batches whose content is a list of rendered conversations."""
    batch: list[ScoredText] = []
    characters = 0
    for example in examples:
        batch.append(example)
        characters += len(example.text)
        if characters >= BATCH_CHARACTERS:
            yield TextBatch(batch, characters)
            batch, characters = [], 0
    if batch:
        yield TextBatch(batch, characters)


def _encode_examples(examples: list[ScoredText], tokenizer: Tokenizer) -> np.ndarray:
    """The codes of a batch, (N,) of uint32."""
    return np.concatenate([encode_example(example, tokenizer) for example in examples])


CHAT_ENCODING = Encoding(_example_batches, _encode_examples, CODES_PER_ID)


def ids_of(codes: np.ndarray) -> np.ndarray:
    """The token ids of codes: (N,) -> (N,)."""
    return codes // CODES_PER_ID


MarkedText = tuple[tuple[str, bool], ...]  # parts of a text in order, each scored or not


class ChatTokens:
    """The conversations in an array of codes. The first token of a conversation is not scored, whatever its flag.

    lengths: (N,), tokens of each conversation. first_scored: (N,), index of its first scored token; its length if no
    token is scored. n_scored: number of scored tokens. Raises TinyLMError if a non-empty array does not begin with the
    first token of a conversation.
    """

    def __init__(self, tokens: Tokens) -> None:
        codes = np.asarray(tokens)
        self._codes = codes
        self._starts = np.flatnonzero(codes & FIRST)
        if len(codes) and (not len(self._starts) or self._starts[0]):
            raise TinyLMError("The encoded text is damaged: it does not begin with a conversation.")
        self.lengths = np.diff(self._starts, append=len(codes))
        scored = np.flatnonzero(codes & SCORED)
        scored = scored[(codes[scored] & FIRST) == 0]
        self.n_scored = len(scored)
        following = np.append(scored, len(codes))[np.searchsorted(scored, self._starts)]
        self.first_scored = np.minimum(following - self._starts, self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids, (T,) of int64, and the scored flags, (T,) of bool, of a conversation. Ignore the first flag."""
        start = self._starts[index]
        codes = np.asarray(self._codes[start : start + self.lengths[index]], dtype=np.int64)
        return ids_of(codes), (codes & SCORED) > 0

    def scored_ids(self, context: int) -> np.ndarray:
        """The ids, (M,), of all scored tokens that a model with this context length predicts."""
        parts = [np.zeros(0, dtype=np.int64)]
        for index in self.usable(context):
            ids, scored = (part[1 : context + 1] for part in self.tokens(index))
            parts.append(ids[scored])
        return np.concatenate(parts)

    @property
    def unscored(self) -> int:
        """Number of conversations without a scored token."""
        return int((self.first_scored == self.lengths).sum())

    def usable(self, context: int) -> np.ndarray:
        """The indices, (M,), of the conversations with a scored token in their first `context` + 1 tokens."""
        return np.flatnonzero((self.first_scored < self.lengths) & (self.first_scored <= context))

    def inputs(self, context: int) -> np.ndarray:
        """The number of input tokens of each conversation, (N,): all but the last token, and at most `context`."""
        return np.minimum(self.lengths - 1, context)


def marked_examples(tokens: ChatTokens, tokenizer: Tokenizer, number: int) -> tuple[MarkedText, ...]:
    """The texts of the first `number` conversations, special tokens included, in parts that are scored or not.

    Raises TinyLMError if the `tokenizers` library fails.
    """
    examples = []
    for index in range(min(number, len(tokens))):
        ids, scored = tokens.tokens(index)
        scored[:1] = False  # the first token is never a target
        edges = [0, *(np.flatnonzero(np.diff(scored)) + 1), len(ids)]
        parts = ((tokenizer.decode_with_special(ids[a:b]), bool(scored[a])) for a, b in itertools.pairwise(edges))
        examples.append(tuple(parts))
    return tuple(examples)
