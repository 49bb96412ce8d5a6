"""Autoregressive generation: predict, sample, append, repeat. The interface of engines, and the engine torch."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tinylm.generation.generation_config import DEFAULT_TEMPERATURE, GenerationConfig
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.sampler import Logits, Sampler, as_array, log_softmax, sample_seed
from tinylm.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # llama.cpp generates without torch, whose import takes most of the start-up time
    from torch import Tensor

Ids = NDArray[np.int64]
SamplesTokens = Callable[["Logits | Tensor"], list[int]]  # as `Sampler`


class Candidate(NamedTuple):
    """A token id and the natural logarithm of its probability in the model's distribution (temperature 1)."""

    id: int
    logprob: float


class Token(NamedTuple):
    """A generated token of one row, that is, one sample.

    id: `None` if the row ends with an end token. logprob: see Candidate. candidates: the likeliest tokens at its
    position, the likeliest first. Both are given if the request asks for them.
    """

    row: int
    id: int | None
    logprob: float | None = None
    candidates: Sequence[Candidate] = ()


class Engine(Protocol):
    """Computes and samples the tokens that continue prompts."""

    def generate(
        self, prompts: Sequence[EncodedPrompt], config: GenerationConfig, first_stream: int, kept_id: int | None
    ) -> Generator[Token]:
        """Yield the next tokens of each prompt, one row per prompt, at most `config.max_tokens` per row.

        Continues past the context length at a constant amortised cost per token, in windows (`window_start`).

        first_stream: number of the random stream of the first row. kept_id: the token that stays the first of a window
        that advances, if a prompt begins with it.
        """
        ...

    def sample_seed(self, config: GenerationConfig, first_stream: int, row: int) -> int:
        """The seed with which this row is generated as the only one."""
        ...


class NextTokenModel(Protocol):
    """The interface of a model for generation by torch."""

    @property
    def context(self) -> int:
        """Context length in tokens."""
        ...

    def make_cache(self, batch: int, length: int, starts: Ids | None = None) -> Sequence[Any]:
        """Empty caches with `length` slots per row, and an `offset` as in `tinylm.transformer.kv_cache.Cache`.

        starts: (B,), number of left-padding tokens per row; `None` without padding.
        """
        ...

    def last_logits(self, ids: Ids, cache: Any | None) -> "Logits | Tensor":
        """Logits after the last id: (B, T) -> (B, V). The ids follow those in the cache.

        With an empty cache of B rows, ids (1, T) are the ids of each row, and the logits may be those of one row.
        Computed without gradients.
        """
        ...


@dataclass(frozen=True)
class TorchEngine:
    """Generation by torch, for all decoders and devices. use_cache: whether to use the KV cache."""

    model: NextTokenModel
    tokenizer: Tokenizer
    use_cache: bool = True

    def generate(
        self, prompts: Sequence[EncodedPrompt], config: GenerationConfig, first_stream: int, kept_id: int | None
    ) -> Generator[Token]:
        """See `Engine.generate`."""
        sampling = config.sampling(DEFAULT_TEMPERATURE)
        sampler = Sampler(sampling, config.seed, len(prompts), self.tokenizer.vocab_size, first_stream)
        for row, prompt in enumerate(prompts):
            sampler.observe(row, prompt.ids)
        choose: SamplesTokens = sampler
        if config.json_schema is not None:
            from tinylm.generation.json_schema import JSONSampler

            choose = JSONSampler(sampler, config.json_schema, self.tokenizer, prompts)
        texts = [prompt.start for prompt in prompts]
        for ids, logits in generate(self.model, texts, choose, config.max_tokens, self.use_cache, kept_id):
            if not config.logprobs:
                yield from map(Token, range(len(ids)), ids)
                continue
            scores = log_softmax(as_array(logits)[:, : self.tokenizer.vocab_size])
            for row, token in enumerate(ids):
                best = np.argsort(-scores[row], kind="stable")[: config.logprobs].tolist()
                candidates = [Candidate(other, float(scores[row, other])) for other in best]
                yield Token(row, token, float(scores[row, token]), candidates)

    def sample_seed(self, config: GenerationConfig, first_stream: int, row: int) -> int:
        """See `Engine.sample_seed`."""
        return sample_seed(config.seed, first_stream + row)


