"""The float64 reference of the model, checked against numbers worked out by hand."""

import math

import numpy as np
import pytest

from tests import reference


def test_one_attention_head_equals_values_worked_out_by_hand() -> None:
    """x = (1), (3) with every matrix 1: the second token's scores are 3 and 9, a difference of 6."""
    one = np.eye(1)
    heads = reference.attention_one_head(np.array([[1.0], [3.0]]), one, one, one)
    weight = 1 / (1 + math.exp(-6))
    np.testing.assert_allclose(heads, [[1.0], [(1 - weight) * 1 + weight * 3]])


def test_scores_are_divided_by_the_root_of_the_key_width() -> None:
    """Four features of 1 score 4 with themselves and 4/sqrt(4) = 2 after the division; the other key scores 0."""
    keys = np.array([[0.0] * 4, [1.0] * 4])
    heads = reference.attend(np.ones((2, 4)), keys, np.array([[0.0], [1.0]]))
    np.testing.assert_allclose(heads, [[0.0], [1 / (1 + math.exp(-2))]])


def test_layer_norm_and_rms_norm_equal_values_worked_out_by_hand() -> None:
    x = np.array([1.0, -7.0, 5.0, 5.0])  # mean 1, variance (0 + 64 + 16 + 16) / 4 = 24, mean square 25
    np.testing.assert_allclose(reference.layer_norm(x, eps=0.0), (x - 1) / math.sqrt(24))
    np.testing.assert_allclose(reference.rms_norm(x, eps=11.0), x / 6)
    gain, bias = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(reference.rms_norm(x, gain, bias, eps=0.0), [0.2, -2.8, 4.0, 4.0])


def test_cross_entropy_equals_values_worked_out_by_hand() -> None:
    """Logits 0 and ln 3 are probabilities 1/4 and 3/4."""
    logits = np.array([[0.0, math.log(3)], [0.0, math.log(3)]])
    assert reference.cross_entropy(logits, [0, 1]) == pytest.approx((math.log(4) + math.log(4 / 3)) / 2)


def test_sinusoids_equal_values_worked_out_by_hand() -> None:
    """Width 4: features 0 and 1 turn by p, features 2 and 3 by p / 10000^(2/4) = p / 100."""
    expected = [math.sin(7), math.cos(7), math.sin(0.07), math.cos(0.07)]
    assert [reference.sinusoid(7, i, 4) for i in range(4)] == pytest.approx(expected)


def test_rope_by_a_quarter_turn_equals_values_worked_out_by_hand() -> None:
    assert reference.rotate_pair(1.0, 2.0, math.pi / 2) == pytest.approx((-2.0, 1.0))


def test_activations_equal_values_worked_out_by_hand() -> None:
    x = np.array([-1.0, 0.0, 2.0])
    np.testing.assert_allclose(reference.relu(x), [0.0, 0.0, 2.0])
    np.testing.assert_allclose(reference.silu(x), [-1 / (1 + math.e), 0.0, 2 / (1 + math.exp(-2))])
    np.testing.assert_allclose(reference.gelu(x), [-0.1588080, 0.0, 1.9545977], atol=1e-6)
