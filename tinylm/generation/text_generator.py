"""Models that continue a prompt or a conversation with an engine: the model, its samples and a chat session.

The samples are decoded as they grow, and end at stop sequences.
"""

import contextlib
import functools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tinylm.config.run import DataConfig, RunConfig
from tinylm.config.validation import require
from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.engine import Engine
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import EncodedPrompt, Prompt, encode_conversation, encode_prompt
from tinylm.reporter import LogReporter, Reporter
from tinylm.text.chat import Conversation
from tinylm.text.chat_format import ChatFormat, chat_format, read_template
from tinylm.text.decoding import TokenTexts, stream_decoder
from tinylm.text.tokenizer import Tokenizer


class TextStream:
    """Decodes the tokens of one sample. Text that may start a stop sequence is buffered until the match fails.

    finish_reason: `stop` after a stop sequence, `end` after an end token or an end text, otherwise `length`.
    tokens: number of tokens so far, with the end token.
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
        """Decode a token; `None` is the end of a text whose end token the engine does not report. Returns the new text
        that is final; the rest is buffered.
        """
        self.tokens += token is not None
        if token is None or token in self._stop_ids:
            self.finish_reason = "end"
            return self._release(self._buffer + self._decoder.finish())
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
        # The longest end of the text with which a stop sequence begins
        begun = [n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])]
        end = len(text) - (0 if self.finish_reason == "end" else max(begun, default=0))
        self._buffer = text[end:]
        return text[:end]


@dataclass(frozen=True)
class Sample:
    """A text that was generated for a prompt.

    prompt: the prompt, without skipped characters; of a chat, the rendered conversation; of a translation, the source.
    text: the generated text, without the prompt.
    tokens: number of generated tokens, with an end token, as `evaluate` counts them.
    seed: the seed that gives this text as the only sample of the prompt, up to rounding.
    finish_reason: `stop` (a stop sequence), `end` (an end token, or the text that ends an answer in a chat) or
        `length` (`max_tokens`).
    score: length-normalised log-likelihood of a target found by beam search; otherwise `None`.
    logprobs: all `tokens` with their log-probabilities, if `GenerationConfig.logprobs` is not 0; otherwise `None`.
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
            TextStream(tokenizer, config.stop, prompt.end_ids, () if is_json else prompt.end_texts, prompt.start)
            for prompt in prompts
        ]
        texts = [""] * len(prompts)
        logprobs: list[list[dict[str, Any]]] = [[] for _ in prompts]
        generated = self.engine.generate(prompts, config, self.first_stream)
        with contextlib.closing(generated):  # stops the engine as soon as all texts have ended
            for token in generated:
                row, stream = token.row, streams[token.row]
                if not stream.finished:
                    if text := stream.push(token.id):
                        texts[row] += text
                        yield TextChunk(row, text)
                    if config.logprobs and token.id is not None:
                        top = [self._scored(*candidate) for candidate in token.candidates]
                        logprobs[row].append(self._scored(token.id, token.logprob) | {"top": top})
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

    @functools.cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def _scored(self, id: int, logprob: float | None) -> dict[str, Any]:
        """A token as in the JSON output."""
        return {"id": id, "token": self._token_texts.text(id), "logprob": logprob}


@dataclass(eq=False, kw_only=True)
class TextGenerator:
    """A model with its tokenizer and its engine. The methods that generate text are for decoders.

    data: description of the text that the model was trained on; `None` if it is not recorded.
    """

    config: RunConfig
    tokenizer: Tokenizer
    engine: Engine
    reporter: Reporter = field(default_factory=LogReporter)
    data: DataConfig | None = field(init=False)

    def __post_init__(self) -> None:
        self.data = self.config.data

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    @property
    def architecture(self) -> str:
        """decoder, encoder or encoder-decoder."""
        return self.config.model.architecture

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a classifier; empty for other models."""
        return self.config.labels

    @property
    def context(self) -> int:
        """Context length in tokens."""
        return self.config.model.context

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; `None` without one."""
        return self.config.tokenizer.chat_template

    def continue_encoded(self, encoded: EncodedPrompt, config: GenerationConfig, first_stream: int = 0) -> Continuation:
        """The samples that continue an encoded prompt, such as a conversation."""
        return Continuation(self.engine, self.tokenizer, [encoded], config, first_stream)

    def continue_prompt(self, prompt: Prompt, first_stream: int = 0) -> Continuation:
        """The samples that continue a prompt, which iteration over the result generates.

        Sample i has the random stream (seed, first_stream + i). Raises UsageError for a prompt that cannot be used.
        """
        encoded = encode_prompt(prompt, self.tokenizer, self.context, self.data, self.reporter)
        self.reporter.note(f"Seed {prompt.config.seed}.")
        return self.continue_encoded(encoded, prompt.config, first_stream)

    def chat_format(self, template: str | None = None) -> ChatFormat:
        """The format of conversations. template: chatml or a file with a Jinja template. Default: the model's own.

        Raises UsageError if the model is not a decoder, has no chat template and none is given, or the file cannot be
        read, and TinyLMError for a file that is not a template.
        """
        require(self.architecture == "decoder", f"Chat needs a decoder; this model is an {self.architecture}.")
        source = self.chat_template if template is None else read_template(template)
        if source is None:
            raise UsageError("The model has no chat template; give a `chat_template`.")
        format = chat_format(source, self.tokenizer)
        format.template.compile()
        return format

    def answer(self, prompt: Prompt, format: ChatFormat, first_stream: int = 0) -> Continuation:
        """Answers to the conversation of a prompt, or to its text as a user message.

        Raises UsageError for a conversation that the template rejects or that leaves no room in the context.
        """
        question = {"role": "user", "content": prompt.text}
        encoded = encode_conversation(
            prompt.conversation or Conversation((question,), location=prompt.name), format, self.tokenizer
        )
        require(
            len(encoded.ids) < self.context,
            f"{prompt.name} has {len(encoded.ids)} tokens; the context of {self.context} has no room for an answer.",
        )
        self.reporter.note(f"Seed {prompt.config.seed}.")
        return self.continue_encoded(encoded, prompt.config, first_stream)


