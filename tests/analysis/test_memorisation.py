"""Passages drawn from a text, and the copied share of texts; tests.analysis.test_matches.py checks the matches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.test_matches import documents_of
from tests.shell import story
from tinylm.analysis.memorisation import draw_passages, measure_copied
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import MemorisationConfig


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
