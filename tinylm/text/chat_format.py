"""The text of a conversation and its scored characters, and the choice of its chat template."""

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tinylm.config.run import MAX_TEMPLATE, SpecialTokens
from tinylm.errors import TinyLMError, UsageError, concerning
from tinylm.text.chat import Conversation
from tinylm.text.chat_template import BEGIN, CHATML, ChatTemplate, Rendering, RenderJob, text_of, unmarked
from tinylm.text.tokenizer import END_OF_TEXT, LITERAL, Tokenizer


def _with_marks(value: Any, first_characters: re.Pattern[str]) -> Any:
    """A copy of a JSON value with LITERAL after each character that the pattern matches, also in keys.

    Raises UsageError for a text that contains LITERAL.
    """
    if isinstance(value, str):
        if LITERAL in value:
            raise UsageError("The conversation contains U+FDD2, which is not a character; remove it.")
        return first_characters.sub(lambda first: first[0] + LITERAL, value)
    if isinstance(value, Mapping):
        items = value.items()
        return {_with_marks(key, first_characters): _with_marks(item, first_characters) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_with_marks(item, first_characters) for item in value]
    return value


def without_marks(text: str) -> str:
    """Return a marked text without its marks."""
    return text.replace(LITERAL, "")


BATCH = 256  # conversations that are rendered at a time
BATCH_CHARACTERS = 1 << 18
_ANSWER = "answer_of_tinylm"  # the answer of a conversation that shows what follows an answer


class ScoredText(NamedTuple):
    """The text of a conversation, and the ranges of its scored characters, in order and without overlap.

    In the text, names of special tokens that users wrote are marked (`tinylm.text.chat_format`).
    """

    text: str
    spans: list[range]


