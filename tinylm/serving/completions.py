"""The answers of the server: requests of OpenAI's API for completions and chats, from JSON to JSON.

The engine generates ids, and this module decodes them as `tinylm sample` does. A whole answer is joined from the chunks
that a stream sends, so both have the same text.
"""

import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from tinylm.config.run import DataConfig
from tinylm.config.validation import Range, describe_value, require
from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.engine import Candidate, Engine, Token
from tinylm.generation.generation_config import GenerationConfig, PromptPolicy, SamplingSettings
from tinylm.generation.llama_cpp import RANDOM_STREAM, LlamaCpp
from tinylm.generation.prompts import EncodedPrompt, drop_unknown, empty_start, encode_conversation
from tinylm.generation.text_generator import TextStream
from tinylm.reporter import SilentReporter
from tinylm.text.chat import parse_conversation
from tinylm.text.chat_format import ChatFormat
from tinylm.text.decoding import TokenTexts, stream_decoder
from tinylm.text.readers import require_encodable
from tinylm.text.tokenizer import Tokenizer

MAX_CHOICES = 128  # answers to a request: prompts times `n`
MAX_LOGPROBS = 100  # candidates at a position
NUMBERS = Range(-(1 << 31), 1 << 31, open_low=True, open_high=True)  # that llama.cpp takes
# llama.cpp has these defaults itself.
JSON_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
PASSED_TO_LLAMA_CPP = (  # settings of a request; repeat_last_n is limited to the context
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold"),
    *("dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("repeat_penalty", "repeat_last_n", "frequency_penalty", "presence_penalty"),
)
# Keys that change what is answered and are not supported, with what to do instead.
REFUSED = {
    "tools": "answers are texts; describe the functions in a message",
    "functions": "answers are texts; describe the functions in a message",
    "chat_template_kwargs": "write its values into the chat template",
    "grammar": "give a JSON Schema as 'json_schema'",
    "suffix": "give the text before it as 'prompt'",
    "use_beam_search": "leave it out",
    "prompt_logprobs": "give 'logprobs' with 'echo'",
    **dict.fromkeys(("dry_multiplier", "samplers", "min_keep", "min_tokens", "ignore_eos"), "leave it out"),
}


class ScoredToken(NamedTuple):
    """A token of an answer with its log-probability and the likeliest tokens.

    logprob: `None` for the first token of a prompt. offset: index, in the text of the answer, of its first character.
    """

    id: int
    logprob: float | None
    candidates: Sequence[Candidate]
    offset: int


class Chunk(NamedTuple):
    """New text and tokens of one answer. choice: its index. finish_reason: `stop` or `length` in its last chunk."""

    choice: int
    text: str = ""
    scores: Sequence[ScoredToken] = ()
    finish_reason: str | None = None
    tokens: int = 0  # of the whole answer, in its last chunk


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request that was checked. Answer i continues prompt i // n.

    max_tokens: `None` for all that the context has room for. logprobs: number of candidates; `None` without
    log-probabilities. sampling, logit_bias: given to llama.cpp.
    """

    prompts: Sequence[EncodedPrompt]
    n: int
    max_tokens: int | None
    stop: tuple[str, ...]
    seed: int
    logprobs: int | None
    echo: bool
    stream: bool
    includes_usage: bool
    sampling: Mapping[str, Any]
    logit_bias: Sequence[tuple[int, float]]
    json_schema: Mapping[str, Any] | None
    is_chat: bool


class Completions:
    """Answers requests with a model. Several threads may do so at the same time.

    name: of the model, in answers. context: most tokens of a prompt and its answer. format: of conversations; `None`
    for a model that continues the text of the messages. open_torch: opens the model in torch, which generates JSON.
    parallel: number of answers that the engine computes at the same time.
    """

    def __init__(
        self,
        name: str,
        engine: LlamaCpp,
        tokenizer: Tokenizer,
        data: DataConfig | None,
        context: int,
        format: ChatFormat | None,
        open_torch: Callable[[], Engine],
        parallel: int = 1,
    ) -> None:
        self.name = name
        self.format = format
        self._engine, self._tokenizer, self._data, self._context = engine, tokenizer, data, context
        self._open_torch, self._created = open_torch, int(time.time())
        self._torch_engine: Engine | None = None
        self._torch_lock = threading.Lock()  # for one answer at a time
        self._answers_running = threading.BoundedSemaphore(parallel)
        self._texts = TokenTexts(tokenizer)

    def models(self) -> dict[str, Any]:
        """The list of models, which is one."""
        model = {"id": self.name, "object": "model", "created": self._created, "owned_by": "tinylm"}
        return {"object": "list", "data": [{**model, "max_model_len": self._context}]}

    def parse(self, body: Any, *, is_chat: bool) -> CompletionRequest:
        """The request in a JSON value. Raises UsageError for one that cannot be answered."""
        require(isinstance(body, dict), f"The request is {describe_value(body)}; it must be a JSON object.")
        body = {key: value for key, value in body.items() if value is not None}
        for key, advice in REFUSED.items():
            require(body.get(key) in (None, [], {}, "", False, 0), f"{key!r} is not supported; {advice}.")
        n = _whole(body, "n", Range(1, MAX_CHOICES), 1)
        require(_whole(body, "best_of", Range(1, MAX_CHOICES), n) == n, "'best_of' must be equal to 'n'.")
        policy = PromptPolicy(unknown=body.get("unknown", "error"))
        prompts = [self._chat_prompt(body)] if is_chat else self._prompts(body.get("prompt", ""), policy)
        require(len(prompts) * n <= MAX_CHOICES, f"The request has more than {MAX_CHOICES} answers; send several.")
        stop = body.get("stop", [])
        stop = tuple([stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [None])
        for text in stop:
            require(isinstance(text, str), "'stop' must be a text or a list of texts.")
        sampling = {key: body[key] for key in PASSED_TO_LLAMA_CPP if key in body}
        for key, value in sampling.items():
            known = type(value) in (int, float) and NUMBERS.contains(value)
            require(known, f"{key!r} is {describe_value(value)}; it must be a number {NUMBERS}.")
        if "repeat_last_n" in sampling:  # llama.cpp reserves memory for so many tokens
            sampling["repeat_last_n"] = min(int(sampling["repeat_last_n"]), self._context)
        key = "max_completion_tokens" if is_chat and "max_completion_tokens" in body else "max_tokens"
        max_tokens = _whole(body, key, Range(-1, 1 << 53), -1)
        options = body.get("stream_options", {})
        request = CompletionRequest(
            prompts=prompts,
            n=n,
            max_tokens=None if max_tokens == -1 else max_tokens,
            stop=tuple(filter(None, stop)),
            seed=_whole(body, "seed", Range(-(1 << 63), (1 << 64) - 1), secrets.randbits(32)),
            logprobs=self._logprobs(body, is_chat),
            echo=bool(body.get("echo")) and not is_chat,
            stream=bool(body.get("stream")),
            includes_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            sampling=sampling,
            logit_bias=self._logit_bias(body.get("logit_bias", {})),
            json_schema=_json_schema(body),
            is_chat=is_chat,
        )
        for number, prompt in enumerate(prompts, start=1):
            room = self._context - len(prompt.start)
            require(
                room >= 0 if request.max_tokens == 0 else room > 0,
                f"{_name(number, len(prompts))} has {len(prompt.start)} tokens, and the context of {self._context} has "
                "no room for them and the next token; shorten it.",
            )
        if request.json_schema is not None:
            _json_config(request, max_tokens=1)  # which checks the schema
        return request

    def _prompts(self, given: Any, policy: PromptPolicy) -> list[EncodedPrompt]:
        """The prompts of a request: a text, ids, or a list of these."""
        is_list = isinstance(given, list) and not (given and all(type(i) is int for i in given))
        entries = given if is_list else [given]
        require(0 < len(entries) <= MAX_CHOICES, f"Give a text or ids, or a list of 1 to {MAX_CHOICES} of them.")
        return [self._prompt(entry, policy, _name(number, len(entries))) for number, entry in enumerate(entries, 1)]

    def _prompt(self, given: Any, policy: PromptPolicy, name: str) -> EncodedPrompt:
        """A text, which begins with the BOS token if the model's texts do, or ids, which are used as they are."""
        tokenizer = self._tokenizer
        if isinstance(given, str):
            if self._data is not None and self._data.is_plain_text:  # whose lines end like those of the training text
                given = given.replace("\r\n", "\n").replace("\r", "\n")
            text = drop_unknown(require_encodable(given, name), tokenizer, policy, name, SilentReporter())
            ids = [int(i) for i in tokenizer.encode(text)] if text else []
            begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            return EncodedPrompt(text, ids, begin + ids or empty_start(tokenizer, self._data))
        known = isinstance(given, list) and all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in given)
        require(known, f"{name} must be a text, or ids of tokens from 0 to {tokenizer.vocab_size - 1}.")
        require(bool(given), f'{name} has no tokens; give "" to begin a text.')
        return EncodedPrompt(tokenizer.decode(given), given, given)

    def _chat_prompt(self, body: dict[str, Any]) -> EncodedPrompt:
        """The conversation of a request; of a model without a chat template, the texts of its messages."""
        messages = body.get("messages")
        if isinstance(messages, list):
            messages = [_with_text(message) for message in messages]
        conversation = parse_conversation({"messages": messages}, "The request")
        if self.format is not None:
            require("unknown" not in body, "'unknown' has no effect on conversations; leave it out.")
            return encode_conversation(conversation, self.format, self._tokenizer)
        policy = PromptPolicy(unknown=body.get("unknown", "error"))
        text = "".join(message["content"] for message in conversation.messages)
        return self._prompt(text, policy, "The conversation")

    def _logprobs(self, body: dict[str, Any], is_chat: bool) -> int | None:
        """The number of candidates; `None` without log-probabilities."""
        given = body.get("logprobs", False)
        if is_chat or isinstance(given, bool):
            require(isinstance(given, bool), f"'logprobs' is {describe_value(given)}; it must be true or false.")
            top = _whole(body, "top_logprobs", Range(0, MAX_LOGPROBS), 0 if is_chat else 1)
            return top if given else None
        return _whole(body, "logprobs", Range(0, MAX_LOGPROBS), 0)

    def _logit_bias(self, given: Any) -> list[tuple[int, float]]:
        entries: list[tuple[str, Any]] = list(given.items()) if isinstance(given, dict) else [("", None)]
        for key, bias in entries:
            is_known = key.isdecimal() and len(key) < 10 and int(key) < self._tokenizer.vocab_size
            require(
                is_known and type(bias) in (int, float) and abs(bias) < 1_000_000,
                "'logit_bias' must be an object from ids of tokens to numbers.",
            )
        return [(int(key), bias) for key, bias in entries]

    def join(self, request: CompletionRequest, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """The whole answer that consists of these chunks."""
        choices, tokens = [], 0
        for index, own in itertools.groupby(sorted(chunks, key=lambda chunk: chunk.choice), lambda chunk: chunk.choice):
            parts = list(own)
            text = "".join(chunk.text for chunk in parts)
            content = {"message": {"role": "assistant", "content": text}} if request.is_chat else {"text": text}
            scores = [score for chunk in parts for score in chunk.scores]
            choices.append(_choice(index, content, self._scores(request, scores), parts[-1].finish_reason))
            tokens += parts[-1].tokens
        return {**self._envelope(request), "choices": choices, "usage": self._usage(request, tokens)}

    def events(self, request: CompletionRequest) -> Generator[dict[str, Any] | None]:
        """Yield the answer as events of a stream. `None` is an event without content, at least every second."""
        envelope, tokens = self._envelope(request, ".chunk"), 0
        begun: set[int] = set()
        with closing(self.chunks(request)) as chunks:
            for chunk in chunks:
                if chunk is None:
                    yield None
                    continue
                tokens += chunk.tokens
                content: dict[str, Any] = {"text": chunk.text}
                if request.is_chat:
                    first = {} if chunk.choice in begun else {"role": "assistant", "content": ""}
                    content = {"delta": {**first, "content": chunk.text} if chunk.text else first}
                    begun.add(chunk.choice)
                scores = self._scores(request, chunk.scores) if chunk.scores else None
                choice = _choice(chunk.choice, content, scores, chunk.finish_reason)
                yield {**envelope, "choices": [choice]}
        if request.includes_usage:
            yield {**envelope, "choices": [], "usage": self._usage(request, tokens)}

    def _envelope(self, request: CompletionRequest, suffix: str = "") -> dict[str, Any]:
        prefix, kind = ("chatcmpl", f"chat.completion{suffix}") if request.is_chat else ("cmpl", "text_completion")
        return {
            "id": f"{prefix}-{secrets.token_hex(16)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
        }

    def _usage(self, request: CompletionRequest, tokens: int) -> dict[str, int]:
        """The tokens of all prompts, each once, and of all answers."""
        given = sum(len(prompt.start) for prompt in request.prompts)
        return {"prompt_tokens": given, "completion_tokens": tokens, "total_tokens": given + tokens}

    def _scores(self, request: CompletionRequest, scores: Sequence[ScoredToken]) -> dict[str, Any] | None:
        """Log-probabilities in the form of the endpoint."""
        if request.logprobs is None:
            return None
        if request.is_chat:
            return {
                "content": [
                    self._chat_score(score.id, score.logprob)
                    | {"top_logprobs": [self._chat_score(*other) for other in score.candidates]}
                    for score in scores
                ]
            }
        text = self._texts.text
        likeliest = [
            None
            if score.logprob is None
            else {text(other.id): other.logprob for other in (*score.candidates, Candidate(score.id, score.logprob))}
            for score in scores
        ]
        return {
            "tokens": [text(score.id) for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": likeliest,
            "text_offset": [score.offset for score in scores],
        }

    def _chat_score(self, id: int, logprob: float | None) -> dict[str, Any]:
        return {"id": id, "token": self._texts.text(id), "bytes": list(self._texts[id]), "logprob": logprob}

    def chunks(self, request: CompletionRequest) -> Generator[Chunk | None]:
        """Yield the chunks of all answers as they are generated, and `None` after a second without one.

        Raises UsageError for settings that llama.cpp refuses, and TinyLMError if generation fails. Generation ends when
        the iterator is closed.
        """
        count = len(request.prompts) * request.n
        chunks: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        is_over = threading.Event()

        def run(index: int) -> None:
            try:
                self._generate(request, index, chunks.put, is_over)
            except Exception as error:  # raised again below, in the thread of the request
                chunks.put(error)

        try:
            for index in range(count):
                try:
                    threading.Thread(target=run, args=(index,), daemon=True).start()
                except RuntimeError as error:  # the system has no thread left
                    raise TinyLMError("The server has too many requests; try again later.") from error
            while count:
                try:
                    chunk = chunks.get(timeout=1)
                except queue.Empty:
                    yield None
                    continue
                if isinstance(chunk, Exception):
                    raise chunk
                count -= chunk.finish_reason is not None
                yield chunk
        finally:
            is_over.set()

    def _generate(
        self, request: CompletionRequest, index: int, put: Callable[[Chunk], None], is_over: threading.Event
    ) -> None:
        tokenizer, prompt = self._tokenizer, request.prompts[index // request.n]
        is_scored = request.logprobs is not None
        position, decoder = 0, stream_decoder(tokenizer, () if request.echo else prompt.start)

        def with_offset(token: Token) -> ScoredToken:
            nonlocal position
            assert token.id is not None
            offset = position
            position += len(decoder.decode([token.id]))
            return ScoredToken(token.id, token.logprob, token.candidates[: request.logprobs or 0], offset)

        # The prompt
        if request.echo:
            scores: list[ScoredToken] = []
            if is_scored and prompt.ids:
                candidates, end_id = request.logprobs or 0, tokenizer.end_of_text_id
                following = self._engine.score(prompt.start, candidates, end_id, is_over.is_set)
                scores = [with_offset(token) for token in (Token(0, prompt.start[0]), *following)]
            put(Chunk(index, prompt.text, scores))

        # The answer
        end_texts = prompt.end_texts if request.json_schema is None else ()
        stream = TextStream(tokenizer, request.stop, prompt.end_ids, end_texts, context=prompt.start)
        room = self._context - len(prompt.start)
        max_tokens = room if request.max_tokens is None else min(room, request.max_tokens)

        def receive(token: Token) -> bool:
            text = stream.push(token.id)
            scores = [with_offset(token)] if is_scored and token.id is not None else []
            if text or scores:
                put(Chunk(index, text, scores))
            return stream.finished or is_over.is_set()

        if max_tokens and request.json_schema is not None:
            self._generate_json(request, index, max_tokens, receive, is_over)
        elif max_tokens:
            settings: dict[str, Any] = {
                **request.sampling,
                "prompt": prompt.start,
                "max_tokens": max_tokens,
                "seed": (request.seed + index % request.n) % RANDOM_STREAM,  # 2**32 - 1 means a random seed there
                "logit_bias": [*((i, False) for i in self._engine.excluded), *request.logit_bias],
            }
            if is_scored:
                settings["logprobs"] = max(1, request.logprobs or 0)
            with self._answers_running:  # a request that waits in llama.cpp's queue cannot be abandoned
                if not is_over.is_set():
                    self._engine.complete(settings, receive)
        rest = stream.finish()
        put(Chunk(index, rest, (), "stop" if stream.finished else "length", stream.tokens))

    def _generate_json(
        self,
        request: CompletionRequest,
        index: int,
        max_tokens: int,
        receive: Callable[[Token], bool],
        is_over: threading.Event,
    ) -> None:
        prompt, config = request.prompts[index // request.n], _json_config(request, max_tokens)
        config = replace(config, seed=config.seed + index % request.n)
        with self._torch_lock:
            if is_over.is_set():
                return
            if self._torch_engine is None:
                self._torch_engine = self._open_torch()
            with closing(self._torch_engine.generate([prompt], config, 0)) as tokens:
                any(map(receive, tokens))


def _json_config(request: CompletionRequest, max_tokens: int) -> GenerationConfig:
    """The settings of torch for JSON. Raises UsageError for a schema that is not supported, and for other settings."""
    known = {field.name for field in fields(SamplingSettings)}
    unused = [key for key, value in request.sampling.items() if key not in known and value != 0]
    for key in [*unused, *(["logit_bias"] if request.logit_bias else [])]:
        raise UsageError(f"{key!r} has no effect on JSON; leave it out.")
    return GenerationConfig(
        **JSON_DEFAULTS | {key: value for key, value in request.sampling.items() if key in known},
        max_tokens=max_tokens,
        stop=request.stop,
        logprobs=0 if request.logprobs is None else max(1, request.logprobs),
        json_schema=request.json_schema,
        seed=request.seed % (1 << 32),
    )


def _json_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The JSON Schema of a request under `json_schema` or `response_format`; `None` without one."""
    format = body.get("response_format", {})
    match format.get("type", "text") if isinstance(format, dict) else None:
        case "text":
            schema = body.get("json_schema")
        case "json_object":
            schema = format.get("schema", {"type": "object"})
        case "json_schema" if isinstance(format.get("json_schema"), dict):
            schema = format["json_schema"].get("schema", {})
        case _:
            raise UsageError("'response_format' must be an object with the 'type' text, json_object or json_schema.")
    require(schema is None or isinstance(schema, dict), "A JSON schema must be an object.")
    return schema


def _with_text(message: Any) -> Any:
    """A message whose content, if it is a list of parts with texts, is their text. Other parts are refused later."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _choice(
    index: int, content: dict[str, Any], scores: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": scores, "finish_reason": finish_reason}


def _whole(body: Mapping[str, Any], key: str, limits: Range, default: int) -> int:
    value = body.get(key, default)
    is_whole = type(value) is int and limits.contains(value)
    require(is_whole, f"{key!r} is {describe_value(value)}; it must be a whole number {limits}.")
    return int(value)


def _name(number: int, count: int) -> str:
    return "The prompt" if count == 1 else f"Prompt {number}"
