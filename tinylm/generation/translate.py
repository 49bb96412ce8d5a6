"""Translation with an encoder-decoder: a target for each source, by beam search or sampling."""

import math
from collections.abc import Iterator, Sequence

from tinylm.errors import UsageError
from tinylm.generation.beam_search import Hypothesis, beam_search, encode_sources
from tinylm.generation.continuation import Sample
from tinylm.generation.generation_config import BeamSearchConfig, GenerationConfig, PromptPolicy, is_sampled
from tinylm.generation.generator import generate
from tinylm.generation.prompts import Prompt, drop_unknown
from tinylm.generation.sampler import Sampler, sample_seed
from tinylm.reporter import Reporter
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.encoder_decoder import EncoderDecoder

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
    names = _source_names(prompt, len(texts))
    lines = [
        drop_unknown(text.strip(), tokenizer, config, name, reporter).strip()
        for text, name in zip(texts, names, strict=True)
    ]
    sources = [[int(i) for i in tokenizer.encode(line)] for line in lines]
    for name, source in zip(names, sources, strict=True):
        _check_length(name, source, model.context, config, reporter)
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
        yield Sample(line, text, len(target.tokens), seed, reason, score)


def _source_names(prompt: Prompt, count: int) -> list[str]:
    """The names of the sources of a prompt in messages."""
    if prompt.location and count == 1:
        return [prompt.location]
    where = f" of {prompt.location}" if prompt.location else ""
    return [f"Source {number}{where}" for number in range(1, count + 1)]


def _check_length(name: str, source: list[int], context: int, policy: PromptPolicy, reporter: Reporter) -> None:
    """Warn about a source that, with its end-of-text token, is longer than the context. Raises UsageError instead if
    the policy is strict.
    """
    if len(source) + 1 > context:
        message = f"{name} has {len(source)} tokens, more than the {context - 1} that fit the context"
        if policy.strict:
            raise UsageError(f"{message}; shorten it, or leave out `strict` to use its first tokens.")
        reporter.warn(f"{message}: only the first are used.")


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
        sampling = config.sampling(default_temperature=0.0)
        stream = first_stream + number * rows
        sampler = Sampler(sampling, config.seed, rows, model.vocab_size, stream)
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
