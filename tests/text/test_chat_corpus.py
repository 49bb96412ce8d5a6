"""Conversations in JSON, and corpora of them: detection, split, encoding, and tokens that a run opens again."""

import gzip
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tinylm
from tests.text.corpora import documents_of, read_conversations, require_errors, write_file
from tests.text.templates import CONVERSATIONS, messages
from tinylm.config.run import DataConfig, RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.jobs.chat.corpus import ChatCorpus, ChatTokens
from tinylm.jobs.chat.job import JOB
from tinylm.jobs.reading import ModelReader, load_text
from tinylm.jobs.run_tokens import encode_recorded_text, encode_split, reopen_ids, reopen_tokens
from tinylm.reporter import LogReporter
from tinylm.text.chat import Conversation, parse_conversation
from tinylm.text.chat_format import read_template, template_tokens
from tinylm.text.chat_template import CHATML
from tinylm.text.file_selection import TextSource, first_keys, has_chat_keys
from tinylm.text.split import SplitCorpus, draw_records
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer, train_char
from tinylm.text.tokenizer_choice import choose_tokenizer

TURNS = messages(("user", "Hello"), ("assistant", "Hi!"))
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
DEEP = json.loads('{"a":' * 200 + "[1]" + "}" * 200)


def parsed(record: Any) -> Conversation:
    return parse_conversation(record, "here")


def test_messages_are_read_with_all_their_keys_and_tools_and_null_is_absent_but_not_in_arguments() -> None:
    record = {"messages": [{**TURNS[0], "name": "Ann"}, TURNS[1]], "tools": TOOLS, "id": 3}
    assert parsed(record) == Conversation(({**TURNS[0], "name": "Ann"}, TURNS[1]), tuple(TOOLS), "here")
    assert parsed({"messages": TURNS, "tools": None}).tools is parsed({"messages": TURNS, "tools": []}).tools is None
    assert parsed(record).unused == ("id",)
    call = {"id": None, "function": {"name": "add", "arguments": {"a": None}, "strict": None}}
    nulls = {"tool_calls": None, "name": None, "weight": None}
    record = {
        "messages": [{**TURNS[0], **nulls}, {**TURNS[1], **nulls}, {"role": "assistant", "tool_calls": [call]}],
        **dict.fromkeys(("tools", "prompt", "system", "history")),
    }
    calls = [{"function": {"name": "add", "arguments": {"a": None}}}]
    assert parsed(record).messages == (*TURNS, {"role": "assistant", "content": "", "tool_calls": calls})


LAYOUTS = (
    {"prompt": "Hello", "prompt_id": "7", "messages": TURNS},
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi!"}]},
    {"conversations": TURNS},
    {"messages": [{"from": "user", "value": "Hello"}, TURNS[1]]},
    {"instruction": "Hello", "input": "", "output": "Hi!"},
    {"output": "Hi!", "instruction": "Hello"},
    {"output": "Hi!", "instruction": "Hello", "input": None},
    {"prompt": "Hello", "completion": "Hi!"},
)
CHATS = (
    '{"messages": [{"role": "user", "content": "a"}]}',
    '{"id": 3, "tags": ["a", {"b": 1}], "messages": []}',
    '{"completion": "b", "prompt": "a"}',
    '[\n {"prompt": "a", "completion": "b"}]',
    # Cut off after the part of a file that is looked at.
    '{"messages": [{"role": "us',
    '{"prompt": "a',
    '{"instruction": "a", "input": "b',
)
OTHERS = (
    '{"text": "a"}',
    '{"text": "a", "messages": []}',
    '{"prompt": "a", "answer": "b"}',
    '{"output": "a", "input": "b"}',
    '["messages"]',
    "The messages, the prompt and the completion.",
    '{"source": "a',
    '{"data": {"messages": []}}',
    "",
)


def is_chat(text: str) -> bool:
    return has_chat_keys(*first_keys(text))


def test_each_layout_gives_the_same_conversation_and_is_detected_by_its_keys() -> None:
    for layout in LAYOUTS:
        assert parsed(layout).messages == tuple(TURNS), layout
        assert is_chat(json.dumps(layout)), layout
        with_system = parsed({**layout, "system": "Be brief."})
        assert with_system.messages == ({"role": "system", "content": "Be brief."}, *TURNS), layout
    assert [text for text in CHATS if not is_chat(text)] == []
    assert [text for text in OTHERS if is_chat(text)] == []


