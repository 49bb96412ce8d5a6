"""Permutations, compared with the definition of a permutation and with the statistics of true shuffles."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinylm.text.batches import Permutation

# The chi-squared statistic, standardised, is about normal; a true shuffle exceeds this once in 30,000 keys.
MAX_DEVIATION = 4.0


def order(n: int, *key: int) -> np.ndarray:
    return Permutation(n, key)(np.arange(n))


def deviation(counts: np.ndarray, degrees: int) -> float:
    """The chi-squared statistic of counts that should be equal, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2).sum() / expected - degrees) / math.sqrt(2 * degrees))


@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 100))
def test_each_item_occurs_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(order(n, seed, epoch).tolist()) == list(range(n))


@given(st.integers(1, 2**61), st.integers(0, 2**63), st.data())
def test_any_item_of_a_range_beyond_memory_is_computed_alone(n: int, seed: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True)))
    permutation = Permutation(n, [seed])
    values = permutation(indices)
    assert values.dtype == np.int64
    assert values.min() >= 0 and values.max() < n
    assert len(set(values.tolist())) == len(indices)
    assert [int(permutation(indices[i : i + 1])[0]) for i in range(len(indices))] == values.tolist()


@pytest.mark.parametrize("n", [2, 5])
def test_all_orders_of_a_few_items_are_equally_frequent(n: int) -> None:
    found = Counter(tuple(order(n, seed, 0).tolist()) for seed in range(120 * 24))
    counts = np.array([found[each] for each in itertools.permutations(range(n))])
    assert abs(deviation(counts, counts.size - 1)) < MAX_DEVIATION


@pytest.mark.parametrize("n", [99_856, 100_000, 131_072])
def test_the_order_of_many_items_has_no_visible_structure(n: int) -> None:
    """The correlation of items at a distance, and the distances of those that were neighbours in the range."""
    values = order(n, 5, 0)
    places = np.argsort(values)
    for lag in (1, 2, 316, 317, 1024):
        correlation = float(np.corrcoef(values[:-lag], values[lag:])[0, 1])
        assert abs(correlation) < MAX_DEVIATION / math.sqrt(n), lag
        apart = np.abs(places[lag:] - places[:-lag])
        # Of two places drawn without replacement, the distance has the mean (n + 1) / 3 and the variance about
        # n^2 / 18. The places are dependent in threes, so the mean is allowed twice the deviation of independent ones.
        assert abs(apart.mean() - (n + 1) / 3) < 2 * MAX_DEVIATION * n / math.sqrt(18 * len(apart)), lag


def test_the_first_items_of_the_epochs_cover_the_range_evenly() -> None:
    """A run that ends within an epoch is trained on a sample of the text, whose items fall evenly into its 20 parts."""
    firsts = np.concatenate([Permutation(10**12, [seed, 3])(np.arange(100)) for seed in range(40)])
    assert abs(deviation(np.bincount(firsts // (10**12 // 20), minlength=20), 19)) < MAX_DEVIATION
    assert len({order(1000, seed, epoch).tobytes() for seed in range(20) for epoch in range(20)}) == 400
