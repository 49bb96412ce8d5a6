"""Next-token generation with a KV cache: predict, sample, append, repeat (seeds 002, 004)."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tinylm.inference.sampler import Sampler
from tinylm.model.cache import Cache


class NextTokenModel(Protocol):
    """What the generator needs of a model."""

    @property
    def context(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def make_cache(self, batch: int, length: int, starts: Tensor | None = None) -> list[Cache]: ...

    def last_logits(self, ids: Tensor, cache: Sequence[Cache] | None, count: int) -> Tensor:
        """(B, T) -> (B, count, V), for what follows each of the last tokens. With a cache, ids come after its own."""
        ...


def window_start(length: int, context: int) -> int:
    """Where the window of a text of `length` tokens begins: a function of the length alone.

    0 while the text fits the context; then the start hops by half a context at a time, so that a cache lives for half a
    context and every kind of position sees numbers it was trained on.
    """
    if length <= context:
        return 0
    hop = max(1, context // 2)
    return -(-(length - context) // hop) * hop


@torch.inference_mode()
def generate(
    model: NextTokenModel, prompts: Sequence[Sequence[int]], sampler: Sampler, max_tokens: int, use_cache: bool = True
) -> Iterator[list[int]]:
    """Yield one new token for every prompt, `max_tokens` times. Prompts need at least a token each; lengths may differ.

    Runs on past the context at a constant cost a token, the same with and without the cache.
    """
    texts = [list(prompt) for prompt in prompts]
    window = _Window(model, texts) if use_cache else None
    for _ in range(max_tokens):
        logits = window.next_logits()[:, -1] if window else _recompute(model, texts)
        chosen: list[int] = sampler(logits).tolist()
        for text, token in zip(texts, chosen, strict=True):
            text.append(token)
        yield chosen


class Draft(Protocol):
    """Guesses what a text goes on with."""

    def guess(self, text: Sequence[int], most: int) -> list[int]: ...


@torch.inference_mode()
def generate_from_draft(
    model: NextTokenModel, prompt: Sequence[int], sampler: Sampler, max_tokens: int, draft: Draft, most: int
) -> Iterator[list[int]]:
    """What `generate` yields for one prompt, where one look at the weights checks at most so many guessed tokens.

    Each token is drawn as ever, from the model's distribution after the tokens before it; while it is the one that was
    guessed, the next distribution is there already. So a draft changes how fast tokens come and not which, but for
    rounding. (Drawing first makes a guess be accepted with the probability that Leviathan et al. 2023 give it.)

    Raises ValueError for a model whose layers forget, which cannot take a wrong guess back.
    """
    text = list(prompt)
    window = _Window(model, [text])
    left = max_tokens
    while left:
        guessed = draft.guess(text, min(most, left - 1, window.room()))
        logits = window.next_logits(guessed)  # (1, G+1, V)
        right = 0
        for place, guess in enumerate([*guessed, None]):
            chosen: list[int] = sampler(logits[:, place]).tolist()
            text.extend(chosen)
            left -= 1
            yield chosen
            if chosen[0] != guess:
                break
            right += 1
        window.forget(len(guessed) - right)


class _Window:
    """The part of each text in the model's sight, and the cache that holds it.

    When one row's window moves on, the cache is filled again for all rows; the other rows' windows stay where they are.
    """

    def __init__(self, model: NextTokenModel, texts: list[list[int]]) -> None:
        self._model = model
        self._texts = texts
        self._starts: list[int] = []
        self._cache: list[Cache] = []

    def room(self) -> int:
        """How many more tokens a first text may have until its window moves on."""
        length, context = len(self._texts[0]), self._model.context
        return window_start(length, context) + context - length

    def forget(self, tokens: int) -> None:
        """Take back so many of the last tokens."""
        for cache in self._cache:
            cache.rewind(tokens)

    def next_logits(self, guessed: Sequence[int] = ()) -> Tensor:
        """(B, G+1, V) for the token after each text, and after each guess of what follows the only one."""
        starts = [window_start(len(text), self._model.context) for text in self._texts]
        if starts != self._starts:
            self._starts = starts
            ids, padding = _left_padded(self._model, self._texts, starts)
            self._cache = self._model.make_cache(len(self._texts), self._model.context, padding)
        else:
            ids = _tensor(self._model, [[text[-1]] for text in self._texts])
        if guessed:
            ids = torch.cat((ids, _tensor(self._model, [list(guessed)])), dim=1)  # (1, T+G)
        return self._model.last_logits(ids, self._cache, len(guessed) + 1)


def _recompute(model: NextTokenModel, texts: list[list[int]]) -> Tensor:
    """The same logits with nothing remembered between tokens."""
    ids, padding = _left_padded(model, texts, [window_start(len(text), model.context) for text in texts])
    cache = None if padding is None else model.make_cache(len(texts), ids.shape[1], padding)
    return model.last_logits(ids, cache, 1)[:, -1]


def _left_padded(model: NextTokenModel, texts: list[list[int]], starts: list[int]) -> tuple[Tensor, Tensor | None]:
    """The windows as one batch (B, T) that ends together, and how much padding each row begins with, if any does."""
    rows = [text[start:] for text, start in zip(texts, starts, strict=True)]
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    ids = _tensor(model, [[0] * pad + row for pad, row in zip(padding, rows, strict=True)])
    return ids, torch.tensor(padding, device=ids.device) if any(padding) else None


def _tensor(model: NextTokenModel, rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, device=model.device)