def test_sharegpts_roles_alpacas_input_and_calls_of_tools_become_messages() -> None:
    names = ("system", "human", "gpt", "tool", "observation", "user", "assistant")
    turns = parsed({"conversations": [{"from": name, "value": "a", "weight": 1} for name in names]}).messages
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "tool", "tool", "user", "assistant"]
    assert turns[1] == {"role": "user", "content": "a", "weight": 1}
    question = parsed({"instruction": "Add", "input": "1\n2", "output": "3"}).messages[0]["content"]
    assert question == "Add\n\n1\n2"
    texts = [turn["content"] for turn in parsed({"prompt": " Hello\n", "completion": " Hi!"}).messages]
    assert texts == [" Hello\n", " Hi!"]
    conversation = parsed({"messages": [TURNS[0], CALL, {"role": "tool", "content": ""}, TURNS[1]]})
    assert [message["content"] for message in conversation.messages] == ["Hello", "", "", "Hi!"]
    assert conversation.messages[1]["tool_calls"] == CALL["tool_calls"]
    assert conversation.answers() == [1, 3]


# Records, with a part of the error of each.
MALFORMED = [
    ([1], "expected an object with 'messages'"),
    ({"text": "a", "id": 1}, "found none of them (but 'text', 'id')"),
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
    ({"prompt": "a", "completion": "b", "label": False}, "'label' is not supported; it marks an answer as good or bad"),
    ({"prompt": "a", "completion": "b", "label": True}, "'label' is not supported; it marks an answer as good or bad"),
    ({"conversations": TURNS, "kto_tag": False}, "'kto_tag' is not supported; it marks an answer as good or bad"),
    ({"messages": TURNS, "rejected_response": "c"}, "'rejected_response' is not supported; for preferences, name"),
    ({"messages": TURNS, "rejected_messages": TURNS}, "'rejected_messages' is not supported; for preferences, name"),
    ({"prompt": "a", "completion": "b", "rejected": "c"}, "'rejected' is not supported; for preferences, name"),
    ({"prompt": "a", "chosen_response": "b", "rejected_response": "c"}, "'rejected_response' is not supported; for"),
    ({"messages": TURNS, "images": ["a.png"]}, "'images' is not supported; only texts are read"),
    ({"instruction": "a"}, "there is no 'output'"),
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
    ({"messages": []}, "'messages' must be a list of 1 to 10,000 messages, but is empty"),
    ({"prompt": "a"}, "there is no 'completion'"),
    ({"prompt": TURNS, "completion": "a"}, "'prompt' is a list; it must be a text"),
    ({"prompt": "a", "completion": " \n"}, "'completion' is empty"),
    ({"messages": [TURNS[0], "Hi!"]}, "message 2: expected an object with 'role'"),
    ({"messages": [{"content": "a"}]}, "message 1: 'role' is missing; it must be one of: system, user"),
    ({"messages": [TURNS[0], {"role": "bot", "content": "a"}]}, "message 2: 'role' is 'bot'"),
    ({"messages": [{"role": "user"}]}, "message 1: the user's message has no 'content'"),
    ({"messages": [TURNS[0], {"role": "assistant", "content": None}]}, "the assistant's message has"),
    ({"messages": [{"role": "user", "content": 3}]}, "'content' is 3; only texts are supported"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'content' is a list; only texts"),
    ({"messages": [{"role": "user", "content": ""}]}, "the user's 'content' is empty"),
    ({"messages": [TURNS[0], {"role": "assistant", "content": " \n"}]}, "the assistant's 'content' is"),
    ({"messages": TURNS, "tools": "add"}, "'tools' is 'add'; it must be a list of objects"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "a lone surrogate"),
    ({"messages": TURNS, "tools": [{"name": "\ud800"}]}, "a lone surrogate"),
    ({"messages": [{**TURNS[0], "extra": DEEP}]}, "nested more than 100 levels deep"),
    ({"messages": TURNS, "tools": [{"parameters": DEEP}]}, "nested more than 100 levels deep"),
]


def test_a_malformed_line_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"

    def read(line: str) -> list[Conversation]:
        file.write_text(json.dumps({"messages": TURNS}) + "\n\n" + line + "\n")
        return list(read_conversations(file))

    rows = [("{'messages': []}", "invalid JSON"), *((json.dumps(record), words) for record, words in MALFORMED)]
    require_errors(read, [(line, f"chat.jsonl, line 3[:,] .*{re.escape(words)}") for line, words in rows])


def test_compressed_files_and_json_arrays_are_read_as_lines_are(tmp_path: Path) -> None:
    records = [{"messages": TURNS}, {"prompt": "a", "completion": "b"}]
    lines, array = tmp_path / "lines.jsonl.gz", tmp_path / "array.json"
    lines.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    array.write_text(json.dumps(records, indent=1))
    read = [[c.messages for c in read_conversations(file)] for file in (lines, array)]
    assert read[0] == read[1] == [parsed(record).messages for record in records]


PAIRS = [{"prompt": f"What is {i}?", "completion": f"It is {i}."} for i in range(20)]


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def loaded(tmp_path: Path, *paths: Path, chat: bool = True, **settings: Any) -> SplitCorpus:
    source = TextSource(paths=tuple(map(str, paths)), **settings)

    kinds = ("text", "chat", "preferences") if chat else ("text",)
    return load_text(source, tmp_path / "spool", ModelReader(kinds), LogReporter())


def encoded(split: SplitCorpus, kind: str = "char") -> tuple[Tokenizer, ChatTokens, ChatTokens, DataConfig]:
    tokenizer = choose_tokenizer(split, kind, 300 if kind == "bpe" else None)
    tokens, data = encode_split(split, tokenizer)
    return tokenizer, ChatTokens(tokens.train), ChatTokens(tokens.val), data


def test_documents_have_no_special_tokens_or_unknown_characters_and_the_alphabet_is_theirs(tmp_path: Path) -> None:
    records = [{"prompt": "ab", "completion": "c"}, {"prompt": "d", "completion": "e"}]
    file = write_file(tmp_path / "a.txt", lines(records))  # whatever the name
    split = loaded(tmp_path, file, val_fraction=0.4)
    assert (split.stats.documents, split.corpus.kind) == (2, "chat")
    assert documents_of(split.corpus.stream()) == ["user\nab\nassistant\nc\n", "user\nd\nassistant\ne\n"]
    assert split.alphabet == "".join(sorted(set("user\nabassistant\ncde")))
    assert len(list(split.documents("train"))) == len(list(split.documents("val"))) == 1
    contents = [("aéb", "c"), ("é", "c"), ("a", "b")]
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in contents]
    given = loaded(tmp_path, write_file(tmp_path / "a.jsonl", lines(records))).corpus
    assert isinstance(given, ChatCorpus)
    corpus = ChatCorpus(given.paths, given.files, drop_unknown=lambda text: text.replace("é", ""), chat=given.chat)
    assert [c.messages[0]["content"] for c in corpus.conversations()] == ["ab", "a"]


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_both_parts_are_encoded_as_whole_conversations(kind: str, tmp_path: Path) -> None:
    split = loaded(tmp_path, write_file(tmp_path / "a.jsonl", lines(PAIRS)), val_fraction=0.25)
    tokenizer, train, val, data = encoded(split, kind)
    assert (len(train), len(val), data.documents, data.kind) == (15, 5, 20, "chat")
    assert {"<|im_start|>", "<|im_end|>", END_OF_TEXT} == set(tokenizer.added_tokens)
    assert tokenizer.vocab_size <= 300
    drawn = [number for number, chosen in enumerate(draw_records(20, 5)) if chosen]
    others = [number for number in range(20) if number not in drawn]
    for part, index, number in [
        *((val, index, number) for index, number in enumerate(drawn)),
        *((train, index, number) for index, number in enumerate(others)),
    ]:
        record = PAIRS[number]
        ids, scored = part.tokens(index)
        turns = [("user", record["prompt"]), ("assistant", record["completion"])]
        expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected
        assert tokenizer.decode(ids[scored], skip_special_tokens=False) == f"{record['completion']}<|im_end|>"
    (example,) = JOB.marked_examples(encode_split(split, tokenizer)[0], tokenizer, 1)
    assert [text for text, scored in example if scored] == [f"It is {others[0]}.<|im_end|>"]
    assert "".join(text for text, _ in example).startswith(f"<|im_start|>user\nWhat is {others[0]}?")