Message = dict[str, Any]


STREAMS_PER_REPEAT = 1 << 20  # more than the messages of a conversation


@dataclass(eq=False)
class ChatSession:
    """A conversation with a decoder. All questions and answers are kept.

    format: format of the conversation, made from the chat template.
    config: settings of the answers. The answer after n messages has the random stream (`config.seed`, n); further
        answers to the same question have others.
    system: the system message; `None` for the default of the template.
    messages: the questions and answers so far, the oldest first.
    dropped: number of the oldest messages that no longer fit the context and are left out of the prompt.
    finish_reason: of the last answer, as in `Sample`; `length` also for one that the caller stopped. Empty before the
        first answer.
    """

    model: TextGenerator
    format: ChatFormat
    config: GenerationConfig
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    dropped: int = 0
    finish_reason: str = ""
    _repeats: int = field(default=0, init=False)  # of the last question

    def ask(self, question: str) -> Generator[str]:
        """Yield the answer to a question in chunks. If the iteration stops early, the chunks so far are the answer.

        Raises UsageError, and leaves the conversation unchanged, for a question that the template rejects, that has
        unknown characters, or that does not fit the context; so does an error of the engine before the first chunk.
        """
        answer = self._answer([*self.messages, {"role": "user", "content": question}], 0)
        self._repeats = 0
        return answer

    def ask_again(self) -> Generator[str]:
        """Yield another answer to the last question, in place of the last one; the same one at temperature 0.

        Raises UsageError without a question, and as `ask` does.
        """
        require(bool(self.messages), "There is no question yet.")
        self._repeats += 1
        return self._answer(self.messages[:-1], self._repeats)

    def _answer(self, asked: list[Message], repeats: int) -> Generator[str]:
        """Answer the last of the messages `asked`, and make them and the answer those of the conversation."""
        prompt, dropped = self._encode(asked)
        stream = len(asked) - 1 + repeats * STREAMS_PER_REPEAT
        return self._generate(asked, dropped, self.model.continue_encoded(prompt, self.config, first_stream=stream))

    def _generate(self, asked: list[Message], dropped: int, answer: Continuation) -> Generator[str]:
        parts: list[str] = []
        is_failed = False
        self.finish_reason = "length"
        try:
            for chunk in answer:
                parts.append(chunk.text)
                yield chunk.text
            self.finish_reason = answer.samples[0].finish_reason
        except TinyLMError:
            is_failed = not parts
            raise
        finally:
            if not is_failed:
                self.messages[:] = [*asked, {"role": "assistant", "content": "".join(parts)}]
                self.dropped = dropped

    def restore(self, conversation: Conversation) -> None:
        """Take the questions and answers of a conversation, and its system message if this session has none.

        Raises UsageError for one that is not questions, each with its answer.
        """
        messages = [{"role": m["role"], "content": m["content"]} for m in conversation.messages]
        if messages[0]["role"] == "system":
            first = messages.pop(0)
            self.system = first["content"] if self.system is None else self.system
        roles = [message["role"] for message in messages]
        require(
            roles == ["user", "assistant"] * (len(roles) // 2) and bool(roles),
            f"{conversation.location} is not a conversation of questions, each with its answer.",
        )
        self.messages[:] = messages

    def reset(self) -> None:
        """Delete all questions and answers, but not the system message."""
        self.messages.clear()
        self.dropped = 0

    def transcript(self) -> list[Message]:
        """All messages, also those dropped from the prompt, after the system message if there is one."""
        return [*self._system_messages(), *self.messages]

    def _system_messages(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _encode(self, messages: list[Message]) -> tuple[EncodedPrompt, int]:
        """The prompt for the next answer, and the number of the oldest messages that are left out of the prompt.

        `max_tokens` or a quarter of the context, whichever is less, is reserved for the answer. A question is dropped
        together with its answer. Raises UsageError if the last message alone does not fit.
        """
        context = self.model.context
        room = min(self.config.max_tokens, context // 4)
        for dropped in range(self.dropped, len(messages), 2):
            kept = Conversation((*self._system_messages(), *messages[dropped:]), location="The question")
            prompt = encode_conversation(kept, self.format, self.model.tokenizer)
            if len(prompt.ids) + room <= context:
                return prompt, dropped
        raise UsageError(
            f"The question has {len(prompt.ids)} tokens with the chat template, and the context of {context} has room "
            f"for {context - room} beside the answer; shorten it."
        )
