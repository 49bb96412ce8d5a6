"""Conversations in JSON: each valid line is read, each malformed one has an error with its file and line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.text.templates import messages
from tinylm.errors import UsageError
from tinylm.text.chat import Conversation, parse_conversation, read_conversations

TURNS = messages(("user", "Hello"), ("assistant", "Hi!"))
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
DEEP = json.loads('{"a":' * 200 + "[1]" + "}" * 200)


def parsed(record: Any) -> Conversation:
    return parse_conversation(record, "here")


def test_messages_are_read_with_all_their_keys_and_with_tools() -> None:
    record = {"messages": [{**TURNS[0], "name": "Ann"}, TURNS[1]], "tools": TOOLS, "id": 3}
    assert parsed(record) == Conversation(({**TURNS[0], "name": "Ann"}, TURNS[1]), tuple(TOOLS), "here")
    assert parsed({"messages": TURNS, "tools": None}).tools is parsed({"messages": TURNS, "tools": []}).tools is None


def test_a_prompt_and_its_completion_are_a_users_and_an_assistants_message() -> None:
    assert parsed({"prompt": " Hello\n", "completion": " Hi!"}).messages == (
        {"role": "user", "content": " Hello\n"},
        {"role": "assistant", "content": " Hi!"},
    )


def test_an_assistant_that_calls_a_tool_needs_no_text_and_a_result_may_be_empty() -> None:
    conversation = parsed({"messages": [TURNS[0], CALL, {"role": "tool", "content": ""}, TURNS[1]]})
    assert [message["content"] for message in conversation.messages] == ["Hello", "", "", "Hi!"]
    assert conversation.messages[1]["tool_calls"] == CALL["tool_calls"]
    assert conversation.answers() == [1, 3]


MALFORMED = {
    "a list": ([1], "expected an object with 'messages'"),
    "a string": ("Hello", "expected an object with 'messages'"),
    "another object": ({"text": "a", "id": 1}, "found neither (but 'text', 'id')"),
    "an empty object": ({}, "found neither (but nothing)"),
    "both kinds": ({"messages": TURNS, "prompt": "a", "completion": "b"}, "found both"),
    "no messages": ({"messages": []}, "'messages' must be a list of 1 to 10,000 messages, but is empty"),
    "messages of another type": ({"messages": "Hello"}, "'messages' must be a list"),
    "no completion": ({"prompt": "a"}, "there is no 'completion'"),
    "no prompt": ({"completion": "a"}, "there is no 'prompt'"),
    "a prompt of messages": ({"prompt": TURNS, "completion": "a"}, "'prompt' is a list; it must be a text"),
    "an empty completion": ({"prompt": "a", "completion": " \n"}, "'completion' is empty"),
    "a message of another type": ({"messages": [TURNS[0], "Hi!"]}, "message 2: expected an object with 'role'"),
    "no role": ({"messages": [{"content": "a"}]}, "message 1: 'role' is missing; it must be one of: system, user"),
    "an unknown role": ({"messages": [TURNS[0], {"role": "bot", "content": "a"}]}, "message 2: 'role' is 'bot'"),
    "a role of another type": ({"messages": [{"role": ["user"], "content": "a"}]}, "'role' is a list"),
    "no content": ({"messages": [{"role": "user"}]}, "message 1: the user's message has no 'content'"),
    "a null content": ({"messages": [TURNS[0], {"role": "assistant", "content": None}]}, "the assistant's message has"),
    "a number": ({"messages": [{"role": "user", "content": 3}]}, "'content' is 3; only texts are supported"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'content' is a list; only texts"),
    "an empty turn": ({"messages": [{"role": "user", "content": ""}]}, "the user's 'content' is empty"),
    "a blank answer": (
        {"messages": [TURNS[0], {"role": "assistant", "content": " \n"}]},
        "the assistant's 'content' is",
    ),
    "an empty system turn": ({"messages": [{"role": "system", "content": ""}, *TURNS]}, "the system's 'content' is"),
    "tools of another type": ({"messages": TURNS, "tools": "add"}, "'tools' is 'add'; it must be a list of objects"),
    "a tool of another type": (
        {"messages": TURNS, "tools": ["add"]},
        "'tools' is a list; it must be a list of objects",
    ),
    "half a surrogate pair": ({"messages": [{"role": "user", "content": "a\ud800"}]}, "a lone surrogate"),
    "half a pair in a tool": ({"messages": TURNS, "tools": [{"name": "\ud800"}]}, "a lone surrogate"),
    "deep values in a message": ({"messages": [{**TURNS[0], "extra": DEEP}]}, "nested more than 100 levels deep"),
    "deep values in a tool": ({"messages": TURNS, "tools": [{"parameters": DEEP}]}, "nested more than 100 levels deep"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_line_is_an_error_with_file_and_line(name: str, tmp_path: Path) -> None:
    record, problem = MALFORMED[name]
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n\n" + json.dumps(record) + "\n")
    with pytest.raises(UsageError) as caught:
        list(read_conversations(file, "utf-8"))
    assert problem in str(caught.value)
    assert "chat.jsonl, line 3" in str(caught.value)


def test_a_line_that_is_not_json_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n{'messages': []}\n")
    with pytest.raises(UsageError, match=r"chat.jsonl, line 2: invalid JSON"):
        list(read_conversations(file, "utf-8"))


def test_compressed_files_and_json_arrays_are_read_as_lines_are(tmp_path: Path) -> None:
    records = [{"messages": TURNS}, {"prompt": "a", "completion": "b"}]
    lines, array = tmp_path / "lines.jsonl.gz", tmp_path / "array.json"
    lines.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    array.write_text(json.dumps(records, indent=1))
    read = [[c.messages for c in read_conversations(file, "utf-8")] for file in (lines, array)]
    assert read[0] == read[1] == [parsed(record).messages for record in records]
