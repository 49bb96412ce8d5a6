"""The text of a conversation and its scored characters."""

import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from tinylm.errors import TinyLMError, UsageError
from tinylm.text.chat import Conversation
from tinylm.text.chat_template import ChatTemplate
from tinylm.text.literal_tokens import LiteralTokens, without_marks


class ScoredText(NamedTuple):
    """The text of a conversation, and the ranges of its scored characters, in order and without overlap.

    In the text, names of special tokens that users wrote are marked (`tinylm.text.literal_tokens`).
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

        Raises UsageError for a text that contains LITERAL, and the errors of `ChatTemplate.render`.
        """
        marked = self._marked(conversation)
        return self.template.render(marked.messages, marked.tools, add_generation_prompt=True)

    def render(self, conversation: Conversation) -> ScoredText:
        """The text and the scored spans of a conversation.

        `{% generation %}` blocks of the template are the spans of answers. Without such blocks, an answer is the text
        that its message adds to the earlier messages, rendered with the generation prompt; white space after a special
        token at the end of an answer is not scored. With `train_on` last, messages after the last answer are left out.

        Raises UsageError, with the location, for a conversation that the template refuses or fails on or that has
        invalid characters, for one that is rendered as no text, and, without `{% generation %}` blocks, for one whose
        beginning is rendered differently when more messages follow.
        """
        try:
            return self._render(self._marked(conversation))
        except TinyLMError as error:
            if str(error).startswith(conversation.location):
                raise
            raise UsageError(f"{conversation.location}: {error}") from error

    def _marked(self, conversation: Conversation) -> Conversation:
        """A copy of the conversation in which the names of control tokens are marked."""
        literal = self._literal
        messages = tuple({**literal.mark(message), "role": message["role"]} for message in conversation.messages)
        return replace(conversation, messages=messages, tools=literal.mark(conversation.tools))

    @functools.cached_property
    def _literal(self) -> LiteralTokens:
        return LiteralTokens(self.control_tokens)

    def _render(self, conversation: Conversation) -> ScoredText:
        answers = conversation.answers()
        if self.train_on == "last" and answers:
            conversation = replace(conversation, messages=conversation.messages[: answers[-1] + 1])
        messages, tools = conversation.messages, conversation.tools
        text, spans = self.template.marked(messages, tools)
        if not text:
            raise UsageError("The chat template renders no text.")
        if self.train_on == "all":
            return ScoredText(text, [range(len(text))])
        if self.template.marks_answers:
            if self.train_on == "last" and answers:
                earlier = len(self.template.marked(messages[: answers[-1]], tools)[1]) if answers[-1] else 0
                spans = spans[earlier:]
        else:
            wanted = answers[-1:] if self.train_on == "last" else answers
            spans = [self._span_of(conversation, index, text) for index in wanted]
        return ScoredText(text, [span for span in spans if span])

    def _span_of(self, conversation: Conversation, index: int, text: str) -> range:
        """The span of the answer at `index` in the text of the whole conversation, found by rendering prefixes."""
        messages, tools = conversation.messages, conversation.tools
        prompt = self.template.render(messages[:index], tools, add_generation_prompt=True)
        answered = text if index + 1 == len(messages) else self.template.render(messages[: index + 1], tools)
        if not answered.startswith(prompt):
            self._raise_changed(conversation, index, prompt, answered, "message {} is its answer")
        if not text.startswith(answered):
            self._raise_changed(conversation, index, answered, text, "other messages follow message {}")
        answer = answered[len(prompt) :]
        stripped = answer.rstrip()
        if stripped.endswith(self.special_tokens):
            answer = stripped
        return range(len(prompt), len(prompt) + len(answer))

    def _raise_changed(self, conversation: Conversation, index: int, expected: str, found: str, when: str) -> NoReturn:
        """Raise UsageError about a text `found` that does not start with the text `expected`."""
        at = next((i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), len(found))
        before, after = (without_marks(text[at : at + 40]) for text in (expected, found))
        last = (
            "set `train_on` to last, which works here, or to" if self._finds_last(conversation) else "set `train_on` to"
        )
        raise UsageError(
            f"{conversation.location}: the chat template renders the beginning of this conversation differently when "
            f"{when.format(index + 1)}: {before!r} becomes {after!r}. So its answers cannot be found; {last} all, or "
            "use a `chat_template` with {% generation %} blocks."
        )

    def _finds_last(self, conversation: Conversation) -> bool:
        """Whether the span of the last answer can be found with `train_on` last; False if that is already set."""
        if self.train_on == "last":
            return False
        try:
            return bool(replace(self, train_on="last")._render(conversation).spans)
        except TinyLMError:
            return False

    def ordinary_text(self, text: str) -> Iterator[str]:
        """Yield the non-empty parts of a rendered text between special tokens, without marks."""
        parts = token_pattern(self.special_tokens).split(text) if self.special_tokens else [text]
        return map(without_marks, filter(None, parts))

    def end_token(self) -> str | None:
        """The special token at the end of an answer; `None` for a template without one. Errors as for `render`."""
        probe = Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
        text, spans = ChatFormat(self.template, self.special_tokens, "last").render(probe)
        answer = text[spans[-1].start : spans[-1].stop] if spans else ""
        return next((token for token in self.special_tokens if answer.endswith(token)), None)


def token_pattern(tokens: Collection[str]) -> re.Pattern[str]:
    """A pattern that matches any of the tokens; where several match, the longest. `tokens` must not be empty."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
