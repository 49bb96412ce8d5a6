"""Prompts for chat models: a conversation rendered by the chat template, up to the beginning of the answer."""

from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.prompts import EncodedPrompt
from tinylm.text.answer_spans import ChatFormat
from tinylm.text.chat import Conversation
from tinylm.text.literal_tokens import without_marks
from tinylm.text.tokenizer import Tokenizer


def encode_conversation(conversation: Conversation, format: ChatFormat, tokenizer: Tokenizer) -> EncodedPrompt:
    """Encode a conversation as the prompt for the model's answer. The template's end token or end text ends the answer.

    Raises UsageError, with the conversation's location, if the template rejects the conversation or renders no text,
    and for characters that are not in the vocabulary.
    """
    try:
        text = format.prompt(conversation)
        ids = [int(i) for i in tokenizer.encode_with_special(text)[0]]
    except TinyLMError as error:
        raise UsageError(f"{conversation.location}: {error}") from error
    if not ids:
        raise UsageError(f"{conversation.location}: the chat template renders no text.")
    end = format.end_token
    end_ids = frozenset() if end is None else frozenset(int(i) for i in tokenizer.encode_with_special(end)[0])
    end_texts = () if format.end_text is None else (format.end_text,)
    return EncodedPrompt(without_marks(text), ids, ids, end_ids, end_texts)
