"""Macro F1 and its interval. Reference: precision and recall of each label, counted one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinylm.jobs.labels.job import _f1_interval, macro_f1


def f1_by_definition(table: np.ndarray) -> float:
    scores = []
    for label in range(len(table)):
        given_it, have_it, hits = table[:, label].sum(), table[label].sum(), table[label, label]
        if not given_it and not have_it:
            continue
        precision, recall = hits / given_it if given_it else 0.0, hits / have_it if have_it else 0.0
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    return float(np.mean(scores))


@given(st.integers(2, 5).flatmap(lambda n: st.lists(st.integers(0, 9), min_size=n * n, max_size=n * n)))
def test_macro_f1_is_the_mean_of_the_harmonic_means_of_precision_and_recall(counts: list[int]) -> None:
    size = int(len(counts) ** 0.5)
    table = np.array([*counts[:-1], counts[-1] + 1]).reshape(size, size)  # at least one text
    assert macro_f1(table[None])[0] == pytest.approx(f1_by_definition(table))


def test_the_interval_of_macro_f1_contains_most_estimates_from_other_samples() -> None:
    """Of 200 samples from one distribution, about 95 % have an interval with the value of the distribution."""
    rng = np.random.default_rng(0)
    shares = np.array([[0.35, 0.05, 0.0], [0.05, 0.25, 0.05], [0.02, 0.03, 0.2]])
    truth = f1_by_definition(shares)
    covered = 0
    for _ in range(200):
        found = _f1_interval(rng.multinomial(200, shares.flatten()).reshape(3, 3))
        covered += found["macro_f1_low"] <= truth <= found["macro_f1_high"]
    assert 180 <= covered <= 198


def test_too_few_texts_have_no_interval() -> None:
    assert _f1_interval(np.array([[4, 1], [1, 3]])) == {}
