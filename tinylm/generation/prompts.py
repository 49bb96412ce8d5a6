"""Read prompts from a text (a single prompt, one per line, or JSONL with settings), and encode them for a decoder.

Conversations are encoded up to the beginning of the next answer.
"""

import json
import typing
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from tinylm.config.run import DataConfig
from tinylm.config.validation import Range, describe_value, limits_of, require
from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.generation_config import BeamSearchConfig, GenerationConfig, PromptPolicy, SpeedConfig
from tinylm.reporter import Reporter
from tinylm.text.chat import Conversation, parse_conversation
from tinylm.text.chat_format import ChatFormat, without_marks
from tinylm.text.readers import parse_json_line, require_encodable
from tinylm.text.tokenizer import MAX_LISTED, Tokenizer, describe_characters

FORMATS = ("text", "jsonl", "lines")
LINE_SETTINGS = {field.name for field in fields(GenerationConfig)} - {  # that a line of JSONL can set
    field.name for kind in (BeamSearchConfig, SpeedConfig, PromptPolicy) for field in fields(kind)
}
LEARNED = 20  # occurrences in the training text, from which on a model continues a separator or a line break well
NORMAL_FORMS: dict[Literal["NFC", "NFD", "NFKC", "NFKD"], str] = {
    "NFC": "its composed form (NFC), ",
    "NFD": "its decomposed form (NFD), ",
    "NFKC": "",
    "NFKD": "",
}
SIMILAR = ("'\u2018\u2019", '"\u201c\u201d\u201e\u00ab\u00bb', "-\u2013\u2014\u2212")  # quotes and dashes


