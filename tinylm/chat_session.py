"""A conversation with a chat model."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from tinylm.errors import UsageError
from tinylm.generation.chat_prompts import encode_conversation
from tinylm.generation.generation_config import GenerationConfig, SpeedConfig
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.text_generator import TextGenerator
from tinylm.text.answer_spans import ChatFormat
from tinylm.text.chat import Conversation

Message = dict[str, Any]


@dataclass(eq=False)
class ChatSession:
    """A conversation with a decoder, in which each question and answer is kept.

    format: its chat template. config: of the answers; answer n, from 0, has the random stream (`config.seed`, 2 n).
    system: the system message; `None` for the default of the template.
    messages: the questions and answers so far, the oldest first. dropped: how many of the oldest no longer fit the
        context, and are not part of the prompt. finish_reason: of the last answer; see `Sample`.
    """

    model: TextGenerator
    format: ChatFormat
    config: GenerationConfig
    speed: SpeedConfig = SpeedConfig()  # noqa: RUF009, frozen
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    dropped: int = 0
    finish_reason: str = ""

    def ask(self, question: str) -> Generator[str]:
        """Yield the answer to a question in chunks. If the iteration stops early, the chunks so far are the answer.

        Raises UsageError, without a change of the conversation, for a question that the template refuses, that has
        unknown characters, or that does not fit the context.
        """
        user = {"role": "user", "content": question}
        prompt, dropped = self._encode([*self.messages, user])
        return self._answer(user, prompt, dropped)

    def _answer(self, user: Message, prompt: EncodedPrompt, dropped: int) -> Generator[str]:
        parts: list[str] = []
        self.finish_reason = "length"
        answer = self.model.continue_encoded(prompt, self.config, self.speed, first_stream=len(self.messages))
        try:
            for chunk in answer:
                parts.append(chunk.text)
                yield chunk.text
            self.finish_reason = answer.samples[0].finish_reason
        finally:
            self.messages += [user, {"role": "assistant", "content": "".join(parts)}]
            self.dropped = dropped

    def reset(self) -> None:
        """Delete all questions and answers, but not the system message."""
        self.messages.clear()
        self.dropped = 0

    def transcript(self) -> list[Message]:
        """All messages, the system message first."""
        return [*self._system_messages(), *self.messages]

    def _system_messages(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _encode(self, messages: list[Message]) -> tuple[EncodedPrompt, int]:
        """The prompt for the next answer, and how many of the oldest messages had to be left out of it.

        `max_tokens` or a quarter of the context, whichever is less, is reserved for the answer. A question is dropped
        together with its answer.
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