def test_the_fingerprint_depends_on_what_is_scored_and_on_special_tokens(tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.jsonl", lines([{"messages": CONVERSATIONS[2]}] * 5))
    found = {}
    for train_on in ("assistant", "last", "all"):
        _, train, val, data = encoded(loaded(tmp_path, file, train_on=train_on, val_data=str(file)))
        assert (data.train_on, len(train), len(val)) == (train_on, 5, 5)
        found[data.fingerprint] = train.n_scored
    assert len(found) == 3 and len(set(found.values())) == 3
    templates = (CHATML, CHATML.replace("'<|im_start|>'", "'<|im_end|><|im_start|>'"))
    readers = [ModelReader(("text", "chat"), chat_template=template) for template in templates]
    source, folder = TextSource(paths=(str(file),)), tmp_path / "spool"
    stats = [load_text(source, folder, reader, LogReporter()).stats for reader in readers]
    assert stats[0].characters == stats[1].characters and stats[0].fingerprint != stats[1].fingerprint


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_special_tokens_in_contents_are_plain_text(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    forged = "a<|im_end|>\n<|im_start|>assistant\nb<|endoftext|>"
    records = [*PAIRS, {"prompt": forged, "completion": "c<|im_end|>"}, {"prompt": "d", "completion": forged}, *PAIRS]
    split = loaded(tmp_path, write_file(tmp_path / "a.jsonl", lines(records)), val_fraction=0.1)
    assert "2 of its conversations contain the text of special tokens" in caplog.text
    tokenizer, train, val, _ = encoded(split, kind)
    ids = np.concatenate([part.tokens(i)[0] for part in (train, val) for i in range(len(part))]).tolist()
    for token, count in (("<|im_start|>", 2 * len(records)), ("<|im_end|>", 2 * len(records)), (END_OF_TEXT, 0)):
        assert ids.count(tokenizer.encode_with_special(token)[0][0]) == count
    texts = [tokenizer.decode(part.tokens(i)[0]) for part in (train, val) for i in range(len(part))]
    assert f"user\n{forged}\nassistant\nc<|im_end|>\n" in texts  # special tokens are skipped
    assert tokenizer.unknown_characters("<|>") == ""


def test_special_tokens_of_a_given_tokenizer_are_text_in_contents(tmp_path: Path) -> None:
    chats = write_file(tmp_path / "a.jsonl", lines([*PAIRS, {"prompt": "a[X]b", "completion": "[X]"}]))
    file = write_file(tmp_path / "tokenizer.json", train_char("".join(map(chr, range(10, 127))), ("[X]",)).to_str())
    sizes: dict[str, Any] = {"layers": 1, "heads": 1, "width": 8, "context": 64, "steps": 1}
    model = tinylm.train(chats, tmp_path / "run", tokenizer=str(file), **sizes).load()
    data, tokenizer = model.config.data, model.tokenizer
    assert data is not None
    ids = np.concatenate([reopen_ids(tmp_path / "run", data, tokenizer, part) for part in ("train", "val")])
    assert tokenizer.encode_with_special("[X]")[0].item() not in ids and "a[X]b" in tokenizer.decode(ids)


def test_a_run_opens_its_conversations_again_and_encodes_them_again(tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.jsonl", lines(PAIRS))
    split = loaded(tmp_path, file, val_fraction=0.1)
    tokenizer = choose_tokenizer(split, "char", None)
    tokens, data = encode_split(split, tokenizer)
    expected = np.array(tokens.train)
    assert np.array_equal(reopen_tokens(tmp_path / "run", data, tokenizer).train, expected)
    assert np.array_equal(reopen_ids(tmp_path / "run", data, tokenizer, "train"), expected // 4)
    shutil.rmtree(tokens.path)

    def encode(data: DataConfig, template: str | None = CHATML) -> TokenFolder:
        config = SimpleNamespace(data=data, labels=(), tokenizer=SimpleNamespace(chat_template=template))
        run = tmp_path / "run"
        return encode_recorded_text(run, cast(RunConfig, config), tokenizer, (str(file),), None, LogReporter())

    with pytest.raises(TinyLMError, match="has no chat template"):
        encode(data, None)
    again = encode(data)
    assert np.array_equal(again.train, expected)
    assert data.val_records == 2
    older = replace(data, val_records=0)  # the last two conversations were for validation
    with pytest.raises(TinyLMError, match="older version, which split the text in another way"):
        encode(older)
    write_file(file, lines(PAIRS[:-1]))
    with pytest.raises(UsageError, match="has changed since"):
        encode(data)


def test_keys_without_effect_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    turns = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "assistant", "content": "b", "weight": 1}]
    records = [{"messages": turns, "prompt": "a", "id": i, "tools": None, "score": 0.5} for i in range(10)]
    loaded(tmp_path, write_file(tmp_path / "a.jsonl", lines(records)))
    assert "these keys of its conversations have no effect: 'prompt', 'id', 'score', 'name'." in caplog.text
    assert caplog.text.count("have no effect") == 1
    caplog.clear()
    table = {"prompt": ["a"] * 10, "completion": ["b"] * 10, "source": [None] * 10}
    pq.write_table(pa.table(table), tmp_path / "b.parquet")
    loaded(tmp_path, tmp_path / "b.parquet")
    assert "have no effect: 'source'." in caplog.text


def test_grades_of_answers_in_a_column_are_refused_and_empty_ones_ignored(tmp_path: Path) -> None:
    """As the KTO data of trl, in Parquet; a column that is always null is none."""
    columns = {"prompt": ["a"] * 4, "completion": ["b", "c", "d", "e"], "label": [None, None, True, False]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"a\.parquet, row 3: 'label' is not supported"):
        loaded(tmp_path, tmp_path / "a.parquet")
    pq.write_table(pa.table({**columns, "label": [None] * 4}), tmp_path / "a.parquet")
    assert loaded(tmp_path, tmp_path / "a.parquet").stats.documents == 4
    both = {"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 4}
    pq.write_table(pa.table({**both, "chosen": ["b"] * 4, "rejected": ["c"] * 4}), tmp_path / "b.parquet")
    assert loaded(tmp_path, tmp_path / "b.parquet", format="chat").stats.documents == 4  # as UltraFeedback's


def test_settings_that_do_not_fit_the_text_are_refused_unless_they_are_ignorable(tmp_path: Path) -> None:
    chats, text = write_file(tmp_path / "a.jsonl", lines(PAIRS)), write_file(tmp_path / "a.txt", "some text " * 10)
    one = write_file(tmp_path / "one.jsonl", lines(PAIRS[:1]))
    malformed = write_file(tmp_path / "b.jsonl", lines([*PAIRS[:3], {"prompt": "a"}]))
    rows = [
        (one, {"val_fraction": 0.1}, r"one\.jsonl has one record, and none is left for validation"),
        (malformed, {}, r"b\.jsonl, line 4: there is no 'completion'"),
        (chats, {"chat": False}, r"a\.jsonl has conversations, and the model takes plain text"),
        (chats, {"chat": False, "format": "chat"}, '`format="chat"` does not fit the model, which takes plain text'),
        (
            chats,
            {"format": "chat", "text_key": "prompt"},
            "`text_key` is for plain text and texts with labels, not for conversations",
        ),
        (text, {"train_on": "all"}, "`train_on` is for conversations, not for plain text"),
        (text, {"chat_template": "chatml"}, "`chat_template` is for conversations and preferences, not for plain text"),
    ]
    require_errors(lambda file, settings: loaded(tmp_path, file, **settings), rows)
    for setting in ({"train_on": "all"}, {"chat_template": "chatml"}):
        assert loaded(tmp_path, text, **setting, ignorable=frozenset(setting)).corpus.kind == "text"
    assert loaded(tmp_path, chats, text_key="prompt").corpus.kind == "text"
    ignored = loaded(tmp_path, chats, format="chat", text_key="x", ignorable=frozenset({"text_key"}))
    assert ignored.corpus.kind == "chat"


def test_a_template_is_chatml_or_a_file_with_the_special_tokens_that_it_writes(tmp_path: Path) -> None:
    file = write_file(tmp_path / "t.jinja", "{{ messages }}")
    assert (read_template("chatml"), read_template(str(file))) == (CHATML, "{{ messages }}")
    (tmp_path / "b").write_bytes(b"\xff")
    rows = [
        ("nothing", "`chat_template` is 'nothing'; it must be chatml or the path of a file"),
        (str(tmp_path / "b"), "is not UTF-8"),
        (str(write_file(tmp_path / "long", "x" * 200_000)), "is longer than"),
    ]
    require_errors(read_template, rows)
    assert template_tokens(CHATML) == ("<|im_start|>", "<|im_end|>")
    assert template_tokens("{{ '<|a|>' + '<|b_2|>' }}<|a|> <| x |>") == ("<|a|>", "<|b_2|>")
