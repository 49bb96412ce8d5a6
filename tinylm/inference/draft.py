"""Guesses at what a model will write, which it checks several at a time (Leviathan et al. 2023; seed 002's cache)."""

from collections.abc import Sequence

import numpy as np

LENGTHS = (8, 5, 3)  # of the contexts that are looked up, longest first
LEAST_SHARE = 0.5  # a guess that was right less often in the text is not made
MOST_TOKENS = 4_000_000  # of the text, from its end
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NGramDraft:
    """What followed the last few tokens most often in a text, by its longest known context.

    A context is looked up by a hash of 64 bits; two contexts that share one would only make a guess worse.
    """

    def __init__(self, tokens: np.ndarray) -> None:
        tokens = tokens[-MOST_TOKENS:].astype(np.uint64)
        self._tables = [(length, *_table(tokens, length)) for length in LENGTHS if len(tokens) > length]

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that may follow the text; fewer where the text does not make one likely."""
        known = list(text[-LENGTHS[0] :])
        guessed: list[int] = []
        while len(guessed) < most and (token := self._likeliest(known)) is not None:
            guessed.append(token)
            known.append(token)
        return guessed

    def _likeliest(self, known: list[int]) -> int | None:
        for length, contexts, followers in self._tables:
            if len(known) < length:
                continue
            context = _hashes(np.array(known[-length:], dtype=np.uint64), length)[0]
            place = int(np.searchsorted(contexts, context))
            if place < len(contexts) and contexts[place] == context:
                return int(followers[place]) if followers[place] >= 0 else None
        return None


def _table(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Every context's hash, sorted, and what follows it most often, -1 where nothing does so often enough."""
    hashes, next_tokens = _hashes(tokens[:-1], length), tokens[length:]
    order = np.lexsort((next_tokens, hashes))
    hashes, next_tokens = hashes[order], next_tokens[order]
    new_context = np.append(True, hashes[1:] != hashes[:-1])
    new_pair = new_context | np.append(True, next_tokens[1:] != next_tokens[:-1])
    pairs, contexts = np.flatnonzero(new_pair), np.flatnonzero(new_context)
    counts = np.diff(np.append(pairs, len(hashes)))
    totals = np.diff(np.append(contexts, len(hashes)))
    context_of_pair = np.cumsum(new_context)[pairs] - 1
    best = np.lexsort((-counts, context_of_pair))[np.searchsorted(context_of_pair, np.arange(len(contexts)))]
    sure = counts[best] >= LEAST_SHARE * totals
    return hashes[contexts], np.where(sure, next_tokens[pairs[best]].astype(np.int64), -1)


def _hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """(N,) of uint64 -> (N - length + 1,): of every `length` tokens in a row."""
    count = len(tokens) - length + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        hashes = (hashes ^ tokens[offset : offset + count]) * MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return hashes
