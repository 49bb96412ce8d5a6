import dataclasses
import re

import pytest
import tokenizers
from tokenizers import models

from tinylm.config.run import DataConfig, SpecialTokens
from tinylm.errors import UsageError
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import Prompt, encode_prompt, parse_prompts, start_tokens
from tinylm.reporter import SilentReporter
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

CHAR = train_char("abc\n ")
BPE = train_bpe(["abab abab abcab é日本 cabba", "aab cab bca é日"] * 20, 300)


def _library() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(["</s>", "<s>", *"abc"])}, []))
    library.add_special_tokens(["</s>", "<s>"])
    return library


class Recorder(SilentReporter):
    """Keeps notes and warnings."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)


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


BOS = Tokenizer(_library(), SpecialTokens(end_of_text="</s>", bos="<s>", add_bos=True))
PLAIN_BOS = Tokenizer(_library(), SpecialTokens(end_of_text="</s>", bos="<s>"))


def test_without_a_prompt_generation_starts_from_what_precedes_a_text_a_line_or_a_sentence() -> None:
    without_lines, words, letters = (train_char(text) for text in ("abc. ", "abc ", "ACGT"))
    table = [  # tokenizer, documents, line breaks, expected
        (CHAR, 1, 50, "\n"),
        (BPE, 1, 50, "\n"),
        (CHAR, 1, None, "\n"),
        (BPE, 1, None, "\n"),  # the record of an older version
        (BPE, 2, None, None),
        (BPE, 21, 10_000, None),  # the end-of-text token
        (BPE, 3, 10_000, "\n"),  # a few books
        (BPE, 3, 1, None),  # a few lines
        (BPE, 1, 1, "."),  # one line
        (without_lines, 1, 0, ". "),
        (words, 1, 0, " "),
        (letters, 1, 0, None),
    ]
    wrong = []
    for tokenizer, documents, line_breaks, expected in table:
        data = dataclasses.replace(DATA, documents=documents, line_breaks=line_breaks)
        ids = [tokenizer.end_of_text_id] if expected is None else tokenizer.encode(expected).tolist()
        if start_tokens(tokenizer, data, [], 8) != ids or start_tokens(tokenizer, data, [4, 5], 8) != [4, 5]:
            wrong.append((documents, line_breaks, expected))
    assert not wrong


def test_models_of_other_tools_start_from_their_bos_token() -> None:
    assert start_tokens(PLAIN_BOS, None, [], 8) == start_tokens(BOS, None, [], 8) == [1]
    assert start_tokens(PLAIN_BOS, None, [4, 5], 8) == [4, 5]
    assert start_tokens(BPE, None, [], 8) == BPE.encode("\n").tolist()


def test_bos_and_the_end_of_a_prompt_that_does_not_fit_with_it_are_kept() -> None:
    for text in ("ab", "abc", "abca", "abcabcab"):
        ids, reporter = BOS.encode(text).tolist(), Recorder()
        encoded = encode_prompt(Prompt(text), BOS, 4, None, reporter)
        assert encoded.ids == ids
        if len(text) <= 2:
            assert (encoded.start, reporter.warnings) == ([1, *ids], [])
            continue
        assert encoded.start == [1, *ids[-2:]]
        message = f"The prompt has {len(text)} tokens and <s> before them, and the context of 4 has no room"
        message += " for them and the next token"
        assert reporter.warnings == [f"{message}: only <s> and its last tokens are used."]
        with pytest.raises(UsageError, match=re.escape(message)):
            encode_prompt(Prompt(text, GenerationConfig(strict=True)), BOS, 4, None, reporter)


def test_special_tokens_that_a_prompt_writes_are_named_in_a_note() -> None:
    reporter = Recorder()
    encode_prompt(Prompt("a</s>b<s>", GenerationConfig(unknown="skip")), BOS, 64, None, reporter)
    (note,) = reporter.notes
    assert note.startswith("The prompt contains </s>, <s>, which is read as ordinary text") and "`chat`" in note
    encode_prompt(Prompt("ab"), BOS, 64, None, reporter)
    assert len(reporter.notes) == 1


def test_the_error_for_an_unknown_character_names_a_form_that_the_model_knows() -> None:
    table = [  # known characters, prompt, message
        ("aé", "ae\u0301", "The model knows its composed form (NFC), 'é' (U+00E9): write 'é' in place of"),
        ("ae\u0301", "aé", "knows its decomposed form (NFD), 'e' (U+0065), '\u0301' (U+0301): write"),
        ("한", "\u1112\u1161\u11ab", "its composed form (NFC), '한' (U+D55C)"),
        ("a ", "a\xa0a", "knows ' ' (U+0020): write ' ' in place of '\\xa0' (U+00A0)"),
        ("aA", "aＡ", "knows 'A' (U+0041)"),
        ("fi", "ﬁ", "knows 'f' (U+0066), 'i' (U+0069): write 'fi'"),
        ("a'", "a’", 'knows "\'" (U+0027)'),
        ("a’", "a'", "knows '’' (U+2019)"),
        ('a"', "“a", "knows '\"' (U+0022)"),
        ("a.", "a…", "write '...' in place of '…' (U+2026)"),
        ("a", "aß", "'ß' (U+00DF) at offset 1. Replace it, or leave"),
        ("a", "a\u0301", "'\u0301' (U+0301) at offset 1. Replace it, or leave"),
    ]
    wrong = []
    for known, prompt, message in table:
        with pytest.raises(UsageError) as error:
            encode_prompt(Prompt(prompt), train_char(known), 64, None, Recorder())
        wrong += [] if message in str(error.value) else [str(error.value)]
    assert not wrong, "\n".join(wrong)


def test_a_line_without_a_prompt_is_refused() -> None:
    for line in ('{"messages": null}', '{"prompt": null}', "{}", "[]"):
        with pytest.raises(UsageError, match="line 1: expected an object with a string under 'prompt', or with 'mess"):
            parse_prompts(line, "jsonl", GenerationConfig())
