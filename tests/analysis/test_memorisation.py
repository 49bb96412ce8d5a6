"""Passages drawn from a text, and verbatim matches, compared with a search of all substrings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tinylm
from tests.shell import story
from tinylm.analysis import memorisation as module
from tinylm.analysis.memorisation import Documents, Matches, draw_passages, find_matches, measure_copied
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import MemorisationConfig
from tinylm.text.corpus import Stream


def documents_of(texts: list[str], chunk: int = 7) -> Documents:
    """Documents in chunks of a few characters. Reports the size of all as progress."""

    def stream(progress: Callable[[int], object] | None) -> Stream:
        for number, text in enumerate(texts):
            if number:
                yield None
            yield from (text[at : at + chunk] for at in range(0, len(text), chunk))
        if progress:
            progress(5)

    return Documents(stream, 5, "characters")


def test_repetitive_text_takes_little_time_and_has_an_exact_share_and_progress_is_that_of_the_documents() -> None:
    done: list[int] = []
    found = find_matches(["-" * 300, "x"], documents_of(["-" * 20_000], chunk=1000), 50, done.append)
    assert found.copied.tolist() == [300, 0] and found.longest[0].characters == 300
    assert done == [5]
    assert find_matches([], documents_of(["abc"]), 2).copied.tolist() == []


def brute_force(texts: list[str], documents: list[str], k: int) -> tuple[list[int], list[int]]:
    """The copied characters and the length of the longest match of each text, by definition."""
    copied, longest = [], []
    for text in texts:
        spans = ((start, stop) for start in range(len(text)) for stop in range(start + k, len(text) + 1))
        found = [span for span in spans if any(text[slice(*span)] in document for document in documents)]
        copied.append(len({index for span in found for index in range(*span)}))
        longest.append(max((stop - start for start, stop in found), default=0))
    return copied, longest


def check(texts: list[str], documents: list[str], k: int, found: Matches) -> None:
    copied, longest = brute_force(texts, documents, k)
    assert found.copied.tolist() == copied
    assert {match.sample: match.characters for match in found.longest} == {i: n for i, n in enumerate(longest) if n}
    assert [match.characters for match in found.longest] == sorted(filter(None, longest), reverse=True)
    for match in found.longest:
        assert match.text in texts[match.sample] and len(match.text) == match.characters
        assert any(match.text in document for document in documents)


short = st.text("ab\n", max_size=20)


@given(
    st.lists(short, max_size=4),
    st.lists(st.text("ab\n", min_size=1, max_size=40), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 40),
)
def test_matches_are_those_of_a_search_of_all_substrings(
    texts: list[str], documents: list[str], k: int, chunk: int
) -> None:
    check(texts, documents, k, find_matches(texts, documents_of(documents, chunk), k))


@given(st.lists(short, max_size=3), st.lists(st.text("ab", min_size=1, max_size=40), max_size=3), st.integers(1, 6))
@example(["xabcy"], ["zxabc"] * 3 + ["zzabcy"], 4)
def test_the_share_is_exact_however_often_a_window_occurs(texts: list[str], documents: list[str], k: int) -> None:
    found = find_matches(texts, documents_of(documents), k, max_comparisons=1)
    assert found.copied.tolist() == brute_force(texts, documents, k)[0]


def test_matches_in_long_documents_are_found_across_chunks() -> None:
    documents = [story(2000, seed=1), "é日本😀 " * 30, story(500, seed=2)]
    texts = [documents[0][700:790] + documents[2][100:160], documents[1][10:70] + "x", story(200, seed=3), ""]
    found = find_matches(texts, documents_of(documents, chunk=64), 20)
    check(texts, documents, 20, found)
    assert found.longest[0].characters >= 90


def test_text_across_documents_is_no_match() -> None:
    assert find_matches(["abcdef", "abc\U0010ffffdef"], documents_of(["abc", "def"]), 4).copied.tolist() == [0, 0]


@given(st.lists(st.text("abc", min_size=1, max_size=60), min_size=1, max_size=5), st.integers(0, 3))
def test_passages_are_drawn_from_the_parts_of_all_documents(texts: list[str], seed: int) -> None:
    config = MemorisationConfig(num_samples=3, sample_length=10, prefix_length=4, min_match=5, seed=seed)
    parts = [text[at : at + 14] for text in texts for at in range(0, len(text), 14) if len(text[at : at + 14]) >= 9]
    found = ["".join(passage) for passage in draw_passages(documents_of(texts), config)]
    assert len(found) == min(3, len(parts))
    if len(parts) <= 3:
        assert found == parts
    remaining = iter(parts)
    assert all(passage in remaining for passage in found)  # a subsequence: each part is drawn at most once, in order


def test_passages_are_spread_over_the_text_and_values_out_of_range_are_errors() -> None:
    text = "".join(f"{number:014d}" for number in range(1000))
    drawn = []
    for seed in range(200):
        config = MemorisationConfig(num_samples=5, sample_length=10, prefix_length=4, min_match=5, seed=seed)
        passages = draw_passages(documents_of([text], chunk=100), config)
        assert passages == draw_passages(documents_of([text], chunk=33), config)
        drawn += [int("".join(passage)) for passage in passages]
    assert len(drawn) == 1000
    quarters = np.histogram(drawn, bins=4, range=(0, 1000))[0]
    assert quarters.min() > 200 and quarters.max() < 300  # 250 expected, with a standard deviation of 14
    for settings, message in (
        ({"min_match": 4}, "`min_match` is 4; it must be from 5"),
        ({"num_samples": 0}, "`num_samples` is 0"),
    ):
        with pytest.raises(UsageError, match=message):
            MemorisationConfig(**settings)


def test_shares_are_those_of_each_source_with_an_interval_over_its_texts() -> None:
    training = story(3000, seed=1)
    copied = [training[at : at + 60] for at in range(0, 1200, 100)]
    texts = {"half": [text + "#" * 60 for text in copied], "none": ["#" * 50], "empty": []}
    result = measure_copied(texts, documents_of([training], chunk=500), 30)
    half, none, empty = result.sources
    assert (half.samples, half.characters, half.copied) == (12, 12 * 120, 0.5)
    assert (half.copied_low, half.copied_high, half.longest) == (0.5, 0.5, 60)
    assert [match.sample for match in half.matches] == [0, 1, 2]
    assert (none.copied, none.copied_low, none.longest, none.matches) == (0, None, 0, ())
    assert (empty.samples, empty.copied) == (0, 0)
    record = result.to_json()[0]
    keys = ["source", "samples", "characters", "copied", "copied_low", "copied_high", "longest", "matches", "min_match"]
    assert list(record) == keys and record["min_match"] == 30
    assert list(record["matches"][0]) == ["sample", "characters", "text"]


def test_samples_have_their_length_also_where_a_character_is_several_tokens(tmp_path: Path) -> None:
    """A character of Chinese has three bytes, which are a token each in a small vocabulary; others have one."""
    text = "".join(chr(0x4E00 + 7 * n * n % 300) for n in range(4000))
    (tmp_path / "text").write_text(text, encoding="utf-8")
    sizes: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "context": 64, "tokenizer": "bpe", "vocab_size": 260}
    model = tinylm.train(tmp_path / "text", tmp_path / "run", steps=150, lr=0.03, **sizes).load()
    prefixes = ["", *["a b c " * 5] * 8, text[:30]]
    config = MemorisationConfig(sample_length=60, num_samples=2, min_match=50)
    continued = module._continue(model, prefixes, config, lambda count: None)
    assert [len(text) for text in continued] == [60] * 10
    assert sum(character in text for character in continued[-1]) > 50