@dataclass(frozen=True)
class Prompt:
    """A prompt with its settings. conversation: for a chat, given instead of the text, which is then empty.

    location: the source and line that it was read from, for messages; `None` for a single prompt.
    keys: the settings given in its line of JSONL. adapter: the adapter named in that line.
    """

    text: str
    config: GenerationConfig = GenerationConfig()  # noqa: RUF009, frozen
    location: str | None = None
    keys: frozenset[str] = frozenset()
    adapter: str | None = None
    conversation: Conversation | None = None

    @property
    def name(self) -> str:
        """The name of the prompt in messages."""
        return self.location or "The prompt"


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt for a decoder.

    text: the prompt, without skipped characters; of a chat, the rendered conversation.
    ids: the tokens of the text. start: the ids to generate from (see `start_tokens`).
    end_ids: tokens that end the continuation, besides those of the tokenizer. end_texts: texts that end it.
    """

    text: str
    ids: list[int]
    start: list[int]
    end_ids: frozenset[int] = frozenset()
    end_texts: tuple[str, ...] = ()


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, context: int, data: DataConfig | None, reporter: Reporter
) -> EncodedPrompt:
    """Encode a prompt for a decoder that was trained on `data`. Line ends are read as in plain text that is trained on.

    Raises UsageError for a character that is not in the vocabulary, unless the prompt's settings skip it, and if they
    are strict for a prompt longer than the context.
    """
    if written := [token for token in tokenizer.control_tokens if len(token) > 1 and token in prompt.text]:
        reporter.note(
            f"{prompt.name} contains {', '.join(written[:MAX_LISTED])}, which is read as ordinary text and not as a "
            "special token. To give special tokens, write the messages of a conversation and use `chat`."
        )
    text = prompt.text
    if data is not None and data.is_plain_text:  # whose lines end like those of the training text
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = drop_unknown(text, tokenizer, prompt.config, prompt.name, reporter)
    ids = [int(i) for i in tokenizer.encode(text)] if text else []
    begins = tokenizer.bos_id is not None
    if len(ids) + begins > max(1, context - 1):
        bos = tokenizer.special.bos
        count = f"{len(ids)} tokens{f' and {bos} before them' if begins else ''}"
        message = f"{prompt.name} has {count}, and the context of {context} has no room for them and the next token"
        if prompt.config.strict:
            raise UsageError(f"{message}; shorten it, or leave out `strict` to use its last tokens.")
        reporter.warn(f"{message}: only {f'{bos} and ' if begins else ''}its last tokens are used.")
    return EncodedPrompt(text, ids, start_tokens(tokenizer, data, ids, context))


def start_tokens(tokenizer: Tokenizer, data: DataConfig | None, prompt: Sequence[int], context: int) -> list[int]:
    """The ids to generate from, at least one: those of the prompt or, for an empty one, `empty_start`.

    Of a prompt that leaves no room in the context for the next token, only the end is used. If the tokenizer has a
    token that begins documents (`bos_id`), it begins every prompt.
    """
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *prompt[max(0, len(prompt) + 2 - context) :]]
    return list(prompt[-max(1, context - 1) :]) if prompt else empty_start(tokenizer, data)


def empty_start(tokenizer: Tokenizer, data: DataConfig | None) -> list[int]:
    """What precedes a text or a line in the training text `data`, to generate from without a prompt.

    The end-of-text token separates documents. A text of one document, or of a few long ones, does not teach it, so a
    line break is used or, in a text without lines, the end of a sentence. Without a record of the training text, the
    model comes from another tool and starts with its BOS token.
    """
    if data is None and tokenizer.start_id is not None:
        return [tokenizer.start_id]
    separators = 0 if data is None else data.documents - 1
    line_breaks = None if data is None or not data.is_plain_text else data.line_breaks
    if separators > 0 and (line_breaks is None or separators >= min(LEARNED, line_breaks)):
        return [tokenizer.end_of_text_id]
    ends = [". ", " "] if tokenizer.kind == "char" else ["."]  # in other tokenizers, the space belongs to the next word
    if line_breaks is None or line_breaks >= LEARNED:
        ends.insert(0, "\n")
    known = next((end for end in ends if not tokenizer.unknown_characters(end)), None)
    return [tokenizer.end_of_text_id] if known is None else [int(i) for i in tokenizer.encode(known)]


def drop_unknown(text: str, tokenizer: Tokenizer, policy: PromptPolicy, name: str, reporter: Reporter) -> str:
    """The text without the characters that are not in the vocabulary; reports a warning if there are any.

    name: name of the text in messages. Raises UsageError for such characters unless the policy skips them.
    """
    unknown = tokenizer.unknown_characters(text)
    if not unknown:
        return text
    if policy.unknown == "error":
        index = text.index(unknown[0])
        raise UsageError(
            f"{name} has a character that is not in the vocabulary: {describe_characters(unknown[0])} at offset "
            f"{index}. {_replacement(text, index, tokenizer)}, or leave such characters out with "
            '`unknown="skip"`.'
        )
    reporter.warn(f"{name}: skipped characters that are not in the vocabulary: {describe_characters(unknown)}.")
    return "".join(character for character in text if character not in unknown)


def _replacement(text: str, index: int, tokenizer: Tokenizer) -> str:
    """What to write for the unknown character at `index`, as the beginning of a sentence: another form of it and of the
    marks that belong to it, or a similar character, if the vocabulary has that.
    """
    first, end = index, index + 1
    while first and _continues(text[first]):
        first -= 1
    while end < len(text) and _continues(text[end]):
        end += 1
    written = text[first:end]
    forms = [(name, unicodedata.normalize(form, written)) for form, name in NORMAL_FORMS.items()]
    similar = [("", other) for group in SIMILAR for other in group if written in group]
    for name, form in (*forms, *similar):
        if form and not tokenizer.unknown_characters(form):
            return (
                f"The model knows {name}{describe_characters(form)}: write {form!r} in place of "
                f"{describe_characters(written)}"
            )
    return "Replace it"


def _continues(character: str) -> bool:
    """Whether a character belongs to the one before it: a combining mark, or a Hangul vowel or final consonant."""
    return unicodedata.combining(character) > 0 or "\u1160" <= character <= "\u11ff"


def decode_utf8(data: bytes, name: str) -> str:
    """Decode UTF-8. name: name of the text in messages. Raises UsageError for bytes that are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not valid UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start}); convert it "
            "to UTF-8."
        ) from None


