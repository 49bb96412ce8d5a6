"""Text generation with a decoder: samples that continue a prompt, decoded as they grow, with stop sequences."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tinylm.errors import TinyLMError
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.generator import Engine, Token
from tinylm.generation.prompts import EncodedPrompt
from tinylm.text.decoding import stream_decoder
from tinylm.text.tokenizer import Tokenizer


class TextStream:
    """Decodes the tokens of one sample. Text that may start a stop sequence is buffered until the match fails.

    finish_reason: `stop` after a stop sequence, `end` after an end token or an end text, otherwise `length`.
    tokens: number of tokens so far, without an end token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        end_ids: frozenset[int] = frozenset(),
        end_texts: Sequence[str] = (),
        context: Sequence[int] = (),
    ) -> None:
        """end_ids: tokens that end the text, besides those of the tokenizer. end_texts: stop sequences that the model
        writes for lack of an end token. context: the ids before the sample.
        """
        self._decoder = stream_decoder(tokenizer, context)
        self._stop_ids = tokenizer.stop_ids | end_ids
        self._stops = {stop: "stop" for stop in stops if stop} | dict.fromkeys(end_texts, "end")  # with their reasons
        self._buffer = ""
        self.tokens = 0
        self.finish_reason = "length"

    @property
    def finished(self) -> bool:
        """Whether a stop sequence, an end token or an end text has ended the text."""
        return self.finish_reason != "length"

    def push(self, token: int | None) -> str:
        """Decode a token; `None` is an end token. Returns the new text that is final; the rest is buffered."""
        if token is None or token in self._stop_ids:
            self.finish_reason = "end"
            return self._release(self._buffer + self._decoder.finish())
        self.tokens += 1
        return self._release(self._buffer + self._decoder.decode([token]))

    def finish(self) -> str:
        """End the text after the last token. Returns the remaining text, including the buffered text."""
        if self.finished:
            return ""
        text = self._release(self._buffer + self._decoder.finish())
        rest, self._buffer = self._buffer, ""
        return text + rest

    def _release(self, text: str) -> str:
        """The part of `text` (buffered and new) that is final, cut at a stop sequence. The rest is buffered."""
        found = [(index, reason) for stop, reason in self._stops.items() if (index := text.find(stop)) >= 0]
        if found:
            self._buffer = ""
            index, self.finish_reason = min(found)
            return text[:index]
        keep = 0 if self.finish_reason == "end" else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that is a suffix of `text`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Sample:
    """A text that was generated for a prompt.

    prompt: the prompt, without skipped characters; of a chat, the rendered conversation; of a translation, the source.
    text: the generated text, without the prompt.
    tokens: number of generated tokens, without an end token.
    seed: the seed that gives this text as the only sample of the prompt, up to rounding.
    finish_reason: `stop` (a stop sequence), `end` (an end token, or the text that ends an answer in a chat) or
        `length` (`max_tokens`).
    score: length-normalised log-likelihood of a target found by beam search; otherwise `None`.
    logprobs: the tokens with their log-probabilities, if `GenerationConfig.logprobs` is not 0; otherwise `None`.
    """

    prompt: str
    text: str
    tokens: int
    seed: int
    finish_reason: str
    score: float | None = None
    logprobs: list[dict[str, Any]] | None = None


class TextChunk(NamedTuple):
    """New text of one sample. sample: index of the sample."""

    sample: int
    text: str


@dataclass(eq=False)
class Continuation:
    """The samples that continue prompts: `config.num_samples` of one prompt, or one sample of each of several.

    Iteration generates the samples and yields their text in chunks. Raises TinyLMError if the JSON of a schema is not
    complete. first_stream: random stream of the first sample.
    samples: empty until the iteration has ended.
    """

    engine: Engine
    tokenizer: Tokenizer
    prompts: Sequence[EncodedPrompt]
    config: GenerationConfig
    first_stream: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        """The text of the first prompt."""
        return self.prompts[0].text

    def run(self) -> list[Sample]:
        """Generate and return all samples."""
        for _ in self:
            pass
        return self.samples

    def __iter__(self) -> Iterator[TextChunk]:
        config, tokenizer = self.config, self.tokenizer
        prompts = list(self.prompts) * (config.num_samples if len(self.prompts) == 1 else 1)
        is_json = config.json_schema is not None
        streams = [
            TextStream(
                tokenizer,
                config.stop,
                prompt.end_ids,
                () if is_json else prompt.end_texts,
                context=prompt.start,
            )
            for prompt in prompts
        ]
        texts = [""] * len(prompts)
        logprobs: list[list[dict[str, Any]]] = [[] for _ in prompts]
        generated = self.engine.generate(prompts, config, self.first_stream, tokenizer.start_id)
        with contextlib.closing(generated):  # stops the engine as soon as all texts have ended
            for token in generated:
                row, stream = token.row, streams[token.row]
                if not stream.finished:
                    if text := stream.push(token.id):
                        texts[row] += text
                        yield TextChunk(row, text)
                    if config.logprobs and token.id is not None:
                        logprobs[row].append(self._scores(token))
                if all(stream.finished for stream in streams):
                    break
        for row, stream in enumerate(streams):
            if text := stream.finish():
                texts[row] += text
                yield TextChunk(row, text)
        if is_json and not all(stream.finished for stream in streams):
            raise TinyLMError(
                f"The JSON is not complete after {config.max_tokens} tokens: raise `max_tokens`, or limit strings and "
                "lists in the schema (maxLength, maxItems)."
            )
        self.samples = [
            Sample(
                prompt.text,
                texts[row],
                stream.tokens,
                self.engine.sample_seed(config, self.first_stream, row),
                stream.finish_reason,
                logprobs=logprobs[row] if config.logprobs else None,
            )
            for row, (prompt, stream) in enumerate(zip(prompts, streams, strict=True))
        ]

    def _scores(self, token: Token) -> dict[str, Any]:
        """A token with its candidates, as in the JSON output."""

        def scored(id: int, logprob: float | None) -> dict[str, Any]:
            return {"id": id, "token": self.tokenizer.decode([id]), "logprob": logprob}

        top = [scored(*candidate) for candidate in token.candidates]
        assert token.id is not None
        return scored(token.id, token.logprob) | {"top": top}
