"""Conversations, read from JSON objects or Parquet rows in one of several layouts.

`messages` with `role` and `content`; ShareGPT's `conversations` with `from` and `value`; `prompt` and `completion`; or
Alpaca's `instruction`, `input` and `output`. `tools` and `system` may be beside any of them.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from tinylm.config.validation import describe_value
from tinylm.errors import UsageError
from tinylm.text.readers import REFUSED_IN_CONVERSATIONS, REFUSED_IN_MESSAGES, refuse_keys, require_encodable

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # and ROLES
LAYOUTS = "'messages', 'conversations', 'prompt' and 'completion', or 'instruction' and 'output'"  # for messages
KEYS = (  # of the JSON object of a conversation
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system", "tools"),
    *("chosen", *REFUSED_IN_CONVERSATIONS),
)
MAX_MESSAGES = 10_000  # of a conversation
MAX_NESTING = 100  # levels of the values in a message or a tool


@dataclass(frozen=True)
class Conversation:
    """Messages in order, each with `role`, `content` and any other keys that the template uses.

    An answer with the `weight` 0 is not scored.

    tools: descriptions of the functions that the model may call, which the template renders.
    location: the file, and the line, element or row, of the conversation, for messages.
    is_preference: whether its last answer is one of a preference, to which `train_on` does not apply.
    unused: keys beside those of the conversation, which have no effect.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    location: str = "The conversation"
    unused: tuple[str, ...] = field(default=(), compare=False)
    is_preference: bool = field(default=False, compare=False)

    def answers(self) -> list[int]:
        """The indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def map_contents(self, function: Any) -> "Conversation | None":
        """A copy with the function applied to each content; `None` if a non-empty content becomes empty."""
        messages = tuple({**message, "content": function(message["content"])} for message in self.messages)
        emptied = any(old["content"] and not new["content"] for old, new in zip(self.messages, messages, strict=True))
        return None if emptied else replace(self, messages=messages)


def parse_conversation(record: Any, location: str) -> Conversation:
    """The conversation in a JSON value. Keys whose value is null count as absent.

    A `prompt` and its `completion`, or an `instruction` (with its `input` after an empty line) and its `output`, become
    a user's and an assistant's message, and `system` the first message. Raises UsageError, with the location, for a
    value that is not an object with the right keys, for a key that is refused, for a message with an unknown role or
    weight, for one without text that is neither a tool's message nor a tool call, and for a lone surrogate.
    """
    if not isinstance(record, dict):
        raise UsageError(f"{location}: expected an object with 'messages', but found {describe_value(record)}.")
    record = {key: value for key, value in record.items() if value is not None}
    both = {"chosen", "rejected"} <= record.keys()  # with `messages` of their own beside them, as in UltraFeedback
    refuse_keys({**record, "rejected": None} if both else record, REFUSED_IN_CONVERSATIONS, location)
    entries, used = _entries_of(record, location)
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_MESSAGES:
        raise UsageError(
            f"{location}: '{used[0]}' must be a list of 1 to {MAX_MESSAGES:,} messages, but is "
            f"{'empty' if entries == [] else describe_value(entries)}."
        )
    messages = [parse_message(entry, f"{location}, message {number}") for number, entry in enumerate(entries, start=1)]
    if record.get("system"):
        if messages[0]["role"] == "system":
            raise UsageError(f"{location}: 'system' stands beside a system message; leave one of them out.")
        messages.insert(0, parse_message({"role": "system", "content": record["system"]}, f"{location}, 'system'"))
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if "prompt" not in used and "prompt" in record and record["prompt"] not in asked:
        raise UsageError(f"{location}: 'prompt' is none of the user's messages; leave it out, or make it one of them.")
    tools = record.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(f"{location}: 'tools' is {describe_value(tools)}; it must be a list of objects.")
    _require_usable_values(tools, location)
    unused = tuple(key for key in record if key not in (*used, "system", "tools"))
    return Conversation(tuple(messages), tuple(tools) or None, location, unused)


def _entries_of(record: dict[str, Any], location: str) -> tuple[Any, tuple[str, ...]]:
    """The messages of a record, as they are written, and the keys that they were taken from."""
    found: list[tuple[str, ...]] = [(key,) for key in ("messages", "conversations") if key in record]
    if "completion" in record or ("prompt" in record and not found):
        found.append(("prompt", "completion"))
    if "instruction" in record or ("output" in record and not found):
        found.append(("instruction", "output"))
    if {"chosen", "rejected"} <= record.keys() and found in ([], [("prompt", "completion")]):
        raise UsageError(f'{location}: this is a preference, not a conversation; read it with `format="preferences"`.')
    if len(found) != 1:
        held = ", ".join(map(describe_value, list(record)[:5])) or "nothing"
        problem = f"both {found[0][-1]!r} and {found[1][-1]!r}" if found else f"none of them (but {held})"
        raise UsageError(f"{location}: expected {LAYOUTS}; found {problem}.")
    (keys,) = found
    if len(keys) == 1:
        return record[keys[0]], keys
    texts = {key: _text_under(record, key, keys, location) for key in keys}
    question = texts[keys[0]]
    if keys[0] == "instruction":
        keys = (*keys, "input")
        given = record.get("input", "")
        if not isinstance(given, str):
            raise UsageError(f"{location}: 'input' is {describe_value(given)}; it must be a text.")
        question = f"{question}\n\n{given}" if given.strip() else question
    return [{"role": "user", "content": question}, {"role": "assistant", "content": texts[keys[1]]}], keys


def _text_under(record: dict[str, Any], key: str, keys: tuple[str, ...], location: str) -> str:
    if key not in record:
        raise UsageError(f"{location}: there is no {key!r}; a line has both {' and '.join(map(repr, keys))}.")
    text = record[key]
    if not isinstance(text, str):
        raise UsageError(f"{location}: {key!r} is {describe_value(text)}; it must be a text.")
    if not text.strip():
        raise UsageError(f"{location}: {key!r} is empty; give it a text, or leave the line out.")
    return text


def parse_message(entry: Any, location: str) -> dict[str, Any]:
    """The message of a JSON value, with `role` and `content`. Errors as for `parse_conversation`."""
    if not isinstance(entry, dict):
        raise UsageError(
            f"{location}: expected an object with 'role' and 'content', but found {describe_value(entry)}."
        )
    entry = {key: value for key, value in entry.items() if value is not None}
    if "from" in entry and "role" not in entry:
        name = entry.pop("from")
        role = SHAREGPT_ROLES.get(name, name) if isinstance(name, str) else name
        if role not in ROLES:
            names = ", ".join((*ROLES, *SHAREGPT_ROLES))
            raise UsageError(f"{location}: 'from' is {describe_value(name)}; it must be one of: {names}.")
        content = {"content": entry.pop("value")} if "value" in entry else {}
        entry = {"role": role, **content, **entry}
    role = entry.get("role")
    if not isinstance(role, str) or role not in ROLES:
        found = "is missing" if "role" not in entry else f"is {describe_value(role)}"
        raise UsageError(f"{location}: 'role' {found}; it must be one of: {', '.join(ROLES)}.")
    refuse_keys(entry, REFUSED_IN_MESSAGES, location)
    if entry.get("weight", 1) not in (0, 1):
        raise UsageError(
            f"{location}: 'weight' is {describe_value(entry['weight'])}; it must be 1, or 0 for an answer that is not "
            "scored."
        )
    calls = _calls(entry.pop("tool_calls", None), location)
    if calls:
        entry["tool_calls"] = calls
    content = entry.get("content", "" if role == "assistant" and calls else None)
    if content is None:
        raise UsageError(f"{location}: the {role}'s message has no 'content'.")
    if not isinstance(content, str):
        raise UsageError(
            f"{location}: 'content' is {describe_value(content)}; only texts are supported, no images and no lists of "
            "parts."
        )
    if not content.strip() and role != "tool" and not (role == "assistant" and calls):
        raise UsageError(f"{location}: the {role}'s 'content' is empty; give it a text, or leave the message out.")
    _require_usable_values(entry, location)
    return {**entry, "content": content}


def _calls(value: Any, location: str) -> list[Any]:
    """The calls of a message, without nulls beside their arguments. Raises UsageError for a call without a name."""
    calls = [] if value is None else value
    functions = [
        call.get("function", call) if isinstance(call, dict) else None
        for call in (calls if isinstance(calls, list) else [None])
    ]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise UsageError(f"{location}: 'tool_calls' must be a list of objects, each with the 'name' of a 'function'.")
    return _without_nulls(calls)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: entry for key, entry in value.items() if entry is not None}
        return {key: entry if key == "arguments" else _without_nulls(entry) for key, entry in kept.items()}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _require_usable_values(values: Any, location: str) -> None:
    """Raise UsageError for JSON values with a lone surrogate in a text, or nested more than MAX_NESTING levels deep."""
    level = [values]
    for _ in range(MAX_NESTING):
        for text in level:
            if isinstance(text, str):
                require_encodable(text, location)
        level = [
            entry
            for value in level
            if isinstance(value, dict | list)
            for entry in ([*value, *value.values()] if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise UsageError(f"{location}: its values are nested more than {MAX_NESTING} levels deep; flatten them.")
