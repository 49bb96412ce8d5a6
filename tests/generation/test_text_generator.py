from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.test_decoding import STREAMED, library_of
from tinylm.generation.text_generator import TextStream
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


@pytest.mark.parametrize("tokenizer, characters", [(CHAR, "abc\n "), (BPE, "abc é日")], ids=["char", "bpe"])
@settings(max_examples=150)
@given(data=st.data())
def test_text_ends_before_the_first_stop_sequence_and_no_part_of_it_is_shown(
    tokenizer: Tokenizer, characters: str, data: st.DataObject
) -> None:
    """Across tokens and within tokens of several bytes; also of text that is not valid UTF-8."""
    ids = data.draw(ids_of(tokenizer))
    stops = data.draw(st.lists(st.text(characters, min_size=1, max_size=4), max_size=3))
    expected, stopped = reference(tokenizer, ids, stops)
    stream = TextStream(tokenizer, stops)
    shown = ""
    for chunk in streamed(stream, ids):
        shown += chunk
        assert expected.startswith(shown)
    assert shown == expected
    assert stream.finish_reason == ("stop" if stopped else "length")
    assert stopped or stream.tokens == len(ids)


WORDS = [STRIPPED.encode(token).item() for token in ("▁", "▁▁", "▁a", "a", "b", ".")]


@settings(max_examples=150)
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


def test_only_the_start_of_a_stop_sequence_is_buffered() -> None:
    stream = TextStream(CHAR, ["abca"])
    chunks = streamed(stream, CHAR.encode("babcbabcc").tolist())
    assert chunks == ["b", "", "", "", "abcb", "", "", "", "abcc", ""]


class CountedStop(str):
    """A stop sequence that counts how often a part of it is taken."""

    taken = 0

    def __getitem__(self, key: Any) -> str:
        type(self).taken += 1
        return super().__getitem__(key)


def test_a_long_stop_sequence_is_compared_no_further_than_the_text() -> None:
    """A request may have one of megabytes, of which each token would compare every beginning."""
    stop = CountedStop("a" * 10_000)
    assert "".join(streamed(TextStream(CHAR, [stop]), CHAR.encode("bab").tolist())) == "bab"
    assert 0 < stop.taken < 100


def test_buffered_text_is_released_at_the_end() -> None:
    for last, reason in (([], "length"), ([CHAR.end_of_text_id], "end")):
        stream = TextStream(CHAR, ["abca"])
        assert "".join(streamed(stream, [*CHAR.encode("babc").tolist(), *last])) == "babc"
        assert (stream.tokens, stream.finish_reason, stream.finished) == (4 + len(last), reason, reason == "end")


def test_an_unfinished_character_at_the_end_is_replaced() -> None:
    """A token of one byte that is not a character by itself."""
    first = next(i for i in range(BPE.vocab_size) if i != BPE.end_of_text_id and BPE.decoded_size([i]) == (0, 1))
    for tail in ([], [BPE.end_of_text_id]):
        assert "".join(streamed(TextStream(BPE, []), [*BPE.encode("a").tolist(), first, *tail])) == "a\ufffd"


@pytest.mark.parametrize(
    ("stops", "end_texts", "text", "shown", "reason"),
    [
        (["b", "abb", "ab"], [], "cabb", "c", "stop"),  # of those that end at one token, the one that starts first
        (["ab", "b"], [], "cabb", "c", "stop"),
        ([""], [], "abc", "abc", "length"),
        (["ac"], ["abc"], "babcac", "b", "end"),
        (["ac"], ["abc"], "bacabc", "b", "stop"),
        (["ac"], ["abc"], "bab", "bab", "length"),
        (["ac"], ["abc"], "abab\nabc", "abab\n", "end"),
    ],
)
def test_the_first_stop_sequence_or_end_text_is_cut_off_and_is_the_reason(
    stops: list[str], end_texts: list[str], text: str, shown: str, reason: str
) -> None:
    stream = TextStream(CHAR, stops, end_texts=end_texts)
    assert "".join(streamed(stream, CHAR.encode(text).tolist())) == shown
    assert stream.finish_reason == reason
