"""Text generation with a decoder: samples that continue a prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinylm.generation.generated_text import Sample
from tinylm.generation.generation_config import DEFAULT_TEMPERATURE, GenerationConfig
from tinylm.generation.generator import NextTokenModel, generate
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.sampler import Sampler, sample_seed
from tinylm.generation.speculative import DraftModel, generate_speculatively
from tinylm.generation.text_stream import TextStream
from tinylm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenGenerator:
    """A decoder with its generation settings: the draft model, if any, and whether to use the KV cache.

    prompts: token ids per sample, used instead of the prompt of `tokens`; not with a draft model.
    """

    model: NextTokenModel
    draft: DraftModel | None
    use_cache: bool
    prompts: Sequence[Sequence[int]] | None = None

    def tokens(
        self, prompt: Sequence[int], sampler: Sampler, num_samples: int, max_tokens: int, bos_id: int | None
    ) -> Iterator[list[int]]:
        """Yield the next token of each sample, `max_tokens` times. A draft model needs a single sample.

        bos_id: see `generate`.
        """
        if self.draft is None:
            prompts = [prompt] * num_samples if self.prompts is None else self.prompts
            return generate(self.model, prompts, sampler, max_tokens, self.use_cache, bos_id)
        return generate_speculatively(self.model, prompt, sampler, max_tokens, self.draft, bos_id=bos_id)


class TextChunk(NamedTuple):
    """New text of one sample. sample: index of the sample."""

    sample: int
    text: str


class Continuation:
    """The samples that continue one prompt. Iteration generates the samples and yields their text in chunks.

    prompt: the prompt's text. samples: empty until the iteration has ended.
    """

    def __init__(
        self,
        generator: TokenGenerator,
        tokenizer: Tokenizer,
        prompt: EncodedPrompt,
        config: GenerationConfig,
        first_stream: int,
    ) -> None:
        """first_stream: random stream of the first sample; see `Sampler`."""
        self.prompt = prompt.text
        self.samples: list[Sample] = []
        self._generator = generator
        self._tokenizer = tokenizer
        self._encoded = prompt
        self._config = config
        self._first_stream = first_stream

    def run(self) -> list[Sample]:
        """Generate and return all samples."""
        for _ in self:
            pass
        return self.samples

    def __iter__(self) -> Iterator[TextChunk]:
        config = self._config
        rows = range(config.num_samples)
        sampling = config.sampling(DEFAULT_TEMPERATURE)
        vocab_size = self._tokenizer.vocab_size
        sampler = Sampler(sampling, config.seed, config.num_samples, vocab_size, self._first_stream)
        for row in rows:
            sampler.observe(row, self._encoded.ids)
        start, bos_id = self._encoded.start, self._tokenizer.start_id
        contexts = self._generator.prompts or [start] * config.num_samples
        ends = self._encoded.end_ids, self._encoded.end_texts
        streams = [TextStream(self._tokenizer, config.stop, *ends, context=context) for context in contexts]
        texts = [""] * config.num_samples
        for tokens in self._generator.tokens(start, sampler, config.num_samples, config.max_tokens, bos_id):
            for row, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
                if not stream.finished and (text := stream.push(token)):
                    texts[row] += text
                    yield TextChunk(row, text)
            if all(stream.finished for stream in streams):
                break
        for row, stream in enumerate(streams):
            if text := stream.finish():
                texts[row] += text
                yield TextChunk(row, text)
        self.samples = [
            Sample(
                self.prompt,
                text,
                stream.tokens,
                sample_seed(config.seed, self._first_stream + row),
                stream.finish_reason,
            )
            for row, (text, stream) in enumerate(zip(texts, streams, strict=True))
        ]
