"""The formulas of single vectors: norms, activations, sinusoids, rotations, the loss. numpy, float64, slow and plain,
sharing nothing with the code under test; `reference_parts` has the models.

Symbols: T tokens, D width, H heads, K key/value heads, W head width, V vocabulary.
"""

import cmath
import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Precision = type[np.float64] | type[np.float32]

RMS_EPS = 1e-6
LAYER_EPS = 1e-5


def softmax(scores: Array) -> Array:
    """exp(s_i) / sum_j exp(s_j); subtracting the largest changes nothing but keeps exp in range."""
    powers = np.exp(scores - np.max(scores))
    return powers / powers.sum()


def cross_entropy(logits: Array, targets: list[int]) -> float:
    """The mean over tokens of -log softmax(logits)[target], in nats: (T, V) and T targets."""
    return sum(-math.log(softmax(row)[target]) for row, target in zip(logits, targets, strict=True)) / len(targets)


def layer_norm(x: Array, gain: Array | None = None, bias: Array | None = None, eps: float = LAYER_EPS) -> Array:
    """(x - mean) / sqrt(variance + eps) * gain + bias for one vector, with the variance over the width itself."""
    width = len(x)
    mean = sum(x) / width
    variance = sum((entry - mean) ** 2 for entry in x) / width
    return _affine((x - mean) / math.sqrt(variance + eps), gain, bias)


def rms_norm(x: Array, gain: Array | None = None, bias: Array | None = None, eps: float = RMS_EPS) -> Array:
    """x / sqrt(mean of squares + eps) * gain + bias for one vector; the mean is not subtracted."""
    mean_square = sum(entry**2 for entry in x) / len(x)
    return _affine(x / math.sqrt(mean_square + eps), gain, bias)


def _affine(x: Array, gain: Array | None, bias: Array | None) -> Array:
    x = x if gain is None else x * gain
    return x if bias is None else x + bias


def sinusoid(position: int, feature: int, width: int) -> float:
    """PE(p, 2i) = sin(p / 10000^(2i/D)) and PE(p, 2i+1) = cos(p / 10000^(2i/D))."""
    pair = feature // 2
    angle = position / 10_000 ** (2 * pair / width)
    return math.sin(angle) if feature % 2 == 0 else math.cos(angle)


def rotate_pair(
    first: float, second: float, angle: float, table: Precision = np.float64, magnitude: float = 1.0
) -> tuple[float, float]:
    """magnitude (first + i second) e^(i angle), as a pair; `table` is the precision of stored cosines and sines."""
    turn = magnitude * cmath.exp(1j * angle)
    turned = complex(first, second) * complex(float(table(turn.real)), float(table(turn.imag)))
    return turned.real, turned.imag


def rotary(x: Array, position: int, theta: float) -> Array:
    """One head's vector with each pair (i, i + W/2) turned by position * theta^(-2i/W)."""
    half = len(x) // 2
    angles = (position * theta ** (-2 * i / len(x)) for i in range(half))
    turned = [rotate_pair(x[i], x[i + half], angle) for i, angle in enumerate(angles)]
    return np.array([*(first for first, _ in turned), *(second for _, second in turned)])


def relu(x: Array) -> Array:
    return np.where(x > 0, x, 0.0)


def gelu(x: Array) -> Array:
    """x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    return x / (1 + np.exp(-x))
