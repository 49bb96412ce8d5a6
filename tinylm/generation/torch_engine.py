"""Autoregressive generation in torch: predict, sample, append, repeat.

Sampling of the next token has functions of logits (B, V), and the Sampler that applies them in order.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tinylm.errors import TinyLMError
from tinylm.generation.engine import Candidate, Engine, Token, mix, sample_seed, window, window_start
from tinylm.generation.generation_config import DEFAULT_TEMPERATURE, GenerationConfig, SamplingConfig
from tinylm.generation.prompts import EncodedPrompt
from tinylm.text.tokenizer import Tokenizer

UNIFORM_BLOCK = 64  # uniform numbers of a row that are generated, and copied to the device, at a time
PART_LOGITS = 1 << 20  # of the rows that are sampled at a time, which bounds the memory
MAX_UNIFORM = 1 - 2**-52  # a double times this number is less than itself


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by the penalty, and multiply negative ones by it (Keskar et al. 2019).

    (B, V) -> (B, V). seen: (B, V), True for the tokens that occur in each row's text.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all but the k largest logits to -inf; ties with the k-th stay. (B, V) -> (B, V)"""
    kth_largest = logits.topk(min(k, logits.shape[1])).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < kth_largest, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens with total probability p or more (Holtzman et al. 2020).

    (B, V) -> (B, V), with -inf for all other tokens. Of equally likely tokens, those with the lowest ids are kept.
    """
    if logits.device.type == "cpu":  # where torch takes more than ten times as long to sort 50,000 numbers
        ordered = torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)
    else:
        ordered = logits.sort(dim=-1, descending=True).values
    # The place of the last one to keep
    last = (ordered.softmax(dim=-1).cumsum(dim=-1) < p).sum(dim=-1, keepdim=True)  # (B, 1)
    last.clamp_(max=logits.shape[1] - 1)  # if rounding leaves the total probability below p
    least = ordered.gather(1, last)  # (B, 1)
    ties = logits == least
    places = (logits > least).sum(dim=-1, keepdim=True) + ties.cumsum(dim=-1) - 1  # (B, V), of the ties
    return logits.masked_fill((logits < least) | (ties & (places > last)), -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Set the logits of tokens less than p times as likely as the most likely one to -inf (Nguyen et al. 2024).

    (B, V) -> (B, V)
    """
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling: the first token at which the cumulative probability exceeds the row's uniform number.

    weights: (B, V), in proportion to the probabilities. uniform: (B, 1), numbers from 0 to MAX_UNIFORM, in float64.
    Returns ids (B, 1); if weights are NaN, any.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)  # (B, V)
    ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return ids.clamp_(max=weights.shape[1] - 1)


def require_finite(logits: Tensor) -> None:
    """Raise TinyLMError for a row of logits with NaN or +inf, or with only -inf: (B, V)."""
    if not logits.amax(dim=-1).isfinite().all():  # the maximum of a row with NaN is NaN
        raise TinyLMError(
            "The model's logits are not finite numbers: some weights are too large for the number format of the "
            "computation. Try `dtype` fp32."
        )


