"""Autoregressive generation in torch: predict, sample, append, repeat."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tinylm.generation.engine import Candidate, Engine, Token, window, window_start
from tinylm.generation.generation_config import DEFAULT_TEMPERATURE, GenerationConfig
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.sampler import Sampler
from tinylm.text.tokenizer import Tokenizer

SamplesTokens = Callable[[Tensor], list[int]]  # as `Sampler`


class NextTokenModel(Protocol):
    """A model for generation by torch.

    make_cache: empty caches with `length` slots per row, and an `offset` as in `tinylm.transformer.attention.Cache`.
    starts: (B,), number of left-padding tokens per row; `None` without padding.

    last_logits: the logits after the last id, (B, T) -> (B, V), without gradients. The ids follow those in the cache.
    With an empty cache of B rows, ids (1, T) are the ids of each row, and the logits may be those of one row.
    """

    @property
    def context(self) -> int: ...

    def make_cache(self, batch: int, length: int, starts: Tensor | None = None) -> Sequence[Any]: ...

    def last_logits(self, ids: Tensor, cache: Any | None) -> Tensor: ...


class SomeRequests(Engine, Protocol):
    """An engine for the requests that it suits."""

    def suits(self, config: GenerationConfig) -> bool: ...


@dataclass(frozen=True)
class TorchEngine(Engine):
    """Generation by torch, for all decoders and devices. graphs: generates what suits it, on a GPU."""

    model: NextTokenModel
    tokenizer: Tokenizer
    graphs: SomeRequests | None = None

    def generate(
        self, prompts: Sequence[EncodedPrompt], config: GenerationConfig, first_stream: int
    ) -> Generator[Token]:
        if self.graphs is not None and self.graphs.suits(config):
            return self.graphs.generate(prompts, config, first_stream)
        return self._generate(prompts, config, first_stream)

    def _generate(
        self, prompts: Sequence[EncodedPrompt], config: GenerationConfig, first_stream: int
    ) -> Generator[Token]:
        size = self.tokenizer.vocab_size
        sampler = Sampler(config.sampling(DEFAULT_TEMPERATURE), len(prompts), size)
        sampler.start(config.seed, first_stream, [prompt.ids for prompt in prompts])
        choose: SamplesTokens = sampler
        if config.json_schema is not None:
            from tinylm.generation.json_schema import JSONSampler

            choose = JSONSampler(sampler, config.json_schema, self.tokenizer, [prompt.end_ids for prompt in prompts])
        texts = [prompt.start for prompt in prompts]
        kept_id = self.tokenizer.start_id
        for ids, logits in generate(self.model, texts, choose, config.max_tokens, config.cache, kept_id):
            if not config.logprobs:
                yield from map(Token, range(len(ids)), ids)
                continue
            scores = logits[:, :size].cpu().double().log_softmax(dim=-1)  # (B, V)
            best = (-scores.numpy()).argsort(axis=-1, kind="stable")[:, : config.logprobs]  # of equals, the lower id
            for row, token in enumerate(ids):
                candidates = [Candidate(other, scores[row, other].item()) for other in best[row].tolist()]
                yield Token(row, token, scores[row, token].item(), candidates)


def generate(
    model: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    sampler: SamplesTokens,
    max_tokens: int,
    use_cache: bool = True,
    kept_id: int | None = None,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield one new token per prompt and the logits (B, V) that it was sampled from, `max_tokens` times.

    Prompts have at least one token; their lengths may differ. kept_id: see `window`. The tokens are the same with and
    without the cache, except for rounding.
    """
    texts = [list(prompt) for prompt in prompts]
    slots = min(model.context, max(map(len, texts)) + max_tokens)
    window_starts: list[int] | None = None  # before the first token
    cache: Sequence[Any] | None = None
    for _ in range(max_tokens):
        # Compute the last token of each text; at first, and for all texts when the window of one advances, all tokens
        advanced = [window_start(len(text), model.context) for text in texts]
        if use_cache and advanced == window_starts:
            ids = torch.tensor([[text[-1]] for text in texts])  # (B, 1)
        else:
            ids, padding = left_padded(texts, model.context, kept_id)
            cache = model.make_cache(len(texts), slots, padding) if use_cache or padding is not None else None
            window_starts = advanced
        logits = model.last_logits(ids, cache)
        if len(logits) < len(texts):
            logits = logits.expand(len(texts), -1)

        # Sample
        tokens = sampler(logits)
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        yield tokens, logits


def left_padded(texts: list[list[int]], context: int, kept_id: int | None) -> tuple[Tensor, Tensor | None]:
    """The windows as one left-padded batch (B, T), and the padding per row (B,), or `None` without padding.

    Equal windows, as of the samples of a prompt, are one row (1, T), which is processed once.
    """
    rows = [window(text, context, kept_id) for text in texts]
    if all(row == rows[0] for row in rows):
        return torch.tensor(rows[:1]), None
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    ids = torch.tensor([[0] * pad + row for pad, row in zip(padding, rows, strict=True)])
    return ids, torch.tensor(padding) if any(padding) else None
