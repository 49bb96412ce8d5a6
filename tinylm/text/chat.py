"""Conversations, read from JSON objects or Parquet rows with `messages`, or with `prompt` and `completion`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinylm.errors import UsageError
from tinylm.text.compression import Progress, no_progress
from tinylm.text.readers import records, require_encodable
from tinylm.validation import describe_value

ROLES = ("system", "user", "assistant", "tool")
KEYS = ("messages", "prompt", "completion", "tools")  # of the JSON object of a conversation
MAX_MESSAGES = 10_000  # of a conversation
MAX_NESTING = 100  # levels of the values in a message or a tool


@dataclass(frozen=True)
class Conversation:
    """Messages in order, each with `role`, `content` and any other keys that the template uses.

    tools: descriptions of the functions that the model may call, which the template renders.
    location: the file, and the line, element or row, of the conversation, for messages.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    location: str = "The conversation"

    def answers(self) -> list[int]:
        """The indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def map_contents(self, function: Any) -> "Conversation | None":
        """A copy with the function applied to each content; `None` if a non-empty content becomes empty."""
        messages = tuple({**message, "content": function(message["content"])} for message in self.messages)
        emptied = any(old["content"] and not new["content"] for old, new in zip(self.messages, messages, strict=True))
        return None if emptied else replace(self, messages=messages)


def read_conversations(file: Path, encoding: str, progress: Progress = no_progress) -> Iterator[Conversation]:
    """Yield the conversations of a file: JSONL, a JSON array or Parquet.

    `progress` receives the number of bytes read from the disk. Raises UsageError, with the location, for a record that
    is not a conversation, and as `records` does.
    """
    for location, record in records(file, encoding, KEYS, progress):
        yield parse_conversation(record, location)


def parse_conversation(record: Any, location: str) -> Conversation:
    """The conversation in a JSON value. Keys of the object other than KEYS are ignored.

    A `prompt` and its `completion` become a user's and an assistant's message. Raises UsageError, with the location,
    for a value that is not an object with the right keys, for a message with an unknown role, for one without text that
    is neither a tool's message nor a tool call, and for a lone surrogate.
    """
    if not isinstance(record, dict):
        raise UsageError(f"{location}: expected an object with 'messages', but found {describe_value(record)}.")
    pair = "prompt" in record or "completion" in record
    if pair == ("messages" in record):
        found = "both" if pair else f"neither (but {', '.join(map(describe_value, list(record)[:5])) or 'nothing'})"
        raise UsageError(f"{location}: expected either 'messages', or 'prompt' and 'completion'; found {found}.")
    entries = _from_pair(record, location) if pair else record["messages"]
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_MESSAGES:
        raise UsageError(
            f"{location}: 'messages' must be a list of 1 to {MAX_MESSAGES:,} messages, but is "
            f"{'empty' if entries == [] else describe_value(entries)}."
        )
    messages = tuple(_message(entry, f"{location}, message {number}") for number, entry in enumerate(entries, start=1))
    return Conversation(messages, _tools(record.get("tools"), location), location)


def _from_pair(record: dict[str, Any], location: str) -> list[dict[str, Any]]:
    for key in ("prompt", "completion"):
        if key not in record:
            raise UsageError(f"{location}: there is no {key!r}; a line has both 'prompt' and 'completion'.")
        text = record[key]
        if not isinstance(text, str):
            raise UsageError(f"{location}: {key!r} is {describe_value(text)}; it must be a text.")
        if not text.strip():
            raise UsageError(f"{location}: {key!r} is empty; give it a text, or leave the line out.")
    return [
        {"role": "user", "content": record["prompt"]},
        {"role": "assistant", "content": record["completion"]},
    ]


def _message(entry: Any, location: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise UsageError(
            f"{location}: expected an object with 'role' and 'content', but found {describe_value(entry)}."
        )
    role = entry.get("role")
    if not isinstance(role, str) or role not in ROLES:
        found = "is missing" if "role" not in entry else f"is {describe_value(role)}"
        raise UsageError(f"{location}: 'role' {found}; it must be one of: {', '.join(ROLES)}.")
    content = entry.get("content")
    calls = role == "assistant" and bool(entry.get("tool_calls"))
    if content is None and calls:
        content = ""
    if content is None:
        raise UsageError(f"{location}: the {role}'s message has no 'content'.")
    if not isinstance(content, str):
        raise UsageError(
            f"{location}: 'content' is {describe_value(content)}; only texts are supported, no images and no lists of "
            "parts."
        )
    if not content.strip() and role != "tool" and not calls:
        raise UsageError(f"{location}: the {role}'s 'content' is empty; give it a text, or leave the message out.")
    _require_usable_values(entry, location)
    return {**entry, "content": content}


def _tools(value: Any, location: str) -> tuple[dict[str, Any], ...] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UsageError(f"{location}: 'tools' is {describe_value(value)}; it must be a list of objects.")
    _require_usable_values(value, location)
    return tuple(value)


def _require_usable_values(values: Any, location: str) -> None:
    """Raise UsageError for JSON values with a lone surrogate in a text, or nested more than MAX_NESTING levels deep."""
    level = [values]
    for _ in range(MAX_NESTING):
        for text in level:
            if isinstance(text, str):
                require_encodable(text, location)
        level = [entry for value in level for entry in _entries(value)]
        if not level:
            return
    raise UsageError(f"{location}: its values are nested more than {MAX_NESTING} levels deep; flatten them.")


def _entries(value: Any) -> list[Any]:
    """The entries of a JSON value, with the keys of an object."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else []