@dataclass(frozen=True)
class ChatFormat:
    """Renders conversations as text, and finds the scored part of that text.

    special_tokens: names of special tokens, each encoded as one token.
    train_on: the part that is scored: each message of the assistant with its end token (assistant), the last such
        message (last), or all text (all).
    control_tokens: special tokens that only the template writes; in messages and tools, their names are ordinary text.
    """

    template: ChatTemplate
    special_tokens: tuple[str, ...] = ()
    train_on: str = "assistant"
    control_tokens: tuple[str, ...] = ()

    def prompt(self, conversation: Conversation) -> str:
        """The text of a conversation up to the beginning of the next answer, marked as in `ScoredText`.

        Raises UsageError for a text that contains LITERAL, for tools or calls that the template does not write, and the
        errors of `ChatTemplate.render`.
        """
        marked = self._marked(conversation)
        probes, names = _probes(marked)
        job = RenderJob(marked.messages, marked.tools, [(len(marked.messages), True)])
        (rendering,), *probed = self.template.render_each([job, *probes])
        text = unmarked(text_of(rendering))[0]
        _require_written(names, probed)
        return text

    def render(self, conversation: Conversation) -> ScoredText:
        """The text and the scored spans of a conversation. Errors as for `render_each`."""
        return next(self.render_each([conversation]))

    def render_each(self, conversations: Iterable[Conversation]) -> Iterator[ScoredText]:
        """Yield the text and the scored spans of each conversation.

        `{% generation %}` blocks of the template are the spans of answers. Without such blocks, an answer is the text
        that its message adds to the earlier messages, rendered with the generation prompt; white space after a special
        token at the end of an answer is not scored. With `train_on` last, messages after the last answer are left out.
        Answers with the `weight` 0 are not scored.

        Raises UsageError, with the location, for a conversation that the template refuses or fails on or that has
        invalid characters, for one that is rendered as no text, for tools or calls that the template does not write,
        and, without `{% generation %}` blocks, for one whose beginning is rendered differently when more messages
        follow.
        """
        for batch in _batches(conversations):
            requests = []
            for conversation in batch:
                with _located(conversation):
                    requests.append(self._request(conversation))
            found = iter(self.template.render_each([job for request in requests for job in request.jobs]))
            for request in requests:
                renderings, *probed = itertools.islice(found, len(request.jobs))
                with _located(request.source):
                    scored = self._scored(request, renderings, probed)
                yield scored

    def _marked(self, conversation: Conversation) -> Conversation:
        """A copy of the conversation in which the names of control tokens are marked."""
        messages = tuple(
            {**_with_marks(message, self._literal), "role": message["role"]} for message in conversation.messages
        )
        return replace(conversation, messages=messages, tools=_with_marks(conversation.tools, self._literal))

    @functools.cached_property
    def _literal(self) -> re.Pattern[str]:
        """A pattern of the first character of each occurrence of a control token, so that overlapping ones are found.

        Tokens of a single character are left out.
        """
        rests: dict[str, list[str]] = {}
        for token in self.control_tokens:
            if len(token) > 1:
                rests.setdefault(token[0], []).append(re.escape(token[1:]))
        firsts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
        return re.compile("|".join(firsts) or "(?!)")

    def _request(self, source: Conversation) -> "_Request":
        """What to render to find the scored text of a conversation."""
        conversation = self._marked(source)
        blocks = self.template.marks_answers
        answers = conversation.answers()
        scored = [index for index in answers if conversation.messages[index].get("weight") != 0]
        if self.train_on == "last" and scored:
            scored = scored[-1:]
            conversation = replace(conversation, messages=conversation.messages[: scored[-1] + 1])
            answers = [index for index in answers if index <= scored[-1]]
        wanted: list[int] | None = scored
        if self.train_on == "all":
            wanted = [index for index in answers if index not in scored]
        elif blocks and scored == answers:
            wanted = None
        prefixes = [(len(conversation.messages), False)]
        for index in wanted or ():
            prefixes += [(index, not blocks), (index + 1, False)]  # the text before the answer, and that with it
        probes, names = _probes(conversation)
        jobs = [RenderJob(conversation.messages, conversation.tools, prefixes), *probes]
        return _Request(source, conversation, wanted, jobs, names)

    def _scored(self, request: "_Request", renderings: list[Rendering], probed: list[list[Rendering]]) -> ScoredText:
        """The text and the scored spans, by the renderings of a request."""
        rendered = text_of(renderings[0])
        text, spans = unmarked(rendered)
        if not text:
            raise UsageError("The chat template renders no text.")
        _require_written(request.names, probed)
        if request.answers is not None:
            blocks, spans = spans, []
            for index, before, after in zip(request.answers, renderings[1::2], renderings[2::2], strict=True):
                if self.template.marks_answers:
                    first = text_of(before, rendered).count(BEGIN) if index else 0
                    spans += blocks[first : text_of(after, rendered).count(BEGIN)]
                else:
                    spans.append(self._span_of(request, index, text, before, after))
        if self.train_on == "all":
            edges = [0, *(edge for span in spans for edge in (span.start, span.stop)), len(text)]
            spans = [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        return ScoredText(text, [span for span in spans if span])

    def _span_of(self, request: "_Request", index: int, text: str, before: Rendering, after: Rendering) -> range:
        """The span of the answer at `index` in the text, by the renderings before it and with it."""
        if isinstance(before, TinyLMError):
            before = self._opening(request, index, text_of(after, text), before)
        prompt, answered = text_of(before, text), text_of(after, text)
        if not answered.startswith(prompt):
            self._raise_changed(request.source, index, prompt, answered, "message {} is its answer")
        if not text.startswith(answered):
            self._raise_changed(request.source, index, answered, text, "other messages follow message {}")
        answer = answered[len(prompt) :]
        stripped = answer.rstrip()
        if stripped.endswith(self.special_tokens):
            answer = stripped
        return range(len(prompt), len(prompt) + len(answer))

    def _opening(self, request: "_Request", index: int, answered: str, error: TinyLMError) -> int:
        """The length of the text before an answer, for a template that does not render the messages before it alone,
        such as none. There, the answer follows the only occurrence of the generation prompt.

        Raises UsageError if the generation prompt does not occur once.
        """
        messages, tools = request.conversation.messages[: index + 1], request.conversation.tools
        following = self.template.render(messages, tools, add_generation_prompt=True)
        opening = following.removeprefix(answered)
        if not opening or opening == following or answered.count(opening) != 1:
            raise UsageError(
                f"The beginning of the answer in message {index + 1} cannot be found, since the template does not "
                f"render the messages before it alone: {error} {self._advice(request.source)}"
            )
        return answered.index(opening) + len(opening)

    def _raise_changed(self, conversation: Conversation, index: int, expected: str, found: str, when: str) -> NoReturn:
        """Raise UsageError about a text `found` that does not start with the text `expected`."""
        at = next((i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), len(found))
        before, after = (without_marks(text[at : at + 40]) for text in (expected, found))
        raise UsageError(
            f"the chat template renders the beginning of this conversation differently when {when.format(index + 1)}: "
            f"{before!r} becomes {after!r}. So its answers cannot be found; {self._advice(conversation)}"
        )

    def _advice(self, conversation: Conversation) -> str:
        """What to do where answers cannot be found. It says whether the last answer can be found."""
        last = ""
        if self.train_on != "last":
            with contextlib.suppress(TinyLMError):
                found = replace(self, train_on="last").render(conversation).spans
                last = "last, which works here, or to " if found else ""
        if conversation.is_preference:
            others = "give the answers before the last one the 'weight' 0, which works here, or " if last else ""
            return f"{others}use a `chat_template` with {{% generation %}} blocks."
        return f"set `train_on` to {last}all, or use a `chat_template` with {{% generation %}} blocks."

    def ordinary_text(self, text: str) -> Iterator[str]:
        """Yield the non-empty parts of a rendered text between special tokens, without marks."""
        return map(without_marks, filter(None, self._special.split(text)))

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        """A pattern of special tokens; where several match, of the longest."""
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @functools.cached_property
    def end_token(self) -> str | None:
        """The special token at the end of an answer; `None` for a template without one. Errors as for `render`."""
        return next((token for token in self.special_tokens if self._scored_answer.endswith(token)), None)

    @functools.cached_property
    def end_text(self) -> str | None:
        """The scored text after an answer, without white space around it; `None` if there is none, and for a template
        with an `end_token`. Errors as for `render`.
        """
        return None if self.end_token else self._scored_answer.partition(_ANSWER)[2].strip() or None

    @functools.cached_property
    def _scored_answer(self) -> str:
        probe = Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}))
        text, spans = ChatFormat(self.template, self.special_tokens, "last").render(probe)
        return text[spans[-1].start : spans[-1].stop] if spans else ""


