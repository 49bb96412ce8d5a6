"""Speculative decoding: n-grams propose draft tokens, and one forward pass of the model verifies several of them.

Each token is sampled from the model's distribution, as without a draft. If the sampled token equals the draft token,
the logits after it are already computed. A draft changes the speed and not the text, except for rounding.
(A draft token is accepted with the same probability as by the rule of Leviathan et al. 2023.)
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tinylm.generation.generator import ContextWindow, NextTokenModel
from tinylm.generation.sampler import Sampler
from tinylm.text.sharded_tokens import Tokens

if TYPE_CHECKING:
    from tinylm.model.decoder import Decoder

MAX_DRAFT_TOKENS = 6  # per forward pass
MIN_TOKENS_TO_DRAFT = 512  # minimum of `max_tokens`
MAX_TEXT_PER_TOKEN = 500  # training tokens per generated token; counting n-grams of more takes over 5 % of the time
TRIAL_PASSES = 16  # forward passes with draft tokens, after which it is decided whether to pause drafting
MIN_ACCEPTED = 1.0  # drafting pauses below this mean per pass; a pass with draft tokens takes up to twice as long
FIRST_PAUSE = 128  # tokens; each further pause is twice as long
NGRAM_LENGTHS = (8, 5, 3)  # lengths in tokens of the contexts, in the order of lookup
MIN_FREQUENCY = 0.5  # a token is proposed if it follows at least this fraction of its context's occurrences
MAX_TEXT_TOKENS = 4_000_000  # only this many tokens at the end of the text are indexed
HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class DraftModel(Protocol):
    """Proposes the next tokens of a text."""

    def propose(self, text: Sequence[int], limit: int) -> list[int]:
        """At most `limit` draft tokens to follow the ids `text`; may be empty."""
        ...


def generate_speculatively(
    model: NextTokenModel,
    prompt: Sequence[int],
    sampler: Sampler,
    max_tokens: int,
    draft: DraftModel,
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
    bos_id: int | None = None,
) -> Iterator[list[int]]:
    """Yield the same tokens as `generate` for a single prompt, with the same `bos_id`.

    max_draft_tokens: maximum number of draft tokens per forward pass.

    Raises ValueError when a draft token is rejected and the caches cannot drop it (sliding windows).
    """
    text = list(prompt)
    window = ContextWindow(model, [text], max_tokens, bos_id)
    pauses = _Pauses()
    remaining = max_tokens
    while remaining:
        limit = min(max_draft_tokens, remaining - 1, window.remaining())
        proposed = [] if pauses.is_pausing() else draft.propose(text, limit)
        logits = window.next_logits(proposed)  # (1, G+1, V)
        accepted = 0
        for index, draft_token in enumerate([*proposed, None]):
            tokens = sampler(logits[:, index])
            text.extend(tokens)
            remaining -= 1
            yield tokens
            if tokens[0] != draft_token:
                break
            accepted += 1
        window.rewind(len(proposed) - accepted)
        if proposed:
            pauses.record(accepted)


class _Pauses:
    """Pauses drafting after passes in which few draft tokens were accepted."""

    def __init__(self) -> None:
        self._passes = self._accepted = self._remaining = 0
        self._length = FIRST_PAUSE

    def is_pausing(self) -> bool:
        """Whether the next token is generated without a draft."""
        self._remaining -= 1
        return self._remaining >= 0

    def record(self, accepted: int) -> None:
        """Count a forward pass with draft tokens, of which `accepted` were accepted."""
        self._passes += 1
        self._accepted += accepted
        if self._passes == TRIAL_PASSES:
            if self._accepted < MIN_ACCEPTED * TRIAL_PASSES:
                self._remaining, self._length = self._length, 2 * self._length
            self._passes = self._accepted = 0


def is_worth_drafting(max_tokens: int, text_tokens: int) -> bool:
    """Whether drafting can save more time than counting the n-grams of `text_tokens` training tokens takes."""
    return max_tokens >= max(MIN_TOKENS_TO_DRAFT, min(text_tokens, MAX_TEXT_TOKENS) / MAX_TEXT_PER_TOKEN)


def speculation_obstacle(decoder: "Decoder", num_samples: int, use_cache: bool) -> str | None:
    """Why generation with these settings cannot use draft tokens, or `None` if it can."""
    if num_samples > 1:
        return "speculative decoding is for one sample at a time"
    if not use_cache:
        return "speculative decoding needs the cache"
    if any(window is not None for window in decoder.windows):
        return "the caches of layers with a sliding window cannot drop rejected tokens"
    return None


class NGramDraft:
    """Proposes the token that, in the training text, most often follows the last tokens of the generated text.

    The last tokens are the longest context, of the NGRAM_LENGTHS, that occurs in the training text. Contexts are looked
    up by 64-bit hashes; a hash collision at worst leads to a rejected token.
    """

    def __init__(self, tokens: Tokens) -> None:
        """tokens: (N,) ids of the training text."""
        tokens = tokens[-MAX_TEXT_TOKENS:].astype(np.uint64)
        self._tables = [(length, *_ngram_table(tokens, length)) for length in NGRAM_LENGTHS if len(tokens) > length]

    def propose(self, text: Sequence[int], limit: int) -> list[int]:
        """At most `limit` draft tokens. Stops if no context occurs, or if its next token is below MIN_FREQUENCY."""
        context = list(text[-NGRAM_LENGTHS[0] :])
        proposed: list[int] = []
        while len(proposed) < limit and (token := self._most_frequent(context)) is not None:
            proposed.append(token)
            context.append(token)
        return proposed

    def _most_frequent(self, context: list[int]) -> int | None:
        """The token to propose after `context`, or `None`."""
        for length, hashes, next_tokens in self._tables:
            if len(context) < length:
                continue
            key = _hashes(np.array(context[-length:], dtype=np.uint64), length)[0]
            index = int(np.searchsorted(hashes, key))
            if index < len(hashes) and hashes[index] == key:
                return int(next_tokens[index]) if next_tokens[index] >= 0 else None
        return None


def _ngram_table(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The sorted hashes (C,) of all contexts of `length` tokens, and the most frequent next token of each (C,).

    tokens: (N,). The next token is -1 if its frequency is below MIN_FREQUENCY.
    """
    hashes, next_tokens = _hashes(tokens[:-1], length), tokens[length:]  # (N - length,), one per occurrence
    order = np.lexsort((next_tokens, hashes))
    hashes, next_tokens = hashes[order], next_tokens[order]
    new_context = np.append(True, hashes[1:] != hashes[:-1])
    new_pair = new_context | np.append(True, next_tokens[1:] != next_tokens[:-1])
    # Index of the first occurrence of each (context, next token) pair (P,) and of each context (C,).
    pairs, contexts = np.flatnonzero(new_pair), np.flatnonzero(new_context)
    counts = np.diff(np.append(pairs, len(hashes)))
    totals = np.diff(np.append(contexts, len(hashes)))
    context_of_pair = np.cumsum(new_context)[pairs] - 1
    # The pair with the highest count per context (C,): the first of the context after sorting.
    best = np.lexsort((-counts, context_of_pair))[np.searchsorted(context_of_pair, np.arange(len(contexts)))]
    frequent = counts[best] >= MIN_FREQUENCY * totals
    return hashes[contexts], np.where(frequent, next_tokens[pairs[best]].astype(np.int64), -1)


def _hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """The hash of every `length` consecutive tokens: uint64 (N,) -> uint64 (N - length + 1,)."""
    count = len(tokens) - length + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        hashes = (hashes ^ tokens[offset : offset + count]) * HASH_MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return hashes