class Sampler:
    """Samples one token per row, after `start`. `sample` has operations of fixed shapes, which a CUDA graph can hold.

    Row i draws from the random stream (seed, first_stream + i), whatever the number of rows. Ids of `vocab_size` and
    above, which are padding rows of the embedding, are never sampled.
    """

    def __init__(
        self, sampling: SamplingConfig, rows: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.sampling, self.vocab_size = sampling, vocab_size
        self._streams: list[torch.Generator] = []
        self._left = 0  # numbers per row that are not used yet
        self._is_checked = False
        is_repeat_penalised = sampling.repeat_penalty != 1
        with torch.inference_mode(False):  # otherwise, the tensors could be changed in this mode only
            self._numbers = torch.zeros(rows, UNIFORM_BLOCK, dtype=torch.float64, device=device)
            self._next = torch.zeros(1, dtype=torch.long, device=device)  # column of the next numbers
            self._seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device) if is_repeat_penalised else None

    def start(self, seed: int, first_stream: int = 0) -> None:
        """Begin the random streams. A stream consists of the numbers of `torch.rand` in float64."""
        seeds = [mix(sample_seed(seed, first_stream + row), 0) for row in range(len(self._numbers))]
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._left = 0

    def see(self, windows: Sequence[Sequence[int]]) -> None:
        """Mark the tokens of each row's context window as seen, and no others, for the repeat penalty."""
        if self._seen is not None:
            self._seen.zero_()
            for row, ids in enumerate(windows):
                self._seen[row, list(ids)] = True

    def __call__(self, logits: Tensor, part_logits: int = PART_LOGITS) -> list[int]:
        """Logits (B, V) -> a token id per row.

        part_logits: the most that are sampled at a time, of at least one row.

        Raises TinyLMError if, at the first call, a row contains NaN or +inf, or only -inf.
        """
        logits = logits.to(self._numbers.device)
        if not self._is_checked:
            require_finite(logits[:, : self.vocab_size])
            self._is_checked = True
        self.prepare()
        count = max(1, part_logits // self.vocab_size)
        parts = [slice(first, first + count) for first in range(0, len(logits), count)]
        ids = torch.cat([self._choose(logits[rows], rows) for rows in parts])
        self._next += 1
        return ids.flatten().tolist()

    def prepare(self) -> None:
        """Make sure that the device has a random number for the next token of each row."""
        if self.sampling.temperature == 0:
            return
        if not self._left:
            rows = [torch.rand(UNIFORM_BLOCK, generator=stream, dtype=torch.float64) for stream in self._streams]
            self._numbers.copy_(torch.stack(rows).clamp_(max=MAX_UNIFORM))
            self._next.zero_()
            self._left = UNIFORM_BLOCK
        self._left -= 1

    def sample(self, logits: Tensor) -> Tensor:
        """A token per row, by the numbers that `prepare` has made: (B, V) -> (B, 1)."""
        ids = self._choose(logits, slice(None))
        self._next += 1
        return ids

    def _choose(self, logits: Tensor, rows: slice) -> Tensor:
        """A token for each of these rows, whose logits are given: (R, V) -> (R, 1)."""
        sampling, logits = self.sampling, logits[:, : self.vocab_size].float()
        seen = None if self._seen is None else self._seen[rows]
        if seen is not None:
            logits = penalise_repeats(logits, seen, sampling.repeat_penalty)
        if sampling.temperature == 0:
            ids = logits.argmax(dim=-1, keepdim=True)
        else:
            logits = logits / max(sampling.temperature, 1e-30)  # which is not 0 in fp32
            if sampling.top_k:
                logits = keep_top_k(logits, sampling.top_k)
            if sampling.top_p < 1:
                logits = keep_top_p(logits, sampling.top_p)
            if sampling.min_p:
                logits = keep_min_p(logits, sampling.min_p)
            ids = draw(logits.softmax(dim=-1), self._numbers[rows].index_select(1, self._next))
        if seen is not None:
            seen.scatter_(1, ids, True)
        return ids


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
        sampler.start(config.seed, first_stream)
        choose: SamplesTokens = sampler
        if config.json_schema is not None:
            from tinylm.generation.json_schema import JSONSampler

            choose = JSONSampler(sampler, config.json_schema, self.tokenizer, [prompt.end_ids for prompt in prompts])
        texts = [prompt.start for prompt in prompts]
        kept_id = self.tokenizer.start_id
        for ids, logits in generate(self.model, texts, choose, config.max_tokens, config.cache, kept_id, sampler.see):
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
    see: Callable[[list[list[int]]], None] = lambda windows: None,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield one new token per prompt and the logits (B, V) that it was sampled from, `max_tokens` times.

    Prompts have at least one token; their lengths may differ. The tokens are the same with and without the cache,
    except for rounding.

    kept_id: see `window`. see: called with the windows of all texts at first, and when one advances
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
            windows = [window(text, model.context, kept_id) for text in texts]
            see(windows)
            ids, padding = left_padded(windows)
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


def left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
    """The rows as one left-padded batch (B, T), and the padding per row (B,), or `None` without padding.

    Equal rows, as of the samples of a prompt, are one row (1, T), which is processed once.
    """
    if all(row == rows[0] for row in rows):
        return torch.tensor(rows[:1]), None
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    ids = torch.tensor([[0] * pad + row for pad, row in zip(padding, rows, strict=True)])
    return ids, torch.tensor(padding) if any(padding) else None
