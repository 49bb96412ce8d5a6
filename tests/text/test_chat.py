"""Conversations in JSON: each valid line is read, each malformed one has an error with its file and line."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

from tests.text.corpora import require_errors
from tests.text.templates import messages
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


def test_each_layout_gives_the_same_conversation_and_is_detected() -> None:
    for name, layout in LAYOUTS.items():
        assert parsed(layout).messages == tuple(TURNS), name
        assert is_chat(json.dumps(layout)), name
        with_system = parsed({**layout, "system": "Be brief."})
        assert with_system.messages == ({"role": "system", "content": "Be brief."}, *TURNS), name


def test_sharegpts_roles_and_alpacas_input_become_messages() -> None:
    names = ("system", "human", "gpt", "tool", "observation", "user", "assistant")
    turns = parsed({"conversations": [{"from": name, "value": "a", "weight": 1} for name in names]}).messages
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "tool", "tool", "user", "assistant"]
    assert turns[1] == {"role": "user", "content": "a", "weight": 1}
    question = parsed({"instruction": "Add", "input": "1\n2", "output": "3"}).messages[0]["content"]
    assert question == "Add\n\n1\n2"
    texts = [turn["content"] for turn in parsed({"prompt": " Hello\n", "completion": " Hi!"}).messages]
    assert texts == [" Hello\n", " Hi!"]


def test_an_assistant_that_calls_a_tool_needs_no_text_and_a_result_may_be_empty() -> None:
    conversation = parsed({"messages": [TURNS[0], CALL, {"role": "tool", "content": ""}, TURNS[1]]})
    assert [message["content"] for message in conversation.messages] == ["Hello", "", "", "Hi!"]
    assert conversation.messages[1]["tool_calls"] == CALL["tool_calls"]
    assert conversation.answers() == [1, 3]


# Records, with a part of the error of each.
MALFORMED = [
    ([1], "expected an object with 'messages'"),
    ("Hello", "expected an object with 'messages'"),
    ({"text": "a", "id": 1}, "found none of them (but 'text', 'id')"),
    ({}, "found none of them (but nothing)"),
    ({"messages": TURNS, "prompt": "a", "completion": "b"}, "found both 'messages' and 'completion'"),
    ({"messages": TURNS, "conversations": TURNS}, "found both 'messages' and 'conversations'"),
    ({"messages": TURNS, "prompt": "Be brief."}, "'prompt' is none of the user's messages"),
    (
        {"messages": [{"role": "system", "content": "a"}, *TURNS], "system": "b"},
        "'system' stands beside a system message",
    ),
    ({"messages": TURNS, "system": ["b"]}, "'system': 'content' is a list"),
    ({"messages": TURNS, "functions": [{}]}, "'functions' is not supported; describe the functions under"),
    (
        {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False}},
        "'chat_template_kwargs' is not supported; write its values into a `chat_template`",
    ),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history' is not supported"),
    ({"instruction": "a"}, "there is no 'output'"),
    ({"output": "a"}, "there is no 'instruction'"),
    ({"instruction": "a", "output": "b", "input": 3}, "'input' is 3"),
    ({"conversations": [{"from": "bing", "value": "a"}]}, "'from' is 'bing'; it must be one of"),
    ({"conversations": [{"from": ["human"], "value": "a"}]}, "'from' is a list"),
    ({"conversations": [{"from": "human"}]}, "the user's message has no 'content'"),
    ({"messages": [TURNS[0], {**TURNS[1], "weight": 0.5}]}, "message 2: 'weight' is 0.5; it must be 1"),
    ({"messages": [TURNS[0], {**TURNS[1], "weight": [0]}]}, "'weight' is a list"),
    ({"messages": [TURNS[0], {**TURNS[1], "train": False}]}, "'train' is not supported; use"),
    (
        {"messages": [TURNS[0], {"role": "assistant", "content": None, "function_call": {"name": "add"}}]},
        "'function_call' is not supported; put the call into 'tool_calls'",
    ),
    (
        {"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "'tool_calls' must be a list of objects, each with the 'name' of a 'function'",
    ),
    ({"messages": [{**TURNS[1], "tool_calls": "add"}]}, "'tool_calls' must be a list"),
    ({"messages": []}, "'messages' must be a list of 1 to 10,000 messages, but is empty"),
    ({"messages": "Hello"}, "'messages' must be a list"),
    ({"prompt": "a"}, "there is no 'completion'"),
    ({"completion": "a"}, "there is no 'prompt'"),
    ({"prompt": TURNS, "completion": "a"}, "'prompt' is a list; it must be a text"),
    ({"prompt": "a", "completion": " \n"}, "'completion' is empty"),
    ({"messages": [TURNS[0], "Hi!"]}, "message 2: expected an object with 'role'"),
    ({"messages": [{"content": "a"}]}, "message 1: 'role' is missing; it must be one of: system, user"),
    ({"messages": [TURNS[0], {"role": "bot", "content": "a"}]}, "message 2: 'role' is 'bot'"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "'role' is a list"),
    ({"messages": [{"role": "user"}]}, "message 1: the user's message has no 'content'"),
    ({"messages": [TURNS[0], {"role": "assistant", "content": None}]}, "the assistant's message has"),
    ({"messages": [{"role": "user", "content": 3}]}, "'content' is 3; only texts are supported"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'content' is a list; only texts"),
    ({"messages": [{"role": "user", "content": ""}]}, "the user's 'content' is empty"),
    ({"messages": [TURNS[0], {"role": "assistant", "content": " \n"}]}, "the assistant's 'content' is"),
    ({"messages": [{"role": "system", "content": ""}, *TURNS]}, "the system's 'content' is"),
    ({"messages": TURNS, "tools": "add"}, "'tools' is 'add'; it must be a list of objects"),
    ({"messages": TURNS, "tools": ["add"]}, "'tools' is a list; it must be a list of objects"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "a lone surrogate"),
    ({"messages": TURNS, "tools": [{"name": "\ud800"}]}, "a lone surrogate"),
    ({"messages": [{**TURNS[0], "extra": DEEP}]}, "nested more than 100 levels deep"),
    ({"messages": TURNS, "tools": [{"parameters": DEEP}]}, "nested more than 100 levels deep"),
]


def test_a_malformed_line_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"

    def read(line: str) -> list[Conversation]:
        file.write_text(json.dumps({"messages": TURNS}) + "\n\n" + line + "\n")
        return list(read_conversations(file, "utf-8"))

    rows = [("{'messages': []}", "invalid JSON"), *((json.dumps(record), words) for record, words in MALFORMED)]
    require_errors(read, [(line, f"chat.jsonl, line 3[:,] .*{re.escape(words)}") for line, words in rows])


def test_compressed_files_and_json_arrays_are_read_as_lines_are(tmp_path: Path) -> None:
    records = [{"messages": TURNS}, {"prompt": "a", "completion": "b"}]
    lines, array = tmp_path / "lines.jsonl.gz", tmp_path / "array.json"
    lines.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    array.write_text(json.dumps(records, indent=1))
    read = [[c.messages for c in read_conversations(file, "utf-8")] for file in (lines, array)]
    assert read[0] == read[1] == [parsed(record).messages for record in records]
