"""Targets from sources with an encoder-decoder: drawn token by token, or searched for with beams."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinylm.checks import check_numbers
from tinylm.inference.generator import generate
from tinylm.inference.sampler import Sampler, Sampling
from tinylm.model.block import Memory
from tinylm.model.cache import Cache, CrossCache
from tinylm.model.encoder_decoder import EncoderDecoder

SOURCES_AT_ONCE = 32


def padded_sources(sources: Sequence[Sequence[int]], end: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sources, each with the end of text after it, as (B, S), and their lengths (B,)."""
    lengths = [len(source) + 1 for source in sources]
    rows = [[*source, *[end] * (max(lengths) - len(source))] for source in sources]
    return torch.tensor(rows, device=device), torch.tensor(lengths, device=device)


class Conditioned:
    """An encoder-decoder that looks at fixed sources, one a row: to the generator it is a decoder."""

    def __init__(self, model: EncoderDecoder, memory: Memory) -> None:
        self._model = model
        self._memory = memory
        self._cross_cache: list[CrossCache] = []

    @property
    def context(self) -> int:
        return self._model.context

    @property
    def device(self) -> torch.device:
        return self._model.device

    def last_logits(self, ids: Tensor, cache: Sequence[Cache] | None, count: int) -> Tensor:
        """(B, T) -> (B, count, V)"""
        output = self._model.decode(ids, self._memory, cache, self._cross_cache if cache else None)
        return self._model.logits(output.hidden[:, -count:])

    def reorder(self, rows: Tensor, cache: Sequence[Cache], sources_too: bool) -> None:
        """Let row b go on from row rows[b]; where a row stays with its source, what is known of sources may stay."""
        for one in cache:
            one.reorder(rows)
        if sources_too:
            for cross in self._cross_cache:
                cross.reorder(rows)
            hidden, mask = self._memory
            self._memory = Memory(hidden[rows], None if mask is None else mask[rows])

    def make_cache(self, batch: int, length: int, starts: Tensor | None = None) -> list[Cache]:
        self._cross_cache = self._model.make_cross_cache()
        return self._model.make_cache(batch, length, starts)


@torch.inference_mode()
def condition(model: EncoderDecoder, sources: Sequence[Sequence[int]], end: int, times: int = 1) -> Conditioned:
    """Read each source once, for so many rows that look at it."""
    (hidden, mask), _ = model.encode(*padded_sources(sources, end, model.device))
    if mask is not None:
        mask = mask.repeat_interleave(times, dim=0)
    return Conditioned(model, Memory(hidden.repeat_interleave(times, dim=0), mask))


@dataclass(frozen=True)
class Found:
    """A target without its end, its score, and whether it came to an end."""

    tokens: list[int]
    score: float
    ended: bool


