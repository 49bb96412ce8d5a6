"""A conversation with a chat model."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from tinylm.errors import UsageError
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import EncodedPrompt, encode_conversation
from tinylm.generation.text_generator import TextGenerator
from tinylm.text.answer_spans import ChatFormat
from tinylm.text.chat import Conversation

Message = dict[str, Any]


@dataclass(eq=False)
class ChatSession:
    """A conversation with a decoder. All questions and answers are kept.

    format: format of the conversation, made from the chat template.
    config: settings of the answers. The answer after n messages has the random stream (`config.seed`, n).
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

    def ask(self, question: str) -> Generator[str]:
        """Yield the answer to a question in chunks. If the iteration stops early, the chunks so far are the answer.

        Raises UsageError, and leaves the conversation unchanged, for a question that the template rejects, that has
        unknown characters, or that does not fit the context.
        """
        user = {"role": "user", "content": question}
        prompt, dropped = self._encode([*self.messages, user])
        return self._answer(user, prompt, dropped)

    def _answer(self, user: Message, prompt: EncodedPrompt, dropped: int) -> Generator[str]:
        parts: list[str] = []
        self.finish_reason = "length"
        answer = self.model.continue_encoded(prompt, self.config, first_stream=len(self.messages))
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
