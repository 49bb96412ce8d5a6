"""The float64 references (`reference`, `reference_parts`), checked by hand and by enumeration."""

import math

import numpy as np
import pytest

from tests import reference_parts
from tests.reference_parts import Array


def test_relative_position_tables_are_indexed_by_the_clipped_offset() -> None:
    """With queries of 1, and keys and values of 0, attention weights and output come from the tables alone."""
    tables = np.array([[0.0], [math.log(2)], [math.log(3)]]), np.array([[10.0], [20.0], [30.0]])
    zero = np.zeros((3, 1))
    every = reference_parts.bidirectional(3)
    heads = reference_parts.attend_full(np.ones((3, 1)), zero, zero, every, *tables, clip=1)
    # offsets j - i, clipped to -1 ... 1: for token 0: 0, 1, 1; for token 1: -1, 0, 1; for token 2: -1, -1, 0
    first, second, third = (2 * 20 + 3 * 30 + 3 * 30) / 8, (10 + 2 * 20 + 3 * 30) / 6, (10 + 10 + 2 * 20) / 4
    np.testing.assert_allclose(heads, [[first], [second], [third]])


def test_routed_and_merged_experts_equal_values_worked_out_by_hand() -> None:
    """Logits 0 and ln 3 give weights 1/4 and 3/4; the third is not in the top 2. An expert computes down * relu(up)."""
    weights = {
        "m.router.weight": np.array([[0.0], [math.log(3)], [-1.0]]),
        "m.up_proj": np.array([[[1.0]], [[2.0]], [[9.0]]]),
        "m.down_proj": np.array([[[4.0]], [[8.0]], [[9.0]]]),
        "m.down_bias": np.array([[0.0], [1.0], [9.0]]),
    }
    x = np.array([1.0])
    assert reference_parts.route(x, weights["m.router.weight"], 2) == [
        (1, pytest.approx(3 / 4)),
        (0, pytest.approx(1 / 4)),
    ]
    routed = reference_parts.experts_forward(x, weights, "m", 2, "relu", "route")
    merged = reference_parts.experts_forward(x, weights, "m", 2, "relu", "merge")
    assert routed == pytest.approx([4 / 4 + 3 / 4 * (16 + 1)])
    assert merged == pytest.approx([(1 / 4 + 6 / 4) * (4 / 4 + 24 / 4) + 3 / 4])


def test_load_balance_and_router_entropy_equal_values_worked_out_by_hand() -> None:
    """Both tokens choose expert 0: shares 1 and 0 of the assignments, mean probabilities 3/4 and 1/4."""
    probabilities = np.array([[1.0, 0.0], [0.5 + 1e-12, 0.5 - 1e-12]])
    assert reference_parts.load_balance(probabilities, 1) == pytest.approx(2 * 3 / 4)
    assert reference_parts.load_balance(probabilities, 2) == pytest.approx(1.0)
    assert reference_parts.router_entropy(probabilities) == pytest.approx(math.log(2) / 2)


def test_exhaustive_beam_search_finds_the_best_sequence() -> None:
    def model(prefix: tuple[int, ...]) -> Array:
        return np.log(np.random.default_rng(prefix).dirichlet(np.ones(3)))

    for length_penalty in (0.0, 1.0):
        best = reference_parts.best_sequence_by_enumeration(model, 0, 1, 4, length_penalty)
        found = reference_parts.beam_search(model, 0, 1, 3**4, 4, length_penalty)
        assert found == (best[0], pytest.approx(best[1]))
        assert found[0][-1] == 1
