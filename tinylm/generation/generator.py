"""Autoregressive generation with a KV cache: predict, sample, append, repeat (notes 002, 004)."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tinylm.generation.sampler import Logits, Sampler

if TYPE_CHECKING:  # llama.cpp generates without torch, whose import takes most of the start-up time
    from torch import Tensor

Ids = NDArray[np.int64]


class NextTokenModel(Protocol):
    """The interface of a model for generation."""

    @property
    def context(self) -> int:
        """Context length in tokens."""
        ...

    def make_cache(self, batch: int, length: int, starts: Ids | None = None) -> Sequence[Any]:
        """Empty caches with `length` slots per row, and `offset` and `rewind` as in `tinylm.model.kv_cache.Cache`.

        starts: (B,), number of left-padding tokens per row; `None` without padding.
        """
        ...

    def last_logits(self, ids: Ids, cache: Any | None, count: int) -> "Logits | Tensor":
        """Logits after each of the last `count` ids: (B, T) -> (B, count, V). The ids follow those in the cache.

        With an empty cache of B rows, ids (1, T) are the ids of each row, and the logits may be those of one row.
        Computed without gradients.
        """
        ...


def window_start(length: int, context: int) -> int:
    """Index of the first token in the context window of a text of `length` tokens.

    0 while the text fits the context. After that, the start advances by half a context at a time, so that a cache is
    reused for half a context of tokens, and positions stay in the range of training.
    """
    if length <= context:
        return 0
    hop = max(1, context // 2)
    return -(-(length - context) // hop) * hop


def generate(
    model: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    max_tokens: int,
    use_cache: bool = True,
    bos_id: int | None = None,
) -> Iterator[list[int]]:
    """Yield one new token per prompt, `max_tokens` times. Prompts have at least one token; their lengths may differ.

    bos_id: the token that stays the first of a window that advances, if a prompt begins with it.

    Continues past the context length, with the cache at a constant amortised cost per token. The tokens are the same
    with and without the cache, except for rounding.
    """
    texts = [list(prompt) for prompt in prompts]
    window = ContextWindow(model, texts, max_tokens, bos_id) if use_cache else None
    for _ in range(max_tokens):
        logits = window.next_logits()[:, -1] if window else _logits_without_cache(model, texts, bos_id)  # (B, V)
        tokens = sampler(logits)
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        yield tokens


class ContextWindow:
    """The context window of each text, see `window_start`, and the KV cache of all windows.

    texts: the ids of each text, to which the caller appends new tokens. max_tokens: maximum number of appended tokens
    per text. bos_id: see `generate`.

    When the window of one text advances, the cache is recomputed for all texts; the other windows do not move.
    """

    def __init__(
        self, model: NextTokenModel, texts: list[list[int]], max_tokens: int, bos_id: int | None = None
    ) -> None:
        self._model = model
        self._bos_id = bos_id
        self._texts = texts
        self._slots = min(model.context, max(map(len, texts)) + max_tokens)
        self._starts: list[int] = []
        self._cache: Sequence[Any] = []

    def remaining(self) -> int:
        """Number of tokens that can be appended to the first text before its window advances."""
        length, context = len(self._texts[0]), self._model.context
        return window_start(length, context) + context - length

    def rewind(self, tokens: int) -> None:
        """Drop the last `tokens` tokens from the cache. Raises ValueError for sliding-window caches, except for 0."""
        for cache in self._cache:
            cache.rewind(tokens)

    def next_logits(self, draft: Sequence[int] = ()) -> "Logits | Tensor":
        """The logits after each text, (B, 1, V). With G draft tokens after a single text: (1, G+1, V), the logits after
        the text and after each draft token.

        The model processes only the last token of each text and the draft tokens; at the first call, and when a window
        has advanced, it processes all tokens of all windows.
        """
        rows = len(self._texts)
        starts = [window_start(len(text), self._model.context) for text in self._texts]
        if starts != self._starts:
            self._starts = starts
            ids, padding = _left_padded(self._texts, starts, self._bos_id)
            self._cache = self._model.make_cache(rows, self._slots, padding)
            if padding is None and (ids == ids[0]).all():  # samples of one prompt, which is processed once
                ids = ids[:1]
        else:
            ids = np.array([[text[-1]] for text in self._texts])  # (B, 1)
        if draft:
            ids = np.concatenate((ids, [draft]), axis=1)  # (1, T+G)
        logits = self._model.last_logits(ids, self._cache, len(draft) + 1)
        return logits if len(logits) == rows else logits[[0] * rows]


def _logits_without_cache(model: NextTokenModel, texts: list[list[int]], bos_id: int | None) -> "Logits | Tensor":
    """The logits after each text, computed from its whole window: (B, V)."""
    ids, padding = _left_padded(texts, [window_start(len(text), model.context) for text in texts], bos_id)
    cache = None if padding is None else model.make_cache(len(texts), ids.shape[1], padding)
    return model.last_logits(ids, cache, 1)[:, -1]


def _left_padded(texts: list[list[int]], starts: list[int], bos_id: int | None) -> tuple[Ids, Ids | None]:
    """The windows as one left-padded batch (B, T), and the padding per row (B,), or `None` without padding.

    The BOS token of a text replaces the first token of its window.
    """
    kept = [int(text[0] == bos_id) for text in texts]
    rows = [text[:keep] + text[start + keep :] for text, start, keep in zip(texts, starts, kept, strict=True)]
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    ids = np.array([[0] * pad + row for pad, row in zip(padding, rows, strict=True)])
    return ids, np.array(padding) if any(padding) else None