def window_start(length: int, context: int) -> int:
    """Index of the first token in the context window of a text of `length` tokens.

    0 while the context has room for the text and its next token. After that, the start advances by half a context at a
    time, so that a cache is reused for half a context of tokens, and positions stay in the range of training.
    """
    room, hop = max(1, context - 1), max(1, context // 2)
    return max(0, -(-(length - room) // hop)) * hop


def window(text: list[int], context: int, kept_id: int | None) -> list[int]:
    """The context window of a text, see `window_start`. A BOS token replaces the first token of its window."""
    kept = int(text[0] == kept_id)
    return text[:kept] + text[window_start(len(text), context) + kept :]


def generate(
    model: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    sampler: SamplesTokens,
    max_tokens: int,
    use_cache: bool = True,
    kept_id: int | None = None,
) -> Iterator[tuple[list[int], "Logits | Tensor"]]:
    """Yield one new token per prompt and the logits (B, V) that it was sampled from, `max_tokens` times.

    Prompts have at least one token; their lengths may differ. kept_id: see `Engine.generate`. The tokens are the same
    with and without the cache, except for rounding.
    """
    texts = [list(prompt) for prompt in prompts]
    windows = ContextWindows(model, texts, max_tokens, kept_id) if use_cache else None
    for _ in range(max_tokens):
        logits = windows.next_logits() if windows else _logits_without_cache(model, texts, kept_id)
        tokens = sampler(logits)
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        yield tokens, logits


class ContextWindows:
    """The context window of each text, see `window_start`, and the KV cache of all windows.

    texts: the ids of each text, to which the caller appends new tokens. max_tokens: maximum number of appended tokens
    per text. kept_id: see `Engine.generate`.

    When the window of one text advances, the cache is recomputed for all texts; the other windows do not move.
    """

    def __init__(
        self, model: NextTokenModel, texts: list[list[int]], max_tokens: int, kept_id: int | None = None
    ) -> None:
        self._model = model
        self._kept_id = kept_id
        self._texts = texts
        self._slots = min(model.context, max(map(len, texts)) + max_tokens)
        self._starts: list[int] = []
        self._cache: Sequence[Any] = []

    def next_logits(self) -> "Logits | Tensor":
        """The logits after each text, (B, V).

        The model processes only the last token of each text; at the first call, and when a window has advanced, it
        processes all tokens of all windows.
        """
        rows = len(self._texts)
        starts = [window_start(len(text), self._model.context) for text in self._texts]
        if starts != self._starts:
            self._starts = starts
            ids, padding = left_padded(self._texts, self._model.context, self._kept_id)
            self._cache = self._model.make_cache(rows, self._slots, padding)
            if padding is None and (ids == ids[0]).all():  # samples of one prompt, which is processed once
                ids = ids[:1]
        else:
            ids = np.array([[text[-1]] for text in self._texts])  # (B, 1)
        logits = self._model.last_logits(ids, self._cache)
        return logits if len(logits) == rows else logits[[0] * rows]


def _logits_without_cache(model: NextTokenModel, texts: list[list[int]], kept_id: int | None) -> "Logits | Tensor":
    """The logits after each text, computed from its whole window: (B, V)."""
    ids, padding = left_padded(texts, model.context, kept_id)
    cache = None if padding is None else model.make_cache(len(texts), ids.shape[1], padding)
    return model.last_logits(ids, cache)


def left_padded(texts: list[list[int]], context: int, kept_id: int | None) -> tuple[Ids, Ids | None]:
    """The windows as one left-padded batch (B, T), and the padding per row (B,), or `None` without padding."""
    rows = [window(text, context, kept_id) for text in texts]
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    ids = np.array([[0] * pad + row for pad, row in zip(padding, rows, strict=True)])
    return ids, np.array(padding) if any(padding) else None
