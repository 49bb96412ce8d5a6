"""Speculative decoding: n-grams propose draft tokens, and one forward pass of the model verifies several of them.

Each token is sampled from the model's distribution, as without a draft. As long as the sampled token equals the draft
token, the logits after it have been computed already. A draft changes the speed and not the text, except for rounding.
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
MIN_TOKENS_TO_DRAFT = 512
MAX_TEXT_PER_TOKEN = 500  # of training text for each generated token: counting more n-grams takes over 5 % of the time
TRIAL_PASSES = 16  # after which drafting pauses if on average fewer than MIN_ACCEPTED draft tokens were accepted
MIN_ACCEPTED = 1.0  # a forward pass over draft tokens takes up to twice as long as one over a single token
FIRST_PAUSE = 128  # tokens; each further pause is twice as long
NGRAM_LENGTHS = (8, 5, 3)  # lengths in tokens of the contexts that are looked up, in this order
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
) -> Iterator[list[int]]:
    """Yield the same tokens as `generate` for a single prompt.

    max_draft_tokens: maximum of draft tokens per forward pass.

    Raises ValueError for a model whose caches cannot drop rejected tokens (sliding windows).
    """
    text = list(prompt)
    window = ContextWindow(model, [text], max_tokens)
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
    """Stops drafting for a while where few draft tokens are accepted."""

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
    """Whether a draft can save more time than counting the n-grams of a training text of `text_tokens` tokens takes."""
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
    """Proposes the token that most often follows the last tokens of the text in the training text.

    Contexts of NGRAM_LENGTHS tokens are looked up, the longest first; the first that the training text has is used.

    Contexts are looked up by 64-bit hashes. A collision only costs a rejected token.
    """

    def __init__(self, tokens: Tokens) -> None:
        """tokens: (N,) ids of the training text."""
        tokens = tokens[-MAX_TEXT_TOKENS:].astype(np.uint64)
        self._tables = [(length, *_ngram_table(tokens, length)) for length in NGRAM_LENGTHS if len(tokens) > length]

    def propose(self, text: Sequence[int], limit: int) -> list[int]:
        """At most `limit` draft tokens, up to a context that is unknown or that no token follows with MIN_FREQUENCY."""
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
    """The sorted hashes (C,) of all contexts of a length, and the token (C,) that most often follows each.

    The token is -1 if it does not reach MIN_FREQUENCY.
    """
    hashes, next_tokens = _hashes(tokens[:-1], length), tokens[length:]  # of each occurrence (N,)
    order = np.lexsort((next_tokens, hashes))
    hashes, next_tokens = hashes[order], next_tokens[order]
    new_context = np.append(True, hashes[1:] != hashes[:-1])
    new_pair = new_context | np.append(True, next_tokens[1:] != next_tokens[:-1])
    # The first occurrence of each pair of a context and a next token (P,), and of each context (C,).
    pairs, contexts = np.flatnonzero(new_pair), np.flatnonzero(new_context)
    counts = np.diff(np.append(pairs, len(hashes)))
    totals = np.diff(np.append(contexts, len(hashes)))
    context_of_pair = np.cumsum(new_context)[pairs] - 1
    # Of each context, the pair with the highest count: the first one after sorting.
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
