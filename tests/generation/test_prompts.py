import dataclasses

import pytest

from tinylm.errors import UsageError
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import parse_prompts, start_tokens
from tinylm.run_config import DataConfig
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

CHAR = train_char("abc\n ")
BPE = train_bpe(["abab abab abcab é日本 cabba", "aab cab bca é日"] * 20, 300)
DATA = DataConfig(
    corpus=("x",),
    train_characters=9,
    fingerprint="",
    characters=10,
    bytes=10,
    documents=1,
    train_tokens=9,
    val_tokens=1,
)


@pytest.mark.parametrize("tokenizer", [CHAR, BPE], ids=["char", "bpe"])
def test_generation_starts_from_the_prompt_or_else_from_what_precedes_a_document(tokenizer: Tokenizer) -> None:
    many = dataclasses.replace(DATA, documents=2)
    assert start_tokens(tokenizer, DATA, [4, 5]) == [4, 5]
    assert start_tokens(tokenizer, DATA, []) == tokenizer.encode("\n").tolist()
    assert start_tokens(tokenizer, None, []) == tokenizer.encode("\n").tolist()
    assert start_tokens(tokenizer, many, []) == [tokenizer.end_of_text_id]


def test_generation_starts_from_the_end_of_text_token_if_the_vocabulary_has_no_newline() -> None:
    tokenizer = train_char("abc")
    assert start_tokens(tokenizer, DATA, []) == [tokenizer.end_of_text_id]


@pytest.mark.parametrize("line", ['{"messages": null}', '{"prompt": null}', "{}", "[]"])
def test_a_line_without_a_prompt_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match="line 1: expected an object with a string under 'prompt', or with 'messages'"):
        parse_prompts(line, "jsonl", GenerationConfig())
