"""Conversations in JSON: each valid line is read, each malformed one has an error with its file and line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.text.templates import messages
from tinylm.errors import UsageError
from tinylm.text.chat import Conversation, parse_conversation, read_conversations
from tinylm.text.format_detection import is_chat

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
    assert parsed(record).unused == ("id",)


def test_keys_that_are_null_are_absent_also_in_calls_but_not_in_their_arguments() -> None:
    call = {"id": None, "function": {"name": "add", "arguments": {"a": None}, "strict": None}}
    nulls = {"tool_calls": None, "name": None, "weight": None}
    record = {
        "messages": [{**TURNS[0], **nulls}, {**TURNS[1], **nulls}, {"role": "assistant", "tool_calls": [call]}],
        "tools": None,
        "prompt": None,
        "system": None,
        "history": None,
    }
    calls = [{"function": {"name": "add", "arguments": {"a": None}}}]
    assert parsed(record).messages == (*TURNS, {"role": "assistant", "content": "", "tool_calls": calls})


LAYOUTS = {
    "ultrachat": {"prompt": "Hello", "prompt_id": "7", "messages": TURNS},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi!"}]},
    "messages under sharegpt's key": {"conversations": TURNS},
    "sharegpt's names under messages": {"messages": [{"from": "user", "value": "Hello"}, TURNS[1]]},
    "alpaca": {"instruction": "Hello", "input": "", "output": "Hi!"},
    "alpaca without an input": {"output": "Hi!", "instruction": "Hello"},
    "alpaca with a null input": {"output": "Hi!", "instruction": "Hello", "input": None},
    "a prompt and a completion": {"prompt": "Hello", "completion": "Hi!"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_gives_the_same_conversation_and_is_detected(name: str) -> None:
    assert parsed(LAYOUTS[name]).messages == tuple(TURNS)
    assert is_chat(json.dumps(LAYOUTS[name]))
    with_system = parsed({**LAYOUTS[name], "system": "Be brief."})
    assert with_system.messages == ({"role": "system", "content": "Be brief."}, *TURNS)


def test_sharegpts_roles_and_alpacas_input_become_messages() -> None:
    names = ("system", "human", "gpt", "tool", "observation", "user", "assistant")
    turns = parsed({"conversations": [{"from": name, "value": "a", "weight": 1} for name in names]}).messages
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "tool", "tool", "user", "assistant"]
    assert turns[1] == {"role": "user", "content": "a", "weight": 1}
    question = parsed({"instruction": "Add", "input": "1\n2", "output": "3"}).messages[0]["content"]
    assert question == "Add\n\n1\n2"


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
    "another object": ({"text": "a", "id": 1}, "found none of them (but 'text', 'id')"),
    "an empty object": ({}, "found none of them (but nothing)"),
    "both kinds": ({"messages": TURNS, "prompt": "a", "completion": "b"}, "found both 'messages' and 'completion'"),
    "two lists": ({"messages": TURNS, "conversations": TURNS}, "found both 'messages' and 'conversations'"),
    "another prompt": ({"messages": TURNS, "prompt": "Be brief."}, "'prompt' is none of the user's messages"),
    "two system messages": (
        {"messages": [{"role": "system", "content": "a"}, *TURNS], "system": "b"},
        "'system' stands beside a system message",
    ),
    "a system of another type": ({"messages": TURNS, "system": ["b"]}, "'system': 'content' is a list"),
    "functions": ({"messages": TURNS, "functions": [{}]}, "'functions' is not supported; describe the functions under"),
    "arguments of the template": (
        {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False}},
        "'chat_template_kwargs' is not supported; write its values into a `chat_template`",
    ),
    "a history": ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history' is not supported"),
    "no output": ({"instruction": "a"}, "there is no 'output'"),
    "no instruction": ({"output": "a"}, "there is no 'instruction'"),
    "an input of another type": ({"instruction": "a", "output": "b", "input": 3}, "'input' is 3"),
    "an unknown name": ({"conversations": [{"from": "bing", "value": "a"}]}, "'from' is 'bing'; it must be one of"),
    "a name of another type": ({"conversations": [{"from": ["human"], "value": "a"}]}, "'from' is a list"),
    "a name without a text": ({"conversations": [{"from": "human"}]}, "the user's message has no 'content'"),
    "half a weight": (
        {"messages": [TURNS[0], {**TURNS[1], "weight": 0.5}]},
        "message 2: 'weight' is 0.5; it must be 1",
    ),
    "a weight of another type": ({"messages": [TURNS[0], {**TURNS[1], "weight": [0]}]}, "'weight' is a list"),
    "a mask of another format": (
        {"messages": [TURNS[0], {**TURNS[1], "train": False}]},
        "'train' is not supported; use",
    ),
    "a call of the old format": (
        {"messages": [TURNS[0], {"role": "assistant", "content": None, "function_call": {"name": "add"}}]},
        "'function_call' is not supported; put the call into 'tool_calls'",
    ),
    "a call without a name": (
        {"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "'tool_calls' must be a list of objects, each with the 'name' of a 'function'",
    ),
    "calls of another type": ({"messages": [{**TURNS[1], "tool_calls": "add"}]}, "'tool_calls' must be a list"),
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
