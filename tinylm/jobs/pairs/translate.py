"""Translation with an encoder-decoder: a target for each source, by beam search or sampling."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinylm.errors import UsageError
from tinylm.generation.engine import sample_seed
from tinylm.generation.generation_config import BeamSearchConfig, GenerationConfig, is_sampled
from tinylm.generation.prompts import Prompt, drop_unknown
from tinylm.generation.text_generator import Sample
from tinylm.generation.torch_engine import Sampler, generate
from tinylm.jobs.pairs.corpus import pad_rows
from tinylm.reporter import Reporter
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import EncoderDecoder
from tinylm.transformer.attention import Cache, CrossCache
from tinylm.transformer.blocks import Memory


@dataclass(frozen=True)
class Hypothesis:
    """A generated target.

    tokens: ids, without the end-of-text token. score: length-normalised log-likelihood; nan if the target was sampled.
    ended: whether the target ended with the end-of-text token, rather than at the maximum number of tokens.
    """

    tokens: list[int]
    score: float
    ended: bool


class ConditionedDecoder:
    """The decoder of an encoder-decoder, conditioned on one encoded source per row. Implements `NextTokenModel`."""

    def __init__(self, model: EncoderDecoder, memory: Memory) -> None:
        self._model = model
        self._memory = memory
        self._cross_cache: list[CrossCache] = []

    @property
    def context(self) -> int:
        """Context length in tokens."""
        return self._model.context

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._model.device

    def make_cache(self, batch: int, length: int, starts: Any | None = None) -> list[Cache]:
        """Empty caches; those for cross-attention are kept here."""
        self._cross_cache = self._model.make_cross_cache()
        return self._model.make_cache(batch, length, starts)

    @torch.inference_mode()
    def last_logits(self, ids: Any, cache: Sequence[Cache] | None) -> Tensor:
        """(B, T) -> (B, V)."""
        ids = torch.as_tensor(ids, device=self.device).expand(len(self._memory.hidden), -1)  # (B, T)
        output = self._model.decode(ids, self._memory, cache, self._cross_cache if cache else None)
        return self._model.logits(output.hidden[:, -1])

    def reorder(self, rows: Tensor, cache: Sequence[Cache], reorder_sources: bool) -> None:
        """Replace row b of the caches and encoded sources by row rows[b]. rows: (B',).

        With `reorder_sources=False`, for rows that keep their sources, only the self-attention caches are reordered.
        """
        for layer in cache:
            layer.reorder(rows)
        if reorder_sources:
            for cross in self._cross_cache:
                cross.reorder(rows)
            hidden, mask = self._memory
            self._memory = Memory(hidden[rows], None if mask is None else mask[rows])


@torch.inference_mode()
def encode_sources(
    model: EncoderDecoder, sources: Sequence[Sequence[int]], end_of_text_id: int, repeats: int = 1
) -> ConditionedDecoder:
    """Encode each source once. The returned decoder has `repeats` consecutive rows per source."""
    ids, lengths = pad_rows([np.array([*source, end_of_text_id]) for source in sources], end_of_text_id)  # (B, S), (B,)
    (hidden, mask), _ = model.encode(ids.to(model.device), lengths.to(model.device))
    if mask is not None:
        mask = mask.repeat_interleave(repeats, dim=0)
    return ConditionedDecoder(model, Memory(hidden.repeat_interleave(repeats, dim=0), mask))


class _Beam:
    """The hypotheses of one source: `beams` slots for open hypotheses, and a list of ended ones.

    totals, parents and last_tokens have an entry per slot: the log-likelihood (-inf for an empty slot), the slot of the
    hypothesis before the last step, and the last token.
    """

    def __init__(self, config: BeamSearchConfig, end_of_text_id: int) -> None:
        self._config = config
        self._end_of_text_id = end_of_text_id
        self._open: list[list[int]] = [[]] * config.beams
        self._ended: list[Hypothesis] = []
        self.totals = [0.0] + [-math.inf] * (config.beams - 1)
        self.parents: list[int] = []
        self.last_tokens: list[int] = []

    def extend(self, candidates: list[tuple[float, int, int]]) -> None:
        """Replace the open hypotheses by the best candidates, and store those of the best that end.

        candidates: (log-likelihood, parent's slot, new token), best first.
        """
        beams = self._config.beams
        candidates = [candidate for candidate in candidates if candidate[0] > -math.inf]
        for total, parent, token in candidates[:beams]:
            if token == self._end_of_text_id:
                self._ended.append(self._hypothesis(self._open[parent], total, ended=True))
        kept = [candidate for candidate in candidates if candidate[2] != self._end_of_text_id][:beams]
        kept += [(-math.inf, 0, self._end_of_text_id)] * (beams - len(kept))
        self._open = [[*self._open[parent], token] for _, parent, token in kept]
        self.totals, self.parents, self.last_tokens = ([*column] for column in zip(*kept, strict=True))

    @property
    def done(self) -> bool:
        """Whether no hypothesis is open, or at least `beams` have ended and no open one has a better score."""
        best_total = max(self.totals)
        if best_total == -math.inf:
            return True
        if len(self._ended) < self._config.beams:
            return False
        return max(hypothesis.score for hypothesis in self._ended) >= self._score(best_total, len(self._open[0]))

    def best(self) -> Hypothesis:
        """The ended hypothesis with the best score, or the best open one if none has ended."""
        open_ = (
            self._hypothesis(tokens, total, ended=False) for tokens, total in zip(self._open, self.totals, strict=True)
        )
        return max(self._ended or open_, key=lambda hypothesis: hypothesis.score)

    def _hypothesis(self, tokens: list[int], total: float, ended: bool) -> Hypothesis:
        return Hypothesis(tokens, self._score(total, len(tokens) + ended), ended)

    def _score(self, total: float, length: int) -> float:
        """Length-normalised log-likelihood; see `beam_search`."""
        return total / ((5 + length) / 6) ** self._config.length_penalty


@torch.inference_mode()
def beam_search(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    end_of_text_id: int,
    config: BeamSearchConfig,
    max_tokens: int,
) -> list[Hypothesis]:
    """The best target found for each source, by the score sum log p / ((5 + length) / 6)^length_penalty (Wu et al.
    2016), where the length includes the end-of-text token. Targets have at most `max_tokens` tokens.

    Each step extends every open hypothesis by every token. With N beams, the extensions among the N best that end with
    the end-of-text token are stored, and the N best other extensions stay open. The search of a source stops when N
    hypotheses have ended and the best of them scores no less than the best open one; stopping at the first ended
    hypothesis would favour short, unlikely targets. One beam is greedy decoding.
    """
    width = config.beams  # N
    source_beams = [_Beam(config, end_of_text_id) for _ in sources]
    active = list(source_beams)
    decoder = encode_sources(model, sources, end_of_text_id, repeats=width)
    device = decoder.device
    cache = decoder.make_cache(len(sources) * width, max_tokens)
    # The decoder's input starts with the end-of-text token, as in training.
    last_tokens = torch.full((len(sources) * width, 1), end_of_text_id, device=device)  # (B*N, 1)
    for _ in range(max_tokens):
        logits = decoder.last_logits(last_tokens, cache).float()  # (B*N, V)
        totals = torch.tensor([beam.totals for beam in active], device=device).unsqueeze(2)  # (B, N, 1)
        extended = totals + logits.log_softmax(dim=-1).unflatten(0, (len(active), width))  # (B, N, V)
        vocab_size = extended.shape[2]
        best, indices = extended.flatten(1).topk(min(2 * width, width * vocab_size))  # (B, 2N) each
        for beam, row_totals, row_indices in zip(active, best.tolist(), indices.tolist(), strict=True):
            candidates = zip(row_totals, row_indices, strict=True)
            beam.extend([(total, *divmod(index, vocab_size)) for total, index in candidates])
        rows = [row * width + parent for row, beam in enumerate(active) if not beam.done for parent in beam.parents]
        some_are_done = len(rows) < len(active) * width
        active = [beam for beam in active if not beam.done]
        if not active:
            break
        decoder.reorder(torch.tensor(rows, device=device), cache, reorder_sources=some_are_done)
        last_tokens = torch.tensor([[token] for beam in active for token in beam.last_tokens], device=device)
    return [beam.best() for beam in source_beams]


SOURCES_PER_BATCH = 32


def translate(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    prompt: Prompt,
    reporter: Reporter,
    first_stream: int = 0,
) -> Iterator[Sample]:
    """Yield the target of each line of the prompt, in order, by beam search. With a temperature above 0, yield
    `num_samples` sampled targets of each line; target i in this order has the random stream (seed, first_stream + i).
    An empty single prompt has no lines.

    Raises UsageError for a character that is not in the vocabulary, unless the prompt's settings skip it, and if they
    are strict for a source longer than the context.
    """
    config, sampled = prompt.config, is_sampled(prompt.config)
    texts = prompt.text.split("\n") if prompt.text or prompt.location else []
    where = f" of {prompt.location}" if prompt.location else ""
    names = [f"Source {number}{where}" for number in range(1, len(texts) + 1)]
    if prompt.location and len(texts) == 1:
        names = [prompt.location]
    lines = [
        drop_unknown(text.strip(), tokenizer, config, name, reporter).strip()
        for text, name in zip(texts, names, strict=True)
    ]
    sources = [[int(i) for i in tokenizer.encode(line)] for line in lines]
    for name, source in zip(names, sources, strict=True):
        if len(source) + 1 > model.context:
            message = f"{name} has {len(source)} tokens, more than the {model.context - 1} that fit the context"
            if config.strict:
                raise UsageError(f"{message}; shorten it, or leave out `strict` to use its first tokens.")
            reporter.warn(f"{message}: only the first are used.")
    sources = [source[: model.context - 1] for source in sources]
    if sampled:
        reporter.note(f"Seed {config.seed}.")
        targets = sample_targets(model, sources, tokenizer.end_of_text_id, config, first_stream)
    else:
        max_tokens = min(config.max_tokens, model.context)
        targets = search_targets(model, sources, tokenizer.end_of_text_id, config, max_tokens)
    repeats = config.num_samples if sampled else 1
    for number, (line, target) in enumerate(
        zip((line for line in lines for _ in range(repeats)), targets, strict=True)
    ):
        text = tokenizer.decode(target.tokens)
        stops = [index for stop in config.stop if (index := text.find(stop)) >= 0]
        text = text[: min(stops)] if stops else text
        reason = "stop" if stops else "end" if target.ended else "length"
        score = None if math.isnan(target.score) else target.score
        seed = sample_seed(config.seed, first_stream + number) if sampled else config.seed
        yield Sample(line, text, len(target.tokens) + target.ended, seed, reason, score)


def search_targets(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    end_of_text_id: int,
    search: BeamSearchConfig,
    max_tokens: int,
) -> Iterator[Hypothesis]:
    """Yield the target of each source by beam search, in order. An empty source has an empty target."""
    for first in range(0, len(sources), SOURCES_PER_BATCH):
        batch = sources[first : first + SOURCES_PER_BATCH]
        nonempty = [source for source in batch if source]
        found: Iterator[Hypothesis] = iter(())
        if nonempty:
            found = iter(beam_search(model, nonempty, end_of_text_id, search, max_tokens))
        for source in batch:
            yield next(found) if source else Hypothesis([], 0.0, ended=True)


def sample_targets(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    end_of_text_id: int,
    config: GenerationConfig,
    first_stream: int,
) -> Iterator[Hypothesis]:
    """Yield `num_samples` sampled targets of each source, in order. An empty source has empty targets.

    Target i in this order has the random stream (seed, first_stream + i).
    """
    rows, max_tokens = config.num_samples, min(config.max_tokens, model.context)
    for number, source in enumerate(sources):
        sampler = Sampler(config.sampling(default_temperature=0.0), rows, model.vocab_size)
        sampler.start(config.seed, first_stream + number * rows)
        targets: list[list[int]] = [[] for _ in range(rows)]
        ended = [not source] * rows
        decoder = encode_sources(model, [source], end_of_text_id, rows)
        for tokens, _ in generate(decoder, [[end_of_text_id]] * rows, sampler, max_tokens):
            for row, token in enumerate(tokens):
                ended[row] = ended[row] or token == end_of_text_id
                if not ended[row]:
                    targets[row].append(token)
            if all(ended):
                break
        for target, done in zip(targets, ended, strict=True):
            yield Hypothesis(target, math.nan, done)
