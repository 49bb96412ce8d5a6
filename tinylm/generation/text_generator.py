"""The base class of models that continue a prompt or a conversation, independent of the engine."""

from abc import ABC, abstractmethod

from tinylm.config.run import DataConfig, RunConfig
from tinylm.config.validation import require
from tinylm.errors import UsageError
from tinylm.generation.continuation import Continuation
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import EncodedPrompt, Prompt, encode_conversation, encode_prompt
from tinylm.reporter import Reporter
from tinylm.text.answer_spans import ChatFormat, chat_format, read_template
from tinylm.text.chat import Conversation
from tinylm.text.tokenizer import Tokenizer


class TextGenerator(ABC):
    """A model with its tokenizer. The methods that generate text are for decoders.

    data: description of the text that the model was trained on; `None` if it is not recorded.
    """

    config: RunConfig
    tokenizer: Tokenizer
    data: DataConfig | None
    reporter: Reporter

    @abstractmethod
    def close(self) -> None:
        """End llama.cpp, if it runs; otherwise it ends with the process. It starts again when text is generated."""

    @property
    def architecture(self) -> str:
        """decoder, encoder or encoder-decoder."""
        return self.config.model.architecture

    @property
    def context(self) -> int:
        """Context length in tokens."""
        return self.config.model.context

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; `None` without one."""
        return self.config.tokenizer.chat_template

    @abstractmethod
    def continue_encoded(self, encoded: EncodedPrompt, config: GenerationConfig, first_stream: int = 0) -> Continuation:
        """As `continue_prompt`, for an already encoded prompt, such as a conversation."""

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
        """As `continue_prompt`, for a chat: answers to the prompt's conversation, or to its text as a user message.

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
