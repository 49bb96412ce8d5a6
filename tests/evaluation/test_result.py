"""Bootstrap intervals, compared with explicit resampling and with made data whose true ratio is known."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from tinylm.evaluation.result import (
    MAX_BLOCKS,
    MAX_UNITS,
    MIN_BLOCK,
    MIN_DOCUMENTS,
    MIN_UNITS,
    Interval,
    choose_units,
    ratio_interval,
    t_quantile,
)
from tinylm.jobs.text.job import sums_between

T_97_5 = {9: 2.2622, 19: 2.0930, 49: 2.0096, 199: 1.9720}  # of a printed table


def resampled_interval(x: np.ndarray, y: np.ndarray, resamples: int = 4000) -> tuple[float, float]:
    """By definition, unit by unit, with other random numbers."""
    rng, ratios = np.random.default_rng(99), []
    for _ in range(resamples):
        above = below = 0.0
        for unit in rng.integers(0, len(x), len(x)):
            above += x[unit]
            below += y[unit]
        ratios.append(above / below)
    ratios.sort()
    tail = NormalDist().cdf(-math.sqrt(len(x) / (len(x) - 1)) * T_97_5[len(x) - 1])
    return ratios[round(tail * resamples)], ratios[round((1 - tail) * resamples) - 1]


@pytest.mark.parametrize("number", [10, 50])
def test_the_interval_agrees_with_explicit_resampling(number: int) -> None:
    rng = np.random.default_rng(number)
    y = rng.integers(1, 100, number).astype(float)
    x = y * rng.normal(2, 0.3, number)
    found, (low, high) = ratio_interval(x, y), resampled_interval(x, y)
    assert found is not None  # below, the Monte Carlo error of the outer quantiles
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.05 * (high - low))


def test_quantiles_of_t_are_those_of_the_table() -> None:
    assert {degrees: t_quantile(0.975, degrees) for degrees in T_97_5} == pytest.approx(T_97_5, abs=6e-4)


def test_equal_units_few_units_and_empty_units() -> None:
    """Equal ones have an interval without width, few have none, and empty ones do not count."""
    assert ratio_interval(np.full(30, 3.0), np.full(30, 2.0)) == Interval(1.5, 1.5)
    x = np.random.default_rng(0).random(MIN_UNITS)
    assert ratio_interval(x[1:], np.ones(MIN_UNITS - 1)) is None
    whole = ratio_interval(x, np.ones(MIN_UNITS))
    assert whole is not None
    assert ratio_interval(np.append(x, 0), np.append(np.ones(MIN_UNITS), 0)) == whole


def made(rng: np.random.Generator, documents: int) -> tuple[np.ndarray, np.ndarray]:
    """The losses and tokens of documents of very different lengths, each with a loss of its own around 2. Without
    documents: the blocks of a text in which losses of consecutive tokens are correlated by 0.9 and skewed, around 2."""
    if documents:
        tokens = np.exp(rng.normal(5, 1, documents)).astype(int) + 1
        return tokens * rng.normal(2, 0.4, documents) + rng.normal(0, 2, documents) * np.sqrt(tokens), tokens
    states = itertools.accumulate(rng.normal(0, 0.2, 2000).tolist(), lambda state, noise: 0.9 * state + noise)
    mean = math.exp(0.2**2 / (1 - 0.9**2) / 2)
    edges = choose_units(np.array([0, 2000])).edges
    return sums_between(2 * np.exp([*states]) / mean, edges), np.diff(edges)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [20, 200, 0])
def test_the_interval_covers_the_true_loss_in_90_to_98_percent_of_made_texts(documents: int) -> None:
    rng = np.random.default_rng(1)
    intervals = [ratio_interval(*made(rng, documents)) for _ in range(300)]
    covered = sum(interval is not None and interval.low <= 2 <= interval.high for interval in intervals)
    assert 0.90 <= covered / len(intervals) <= 0.98


def test_from_20_documents_on_they_are_the_units_and_very_many_are_grouped() -> None:
    edges = np.cumsum(np.arange(MIN_DOCUMENTS + 1)) + 5
    units = choose_units(edges)
    assert units.edges.tolist() == edges.tolist() and units.kind == "documents"
    many = choose_units(np.arange(10 * MAX_UNITS + 1))
    assert many.edges.tolist() == list(range(0, 10 * MAX_UNITS + 1, 10)) and many.kind == "groups of documents"


@pytest.mark.parametrize("length, blocks", [(50, 1), (10 * MIN_BLOCK + 3, 10), (1_000_001, MAX_BLOCKS)])
def test_few_documents_are_divided_into_equal_blocks(length: int, blocks: int) -> None:
    units = choose_units(np.array([0, 3, length]))
    assert (len(units), units.edges[0], units.edges[-1]) == (blocks, 0, length)
    assert np.ptp(np.diff(units.edges)) <= 1
    assert units.describe(2, "tokens").endswith("tokens, as the text has only 2 documents")


def test_sums_between_edges_are_sums_of_slices() -> None:
    values, edges = np.arange(10, dtype=np.float32), np.array([1, 1, 4, 10])
    assert sums_between(values, edges).tolist() == [0, 6, 39]
