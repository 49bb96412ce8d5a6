"""The chat template of a run (ChatML, a file, or the model's template) and its special tokens."""

import re
from pathlib import Path

from tinylm.config.run import MAX_TEMPLATE, SpecialTokens
from tinylm.errors import UsageError
from tinylm.text.answer_spans import ChatFormat
from tinylm.text.chat_template import CHATML, ChatTemplate
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer

CHATML_NAME = "chatml"
_TOKEN = re.compile(r"<\|[^|<>\s'\"]{1,40}\|>")


def read_template(choice: str) -> str:
    """The source of a template: "chatml", or the path of a file.

    Raises UsageError for a file that cannot be read or has more than MAX_TEMPLATE characters.
    """
    if choice == CHATML_NAME:
        return CHATML
    path = Path(choice)
    if not path.is_file():
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


def template_values(special: SpecialTokens) -> dict[str, str]:
    """The special tokens by their variable names in templates, as in transformers."""
    return {"bos_token": special.bos or "", "eos_token": special.end_of_text, "pad_token": special.pad or ""}


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
    return ChatFormat(ChatTemplate(source, template_values(special)), tokens, train_on, control)