def parse_prompts(text: str, format: str, config: GenerationConfig, name: str = "The prompt") -> list[Prompt]:
    """The prompts in a text, by its format: text (one prompt), lines, or jsonl, whose lines can change settings.

    config: the settings, unless a line changes them. name: name of the text in messages.

    Raises UsageError for an unknown format, for a line, a key or a value that cannot be used, and for jsonl without
    prompts.
    """
    match format:
        case "text":
            return [Prompt(text, config)]
        case "lines":
            lines = [line.removesuffix("\r") for line in text.split("\n")]
            return [Prompt(line, config, f"{name}, line {number}") for number, line in enumerate(lines, start=1)]
        case "jsonl":
            prompts = [
                _parse_line(line, f"{name}, line {number}", config)
                for number, line in enumerate(text.split("\n"), start=1)
                if line.strip()
            ]
            require(bool(prompts), f"{name} has no prompt in it; write one per line.")
            return prompts
    raise UsageError(f"`format` is {describe_value(format)}; it must be one of: {', '.join(FORMATS)}.")


def require_plain_text(text: str, name: str) -> None:
    """Raise UsageError for a text of JSON objects only, which may be prompts whose format was not given."""
    lines = [line for line in text.split("\n") if line.strip()]
    as_text = 'as a single prompt with `format="text"`'
    if lines and all(isinstance(_json_or_none(line), dict) for line in lines):
        raise UsageError(f'{name} looks like JSONL; read it with `format="jsonl"`, or {as_text}.')
    if text.lstrip().startswith(("[", "{")) and isinstance(value := _json_or_none(text), (dict, list)):
        objects = [value] if isinstance(value, dict) else value
        if objects and all(isinstance(item, dict) for item in objects):
            raise UsageError(
                f'{name} looks like JSON; write one object per line for `format="jsonl"`, or read it {as_text}.'
            )


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parse_line(line: str, location: str, config: GenerationConfig) -> Prompt:
    """A line of JSONL as a prompt. A key whose value is null counts as absent."""
    record = parse_json_line(line, location)
    values = {key: value for key, value in record.items() if value is not None} if isinstance(record, dict) else {}
    if not isinstance(values.get("prompt"), str) and "messages" not in values:
        raise UsageError(f"{location}: expected an object with a string under 'prompt', or with 'messages'.")
    types = {name: type_ for name, type_ in typing.get_type_hints(GenerationConfig).items() if name in LINE_SETTINGS}
    known = ("prompt", "messages", "tools", "adapter", *types)
    unknown = [describe_value(key) for key in record if key not in known]
    if unknown:
        raise UsageError(f"{location}: unknown key {', '.join(unknown)}; the known ones are: {', '.join(known)}.")
    chat = {key: values.pop(key) for key in ("messages", "tools") if key in values}
    conversation = parse_conversation(chat, location) if chat else None
    require(conversation is None or "prompt" not in values, f"{location}: give either 'prompt' or 'messages'.")
    text = require_encodable(values.pop("prompt", ""), location)
    adapter = values.pop("adapter", None)
    is_string = isinstance(adapter, str | None)
    require(is_string, f"{location}: 'adapter' is {describe_value(adapter)}; it must be a string.")
    settings = {key: _parse_setting(key, value, types[key], location) for key, value in values.items()}
    try:
        config = replace(config, **settings)
    except UsageError as error:
        raise UsageError(f"{location}: {error}") from error
    return Prompt(text, config, location, frozenset(settings), adapter, conversation)


def _parse_setting(key: str, value: Any, type_: Any, location: str) -> Any:
    subject = f"{location}: {key!r}"
    if type_ == tuple[str, ...]:
        strings = tuple(value) if isinstance(value, list) else (value,)
        are_strings = all(isinstance(string, str) for string in strings)
        require(are_strings, f"{subject} is {describe_value(value)}; it must be a string or a list of strings.")
        require("" not in strings, f"{subject} is empty; give the text to stop at, or leave it out.")
        return strings
    if key == "json_schema":
        require(isinstance(value, dict), f"{subject} is {describe_value(value)}; it must be an object.")
        return value
    numbers, name = (int, "a whole number") if type_ is int else ((int, float), "a number")
    is_number = isinstance(value, numbers) and not isinstance(value, bool)
    require(is_number, f"{subject} is {describe_value(value)}; it must be {name}.")
    limits = limits_of(GenerationConfig)[key]
    assert isinstance(limits, Range)
    require(limits.contains(value), f"{subject} is {describe_value(value)}; it must be {limits}.")
    return value


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
