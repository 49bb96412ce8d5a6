import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinylm.config import DataConfig
from tinylm.inference.text import TextStream, start_tokens
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


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    ids = [i for i in range(tokenizer.vocab_size) if i != tokenizer.end_of_text]
    return st.lists(st.sampled_from(ids), max_size=30)


def cut(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[str, bool]:
    """The definition: token by token, until the text has a stop text in it, and what stands before that."""
    for count in range(len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        places = [text.index(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)], True
    return tokenizer.decode(ids), False


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    pieces: list[str] = []
    for token in ids:
        if not stream.finished:
            pieces.append(stream.push(token))
    return [*pieces, stream.finish()]


@settings(max_examples=300)
@given(ids_of(CHAR), st.lists(st.text("abc\n ", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_text_and_no_part_of_it_leaks(ids: list[int], stops: list[str]) -> None:
    expected, stopped = cut(CHAR, ids, stops)
    stream = TextStream(CHAR, stops)
    so_far = ""
    for piece in streamed(stream, ids):
        so_far += piece
        assert expected.startswith(so_far)
    assert so_far == expected
    assert stream.finish_reason == ("stop" if stopped else "length")


@settings(max_examples=300)
@given(ids_of(BPE), st.lists(st.text("abc é日", min_size=1, max_size=4), max_size=3))
def test_stop_texts_match_across_and_within_tokens_of_several_bytes(ids: list[int], stops: list[str]) -> None:
    expected, stopped = cut(BPE, ids, stops)
    stream = TextStream(BPE, stops)
    assert "".join(streamed(stream, ids)) == expected
    assert stream.finish_reason == ("stop" if stopped else "length")


@settings(max_examples=300)
@given(ids_of(BPE))
def test_streamed_text_equals_text_decoded_at_once_however_broken(ids: list[int]) -> None:
    stream = TextStream(BPE, [])
    assert "".join(streamed(stream, ids)) == BPE.decode(ids)
    assert stream.tokens == len(ids)


def test_no_more_is_held_back_than_could_begin_a_stop_text() -> None:
    stream = TextStream(CHAR, ["abca"])
    pieces = streamed(stream, CHAR.encode("babcbabcc").tolist())
    assert pieces == ["b", "", "", "", "abcb", "", "", "", "abcc", ""]


def test_what_was_held_back_is_given_at_the_end() -> None:
    for last, reason in (([], "length"), ([CHAR.end_of_text], "end")):
        stream = TextStream(CHAR, ["abca"])
        assert "".join(streamed(stream, [*CHAR.encode("babc").tolist(), *last])) == "babc"
        assert stream.finish_reason == reason


def test_the_end_of_text_ends_it_and_is_no_token_of_it() -> None:
    stream = TextStream(CHAR, [])
    assert (
        "".join(streamed(stream, [*CHAR.encode("ab").tolist(), CHAR.end_of_text, *CHAR.encode("c").tolist()])) == "ab"
    )
    assert (stream.tokens, stream.finish_reason, stream.finished) == (2, "end", True)


def test_an_unfinished_character_at_the_end_is_given_as_what_it_is() -> None:
    for tail in ([], [BPE.end_of_text]):
        stream = TextStream(BPE, [])
        assert "".join(streamed(stream, [*BPE.encode("a").tolist(), _first_byte(), *tail])) == "a\ufffd"


def _first_byte() -> int:
    """A token of one byte that is no character by itself."""
    return next(i for i in range(BPE.vocab_size) if i != BPE.end_of_text and BPE.measure([i]) == (0, 1))


@pytest.mark.parametrize("stops", [["b", "abb", "ab"], ["ab", "b"]])
def test_of_stop_texts_that_end_together_the_one_that_begins_first_counts(stops: list[str]) -> None:
    assert "".join(streamed(TextStream(CHAR, stops), CHAR.encode("cabb").tolist())) == "c"


def test_an_empty_stop_text_stops_nothing() -> None:
    stream = TextStream(CHAR, [""])
    assert "".join(streamed(stream, CHAR.encode("abc").tolist())) == "abc"
    assert stream.finish_reason == "length"


@pytest.mark.parametrize("tokenizer", [CHAR, BPE], ids=["char", "bpe"])
def test_a_prompt_begins_with_itself_and_an_empty_one_where_documents_begin(tokenizer: Tokenizer) -> None:
    many = dataclasses.replace(DATA, documents=2)
    assert start_tokens(tokenizer, DATA, [4, 5]) == [4, 5]
    assert start_tokens(tokenizer, DATA, []) == tokenizer.encode("\n").tolist()
    assert start_tokens(tokenizer, None, []) == tokenizer.encode("\n").tolist()
    assert start_tokens(tokenizer, many, []) == [tokenizer.end_of_text]


def test_a_tokenizer_without_a_line_end_begins_with_the_end_of_text() -> None:
    tokenizer = train_char("abc")
    assert start_tokens(tokenizer, DATA, []) == [tokenizer.end_of_text]
