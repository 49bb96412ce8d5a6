"""Preferences in JSON, and corpora of them: detection, encoding, and which of them can be trained on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.text.corpora import require_errors, write_file
from tests.text.test_chat_batches import chat_tokens
from tinylm.errors import TinyLMError, UsageError
from tinylm.jobs.preferences.corpus import PreferenceBatch, PreferenceCorpus, PreferenceTokens, parse_preference
from tinylm.jobs.preferences.job import JOB
from tinylm.jobs.reading import ModelReader, load_text
from tinylm.jobs.run_tokens import encode_split
from tinylm.reporter import LogReporter
from tinylm.text.file_selection import TextSource
from tinylm.text.scored_tokens import ScoredRows
from tinylm.text.tokenizer import train_char

ASK = {"role": "user", "content": "Hi"}
GOOD, BAD = {"role": "assistant", "content": "Hello."}, {"role": "assistant", "content": "Go away."}
PROMPT = [ASK, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Tell."}]
TEXTS = {"prompt": "Hi", "chosen": "Hello.", "rejected": "Go away."}


def test_an_answer_is_a_text_or_messages_with_the_prompt_or_without() -> None:
    for record in (
        TEXTS,
        {**TEXTS, "chosen": [GOOD]},
        {"prompt": [ASK], "chosen": "Hello.", "rejected": [BAD]},
        {"prompt": "Hi", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},  # as in UltraFeedback
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD], "prompt": None},
    ):
        chosen, rejected = parse_preference(record, "here")
        assert (chosen.messages, rejected.messages) == ((ASK, GOOD), (ASK, BAD)), record
    noted = [{**ASK, "name": None}, {"from": "gpt", "value": "Hello."}]  # as in columns of Parquet, and in ShareGPT
    assert parse_preference({**TEXTS, "chosen": noted}, "here")[0].messages == (ASK, GOOD)
    chosen, rejected = parse_preference({"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD], "score": 5}, "here")
    assert [message.get("weight") for message in chosen.messages] == [None, 0, None, None]
    assert (len(rejected.messages), rejected.messages[-1], rejected.unused) == (4, BAD, ("score",))
    chosen, _ = parse_preference({**TEXTS, "system": "Be kind.", "tools": [{"name": "add"}]}, "here")
    assert chosen.messages[0] == {"role": "system", "content": "Be kind."} and chosen.tools == ({"name": "add"},)
    more = {"role": "user", "content": "More"}  # the answers differ first: what follows belongs to them
    chosen, rejected = parse_preference({"prompt": "Hi", "chosen": [GOOD, more, GOOD], "rejected": [BAD, ASK, BAD]}, "")
    assert (chosen.messages[2], rejected.messages[2], chosen.is_preference) == (more, ASK, True)
    same, other = parse_preference({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "here")
    assert same.messages == other.messages == (ASK, GOOD)


def test_a_record_that_is_not_a_preference_is_an_error_with_its_place() -> None:
    rows: list[tuple[Any, ...]] = [
        ([], r"^here: expected an object with 'chosen', but found"),
        ({"prompt": "Hi", "chosen": "a"}, r"^here: there is no 'rejected'; a preference has"),
        ({"chosen": "a", "rejected": "b"}, r"^here: there is no 'prompt', to which"),
        ({**TEXTS, "prompt": ""}, "the user's 'content' is empty"),
        ({**TEXTS, "chosen": " "}, r"here, 'chosen', message 1: the assistant's 'content' is empty"),
        ({**TEXTS, "rejected": []}, r"here, 'rejected' is .*; it must be a text or a list of messages"),
        ({**TEXTS, "rejected": 3}, r"here, 'rejected' is 3; it must be a text or a list"),
        ({**TEXTS, "rejected": [{"role": "user", "content": "x"}]}, "'rejected': its messages do not begin with those"),
        ({**TEXTS, "rejected": [BAD, {"role": "user", "content": "x"}]}, "'rejected': there is no answer of the assi"),
        ({"prompt": [ASK], "chosen": [ASK], "rejected": [BAD]}, "'chosen': there is no answer of the assistant"),
        ({**TEXTS, "chosen": ["x"]}, r"'chosen', message 1: expected an object with 'role'"),
        ({**TEXTS, "prompt": []}, r"here, 'prompt' is .*; it must be a text or a list"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "the prompt has no message of the user"),
        ({**TEXTS, "chosen": [{"role": "system", "content": "x"}, ASK, GOOD]}, "do not begin with those of the prompt"),
        ({**TEXTS, "history": ["x"]}, "'history' is not supported"),
        ({**TEXTS, "images": ["a.png"]}, "'images' is not supported; only texts are read"),
        ({**TEXTS, "rejected_response": "x"}, "'rejected_response' is not supported; for preferences, name"),
        (
            {"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT[:2], ASK, BAD]},
            "^here: 'chosen' and 'rejected' answer different messages, 'Tell.' and 'Hi'; give both the same prompt",
        ),
        ({"prompt": PROMPT[:2], "chosen": [GOOD], "rejected": [BAD]}, "the prompt ends with an answer of the assi"),
    ]
    require_errors(lambda record: parse_preference(record, "here"), rows)


def loaded(path: Path, **settings: Any) -> Any:
    reader = ModelReader(("text", "chat", "preferences"))
    return load_text(TextSource(paths=(str(path),), **settings), path.parent, reader, LogReporter())


def test_preferences_are_found_split_in_pairs_and_encoded_with_scored_answers(tmp_path: Path) -> None:
    records = [{"prompt": f"Say {i}", "chosen": f"{i}", "rejected": f"no {i}"} for i in range(20)]
    split = loaded(write_file(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records))), val_fraction=0.2)
    assert (split.corpus.kind, split.val_records, split.stats.documents) == ("preferences", 4, 40)
    tokenizer = train_char(
        split.alphabet, tuple(t for t in split.corpus.rendering.special_tokens if t != "<|endoftext|>")
    )
    tokens, data = encode_split(split, tokenizer)
    train, val = PreferenceTokens(tokens.train), PreferenceTokens(tokens.val)
    assert (data.kind, len(train), len(val)) == ("preferences", 32, 8)
    ids, scored = val.tokens(1)
    assert tokenizer.decode(ids[scored], skip_special_tokens=False) in {f"no {i}<|im_end|>" for i in range(20)}
    prompts = [
        tokenizer.decode(ids[~scored], skip_special_tokens=False) for ids, scored in map(train.tokens, range(32))
    ]
    assert prompts[::2] == prompts[1::2] and len(set(prompts)) == 16


def test_preferences_among_conversations_and_settings_of_conversations_are_errors(tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.jsonl", json.dumps(TEXTS) + "\n" + json.dumps(TEXTS))
    with pytest.raises(UsageError, match="`train_on` is for conversations, not for preferences"):
        loaded(file, train_on="last")
    ignored = loaded(file, train_on="all", ignorable=frozenset({"train_on"})).corpus  # from the environment
    assert ignored.rendering.train_on == "assistant"
    with pytest.raises(UsageError, match=r'line 1: this is a preference, .* with `format="preferences"`'):
        loaded(file, format="chat")
    chat = write_file(tmp_path / "b.jsonl", json.dumps({"messages": [ASK, GOOD]}))
    with pytest.raises(UsageError, match=r"b.jsonl, line 1: there is no 'chosen'"):
        loaded(chat, format="preferences")
    assert isinstance(loaded(file, format="preferences").corpus, PreferenceCorpus)
    both = json.dumps({"messages": [ASK, GOOD], **TEXTS})  # as in UltraFeedback
    assert loaded(write_file(tmp_path / "c.jsonl", both + "\n" + both), format="chat").corpus.kind == "chat"
    long = {"chosen": [{**ASK, "content": "x" * 20_000}, GOOD]}
    long["rejected"] = [*long["chosen"][:1], BAD]
    lines = "\n".join([json.dumps(long)] * 2)
    assert loaded(write_file(tmp_path / "d.jsonl", lines)).corpus.kind == "preferences"


A = [(1, False), (2, False), (3, True), (4, True)]  # a prompt of two tokens and an answer of two
B = [(1, False), (2, False), (3, True), (5, True)]  # differs from A in its last token
C = [(1, False), (2, False), (6, True)]


def preferences(*conversations: list[tuple[int, bool]]) -> PreferenceTokens:
    return PreferenceTokens(chat_tokens(*conversations)._codes)


def test_preferences_that_are_equal_or_lose_what_differs_in_the_context_are_left_out() -> None:
    tokens = preferences(A, A, A, B, A, C, C, [*C, (7, True)])
    assert tokens.examples(8).tolist() == [[2, 3], [4, 5], [6, 7]]  # the last answer goes on after the other
    assert tokens.examples(2).tolist() == [[4, 5]]  # A and B differ in token 3, and the last pair too
    assert tokens.examples(1).tolist() == []
    assert tokens.describe_left_out(8, "training") == [
        "1 of 4 training preferences are left out: both answers are equal."
    ]
    assert tokens.describe_left_out(2, "training")[1] == (
        "4 of 4 training preferences are cut to the context of 2 tokens (the longest has 3); 2 of them lose an answer, "
        "or what differs, and are left out."
    )
    silent = [(1, False), (2, False), (3, False)]
    assert preferences(A, silent, A, B).describe_left_out(8, "training") == [
        "1 of 2 training preferences are left out: nothing in an answer is scored."
    ]
    tokens.require_examples(2, "training")
    for few, context in ((tokens, 1), (preferences(A, A), 8), (preferences(), 8)):
        with pytest.raises(UsageError, match="No training preference has two different answers"):
            few.require_examples(context, "training")
    with pytest.raises(TinyLMError, match="its 3 conversations are not pairs"):
        preferences(A, B, C)


def test_an_excerpt_has_whole_preferences_and_at_least_one() -> None:
    """With a huge model, the excerpt of other data has its first 1,000 tokens."""
    tokenizer, codes = train_char("abc"), preferences(*[A, C] * 300)._codes
    assert len(JOB.excerpt(tokenizer, codes, 10**15)) == 994  # 142 preferences of seven tokens
    assert len(JOB.excerpt(tokenizer, codes[:70], 10**15)) == 70
    long = [(1, False)] * 900 + [(2, True)]
    assert len(JOB.excerpt(tokenizer, preferences(long, long, A, B)._codes, 10**15)) == 1802


def test_a_preference_stays_in_one_row_packed_or_not_and_a_row_may_be_longer_than_the_context() -> None:
    tokens = preferences(A, B, A, C, C, A)
    single = ScoredRows(tokens, context=3, packed=False)
    assert [row.tolist() for row in single.rows] == [[0, 1], [2, 3], [4, 5]] and single.width == 6
    batch = single.batch([0, 1])
    assert isinstance(batch, PreferenceBatch) and batch.segments is not None and batch.mask is not None
    assert batch.ids.tolist() == [[1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 0]]
    assert batch.segments.tolist() == [[1, 1, 1, 2, 2, 2], [1, 1, 1, 2, 2, 0]]
    assert batch.targets[batch.mask].tolist() == [3, 4, 3, 5, 3, 4, 6]
    assert (batch.n_targets, batch.n_tokens, [part.n_targets for part in batch.split(1)]) == (2, 11, [1, 1])
    packed = ScoredRows(tokens, context=600, packed=True)
    assert (len(packed), packed.width, packed.batch([0]).n_targets) == (1, 512, 3)
    assert sorted(np.concatenate(packed.rows).tolist()) == list(range(6))