class _Request(NamedTuple):
    """A conversation, as it is read and as it is rendered (marked and cut), with the jobs that render it.

    answers: the messages whose spans are wanted; `None` for all `{% generation %}` blocks. names: see `_probes`.
    """

    source: Conversation
    conversation: Conversation
    answers: list[int] | None
    jobs: list[RenderJob]
    names: dict[str, str]


@contextlib.contextmanager
def _located(conversation: Conversation) -> Iterator[None]:
    """Context manager whose errors get the location of the conversation."""
    try:
        yield
    except TinyLMError as error:
        if str(error).startswith(conversation.location):
            raise
        raise UsageError(f"{conversation.location}: {error}") from error


def _batches(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    """Yield lists of conversations with at most BATCH of them, and about BATCH_CHARACTERS."""
    batch: list[Conversation] = []
    characters = 0
    for conversation in conversations:
        batch.append(conversation)
        characters += sum(len(message["content"]) for message in conversation.messages)
        if len(batch) == BATCH or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _probes(conversation: Conversation) -> tuple[list[RenderJob], dict[str, str]]:
    """A job that shows whether a template writes tools and calls, in which each has a new name, and a phrase for
    messages by each of these names. No job without calls and tools.

    Without this, an answer of a call alone would be an empty text.
    """
    names: dict[str, str] = {}

    def renamed(entry: dict[str, Any], phrase: str) -> dict[str, Any]:
        if isinstance(entry.get("function"), dict):
            return {**entry, "function": renamed(entry["function"], phrase)}
        if not isinstance(entry.get("name"), str):
            return entry
        name = f"name_{len(names)}_of_tinylm"
        names[name] = phrase
        return {**entry, "name": name}

    messages = []
    for number, message in enumerate(conversation.messages, start=1):
        if message.get("tool_calls"):
            calls = [renamed(call, f"the tool calls of message {number}") for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        messages.append(message)
    tools = None if conversation.tools is None else [renamed(tool, "the tools") for tool in conversation.tools]
    return [RenderJob(messages, tools, [(len(messages), False)])] if names else [], names


def _require_written(names: Mapping[str, str], probed: Iterable[list[Rendering]]) -> None:
    """Raise UsageError if a new name is not in the text that was rendered for the job of `_probes`."""
    for (rendering,) in probed:
        text = text_of(rendering)
        for name, phrase in names.items():
            if name not in text:
                raise UsageError(
                    f"The chat template does not write {phrase}. Choose a `chat_template` that does, or leave them out."
                )


CHATML_NAME = "chatml"
_TOKEN = re.compile(r"<\|[^|<>\s'\"]{1,40}\|>")


@concerning("chat_template")
def read_template(choice: str) -> str:
    """The source of a template: "chatml", or the path of a file.

    Raises UsageError for a file that cannot be read or has more than MAX_TEMPLATE characters.
    """
    if choice == CHATML_NAME:
        return CHATML
    path = Path(choice)
    if not os.path.isfile(path):  # noqa: PTH113, Path.is_file raises an error for a long name
        raise UsageError(f"`chat_template` is {choice[:200]!r}; it must be chatml or the path of a file.")
    try:
        with path.open(encoding="utf-8-sig") as file:
            source = file.read(MAX_TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"Cannot read the chat template {choice[:200]}: {reason}.") from error
    if len(source) > MAX_TEMPLATE:
        raise UsageError(f"The chat template {choice[:200]} is longer than {MAX_TEMPLATE} characters; choose another.")
    return source


def template_tokens(source: str) -> tuple[str, ...]:
    """The special tokens in the source of a template: its texts of the form <|name|>, without repetitions."""
    return tuple(dict.fromkeys(_TOKEN.findall(source)))


def chat_format(
    source: str, tokenizer: Tokenizer | None = None, train_on: str = "assistant", *, extended: bool = False
) -> ChatFormat:
    """The chat format with the template `source` and the special tokens of a tokenizer.

    tokenizer: `None` if it will be trained on the conversations, and have the special tokens of the template.
    extended: whether the tokenizer will get the special tokens of the template that it lacks.

    Raises TinyLMError if the source is too long. Whether it is a template shows when it is rendered.
    """
    special = tokenizer.special if tokenizer is not None else SpecialTokens()
    tokens = tokenizer.added_tokens if tokenizer is not None else (END_OF_TEXT,)
    control = tokenizer.control_tokens if tokenizer is not None else tokens
    if tokenizer is None or extended:
        new = [token for token in template_tokens(source) if token not in tokens]
        tokens, control = (*tokens, *new), (*control, *new)
    names = {"bos_token": special.bos or "", "eos_token": special.end_of_text, "pad_token": special.pad or ""}
    return ChatFormat(ChatTemplate(source, names), tokens, train_on, control)
