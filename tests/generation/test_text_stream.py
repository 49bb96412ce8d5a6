from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.test_decoding import STREAMED, library_of
from tinylm.generation.text_stream import TextStream
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

CHAR = train_char("abc\n ")
STRIPPED = Tokenizer(library_of(STREAMED["llama"]))
BPE = train_bpe(["abab abab abcab é日本 cabba", "aab cab bca é日"] * 20, 300)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    ids = [i for i in range(tokenizer.vocab_size) if i != tokenizer.end_of_text_id]
    return st.lists(st.sampled_from(ids), max_size=30)


def reference(tokenizer: Tokenizer, ids: list[int], stops: list[str], context: Sequence[int] = ()) -> tuple[str, bool]:
    """By definition: decode token by token until the text contains a stop sequence, and return the text before it."""
    start = len(tokenizer.decode(context))
    for count in range(len(ids) + 1):
        text = tokenizer.decode([*context, *ids[:count]])[start:]
        starts = [text.index(stop) for stop in stops if stop in text]
        if starts:
            return text[: min(starts)], True
    return tokenizer.decode([*context, *ids])[start:], False


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    chunks: list[str] = []
    for token in ids:
        if not stream.finished:
            chunks.append(stream.push(token))
    return [*chunks, stream.finish()]


@settings(max_examples=300)
@given(ids_of(CHAR), st.lists(st.text("abc\n ", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_sequence_and_no_part_of_it_is_shown(ids: list[int], stops: list[str]) -> None:
    expected, stopped = reference(CHAR, ids, stops)
    stream = TextStream(CHAR, stops)
    shown = ""
    for chunk in streamed(stream, ids):
        shown += chunk
        assert expected.startswith(shown)
    assert shown == expected
    assert stream.finish_reason == ("stop" if stopped else "length")


@settings(max_examples=300)
@given(ids_of(BPE), st.lists(st.text("abc é日", min_size=1, max_size=4), max_size=3))
def test_stop_sequences_match_across_and_within_tokens_of_several_bytes(ids: list[int], stops: list[str]) -> None:
    expected, stopped = reference(BPE, ids, stops)
    stream = TextStream(BPE, stops)
    assert "".join(streamed(stream, ids)) == expected
    assert stream.finish_reason == ("stop" if stopped else "length")


WORDS = [STRIPPED.encode(token).item() for token in ("▁", "▁▁", "▁a", "a", "b", ".")]


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(WORDS), max_size=4),
    st.lists(st.sampled_from(WORDS), max_size=20),
    st.lists(st.text("ab .", min_size=1, max_size=4), max_size=3),
)
def test_stop_sequences_match_spaces_that_the_decoder_removes_only_at_the_beginning(
    context: list[int], ids: list[int], stops: list[str]
) -> None:
    expected, stopped = reference(STRIPPED, ids, stops, context)
    stream = TextStream(STRIPPED, stops, context=context)
    assert "".join(streamed(stream, ids)) == expected
    assert stream.finish_reason == ("stop" if stopped else "length")


@settings(max_examples=300)
@given(ids_of(BPE))
def test_streamed_text_equals_text_decoded_at_once_even_if_it_is_invalid_utf8(ids: list[int]) -> None:
    stream = TextStream(BPE, [])
    assert "".join(streamed(stream, ids)) == BPE.decode(ids)
    assert stream.tokens == len(ids)


def test_only_the_start_of_a_stop_sequence_is_buffered() -> None:
    stream = TextStream(CHAR, ["abca"])
    chunks = streamed(stream, CHAR.encode("babcbabcc").tolist())
    assert chunks == ["b", "", "", "", "abcb", "", "", "", "abcc", ""]


def test_buffered_text_is_released_at_the_end() -> None:
    for last, reason in (([], "length"), ([CHAR.end_of_text_id], "end")):
        stream = TextStream(CHAR, ["abca"])
        assert "".join(streamed(stream, [*CHAR.encode("babc").tolist(), *last])) == "babc"
        assert stream.finish_reason == reason


def test_the_end_of_text_token_ends_the_text_and_is_not_counted() -> None:
    stream = TextStream(CHAR, [])
    assert (
        "".join(streamed(stream, [*CHAR.encode("ab").tolist(), CHAR.end_of_text_id, *CHAR.encode("c").tolist()]))
        == "ab"
    )
    assert (stream.tokens, stream.finish_reason, stream.finished) == (2, "end", True)


def test_an_unfinished_character_at_the_end_is_replaced() -> None:
    for tail in ([], [BPE.end_of_text_id]):
        stream = TextStream(BPE, [])
        assert "".join(streamed(stream, [*BPE.encode("a").tolist(), _first_byte(), *tail])) == "a\ufffd"


def _first_byte() -> int:
    """A token of one byte that is not a character by itself."""
    return next(i for i in range(BPE.vocab_size) if i != BPE.end_of_text_id and BPE.decoded_size([i]) == (0, 1))


@pytest.mark.parametrize("stops", [["b", "abb", "ab"], ["ab", "b"]])
def test_of_stop_sequences_that_end_at_one_token_the_one_that_starts_first_counts(stops: list[str]) -> None:
    assert "".join(streamed(TextStream(CHAR, stops), CHAR.encode("cabb").tolist())) == "c"


@pytest.mark.parametrize(
    ("text", "shown", "reason"),
    [
        ("babcac", "b", "end"),
        ("bacabc", "b", "stop"),
        ("bab", "bab", "length"),
        ("abab\nabc", "abab\n", "end"),
    ],
)
def test_an_end_text_is_cut_off_as_a_stop_sequence_is_and_the_first_of_them_is_the_reason(
    text: str, shown: str, reason: str
) -> None:
    stream = TextStream(CHAR, ["ac"], end_texts=["abc"])
    assert "".join(streamed(stream, CHAR.encode(text).tolist())) == shown
    assert stream.finish_reason == reason


def test_an_empty_stop_sequence_is_ignored() -> None:
    stream = TextStream(CHAR, [""])
    assert "".join(streamed(stream, CHAR.encode("abc").tolist())) == "abc"
    assert stream.finish_reason == "length"