@dataclass(frozen=True)
class Search:
    """How to search for a target: with so many open hypotheses, and how much longer ones are preferred (0: not)."""

    beams: int = 1
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raises UsageError for a value out of range."""
        check_numbers(vars(self))


class _Search:
    """The hypotheses for one source: `beams` open ones, of which a total of -inf marks those that are none."""

    def __init__(self, beams: int, end: int, length_penalty: float) -> None:
        self._beams = beams
        self._end = end
        self._length_penalty = length_penalty
        self._open: list[list[int]] = [[]] * beams
        self._ended: list[Found] = []
        self.totals = [0.0] + [-math.inf] * (beams - 1)
        self.parents: list[int] = []
        self.last: list[int] = []

    def grow(self, candidates: list[tuple[float, int, int]]) -> None:
        """Take the best continuations, best first: total log probability, number of the open hypothesis, token."""
        candidates = [candidate for candidate in candidates if candidate[0] > -math.inf]
        for total, parent, token in candidates[: self._beams]:
            if token == self._end:
                self._ended.append(self._found(self._open[parent], total, ended=True))
        going = [candidate for candidate in candidates if candidate[2] != self._end][: self._beams]
        going += [(-math.inf, 0, self._end)] * (self._beams - len(going))
        self._open = [[*self._open[parent], token] for _, parent, token in going]
        self.totals, self.parents, self.last = ([*column] for column in zip(*going, strict=True))

    @property
    def done(self) -> bool:
        likeliest = max(self.totals)
        if likeliest == -math.inf:
            return True
        if len(self._ended) < self._beams:
            return False
        return max(found.score for found in self._ended) >= self._score(likeliest, len(self._open[0]))

    def best(self) -> Found:
        """Of those that came to an end, if any did."""
        going = [self._found(tokens, total, ended=False) for tokens, total in zip(self._open, self.totals, strict=True)]
        return max(self._ended or going, key=lambda found: found.score)

    def _found(self, tokens: list[int], total: float, ended: bool) -> Found:
        return Found(tokens, self._score(total, len(tokens) + ended), ended)

    def _score(self, total: float, length: int) -> float:
        return total / ((5 + length) / 6) ** self._length_penalty


@torch.inference_mode()
def beam_search(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    end: int,
    *,
    beams: int = 1,
    length_penalty: float = 1.0,
    max_tokens: int,
) -> list[Found]:
    """The best target found for each source by sum log p / ((5 + length) / 6)^penalty (Wu et al. 2016), where the
    length counts the end.

    At each step every open hypothesis grows by every token. Those among the `beams` best that end are finished; the
    best `beams` that have not ended stay open, until so many have finished and the best of those scores no less than
    the best open one does so far: unlikely short ones would else end a search. One beam is greedy decoding.
    """
    searches = [_Search(beams, end, length_penalty) for _ in sources]
    going = list(searches)
    conditioned = condition(model, sources, end, times=beams)
    device = conditioned.device
    cache = conditioned.make_cache(len(sources) * beams, max_tokens)
    last = torch.full((len(sources) * beams, 1), end, device=device)  # a target begins with the end of text
    for _ in range(max_tokens):
        logits = conditioned.last_logits(last, cache, 1)[:, -1].float()  # (B*K, V)
        totals = torch.tensor([search.totals for search in going], device=device).unsqueeze(2)  # (B, K, 1)
        grown = totals + logits.log_softmax(dim=-1).unflatten(0, (len(going), beams))  # (B, K, V)
        vocab_size = grown.shape[2]
        best, places = grown.flatten(1).topk(min(2 * beams, beams * vocab_size))  # (B, 2K)
        for search, scores, at in zip(going, best.tolist(), places.tolist(), strict=True):
            search.grow([(score, *divmod(place, vocab_size)) for score, place in zip(scores, at, strict=True)])
        rows = [
            index * beams + parent for index, search in enumerate(going) if not search.done for parent in search.parents
        ]
        some_are_done = len(rows) < len(going) * beams
        going = [search for search in going if not search.done]
        if not going:
            break
        conditioned.reorder(torch.tensor(rows, device=device), cache, sources_too=some_are_done)
        last = torch.tensor([[token] for search in going for token in search.last], device=device)
    return [search.best() for search in searches]


def find_targets(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    end: int,
    search: Search,
    max_tokens: int,
) -> Iterator[Found]:
    """The best target of each of any number of sources, in order. An empty source has an empty target."""
    for first in range(0, len(sources), SOURCES_AT_ONCE):
        part = sources[first : first + SOURCES_AT_ONCE]
        full = [source for source in part if source]
        found: Iterator[Found] = iter(())
        if full:
            found = iter(beam_search(model, full, end, **vars(search), max_tokens=max_tokens))
        for source in part:
            yield next(found) if source else Found([], 0.0, ended=True)


def draw_targets(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    end: int,
    sampling: Sampling,
    num_samples: int,
    seed: int,
    first: int,
    max_tokens: int,
) -> Iterator[Found]:
    """Targets drawn token by token, `num_samples` of each source, with nan for a score.

    Target i, counted from `first`, draws from (seed, i).
    """
    for number, source in enumerate(sources):
        numbered_from = first + number * num_samples
        sampler = Sampler(sampling, seed, num_samples, model.device, model.vocab_size, numbered_from)
        rows: list[list[int]] = [[] for _ in range(num_samples)]
        ended = [not source] * num_samples
        begun = [[end]] * num_samples
        for tokens in generate(condition(model, [source], end, num_samples), begun, sampler, max_tokens):
            for row, token in enumerate(tokens):
                ended[row] = ended[row] or token == end
                if not ended[row]:
                    rows[row].append(token)
            if all(ended):
                break
        for row_tokens, done in zip(rows, ended, strict=True):
            yield Found(row_tokens, math.nan, done)
