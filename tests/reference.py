"""The decoder as its formulas read: numpy, float64, one token and one head at a time. Slow, plain,
and sharing nothing with the code under test.

A row vector x meets a matrix as x W, as in the study notes; a weight stored as (outputs, inputs) is transposed first.
Symbols: T tokens, D width, H heads, K key/value heads, W head width, V vocabulary.
"""

import cmath
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tinylm.model_config import ModelConfig

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


def rotary(x: Array, position: int, theta: float, table: Precision = np.float64) -> Array:
    """One head's vector with each pair (i, i + W/2) turned by position * theta^(-2i/W)."""
    half = len(x) // 2
    turned = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i], turned[i + half] = rotate_pair(x[i], x[i + half], angle, table)
    return turned


def attend(queries: Array, keys: Array, values: Array) -> Array:
    """head_i = sum over j <= i of softmax_j(q_i . k_j / sqrt(d_k)) v_j, for one head: (T, d_k) each."""
    heads = []
    for i, query in enumerate(queries):
        scores = np.array([query @ keys[j] / math.sqrt(len(query)) for j in range(i + 1)])
        weights = softmax(scores)
        heads.append(sum(weights[j] * values[j] for j in range(i + 1)))
    return np.array(heads)


def attention_one_head(x: Array, wq: Array, wk: Array, wv: Array) -> Array:
    """q_i = x_i W^Q, k_i = x_i W^K, v_i = x_i W^V, attended causally: (T, d) and three (d, d_k) give (T, d_k)."""
    return attend(x @ wq, x @ wk, x @ wv)


def relu(x: Array) -> Array:
    return np.where(x > 0, x, 0.0)


def gelu(x: Array) -> Array:
    """x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    return x / (1 + np.exp(-x))


def decoder_logits(
    weights: dict[str, Array], config: ModelConfig, ids: list[int], table: Precision = np.float64
) -> Array:
    """The logits (T, V) of one sequence, without dropout. `table` is the precision of stored sines and cosines."""

    def linear(x: Array, name: str) -> Array:
        assert (f"{name}.bias" in weights) == config.bias
        return _affine(x @ weights[f"{name}.weight"].T, None, weights.get(f"{name}.bias"))

    def norm(x: Array, name: str) -> Array:
        one: Callable[..., Array] = {"layernorm": layer_norm, "rmsnorm": rms_norm}[config.norm]
        gain, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
        assert (gain is not None) == config.norm_gain
        assert (bias is not None) == config.norm_bias
        return np.array([one(row, gain, bias) for row in x])

    def split(x: Array, heads: int) -> list[Array]:
        return [x[:, h * config.head_dim : (h + 1) * config.head_dim] for h in range(heads)]

    def place(head: Array, norm_name: str) -> Array:
        """Queries or keys of one head, normalised and rotated as the configuration says."""
        if config.qk_norm:
            head = norm(head, norm_name)
        if config.position == "rope":
            head = np.array([rotary(row, p, config.rope_theta, table) for p, row in enumerate(head)])
        return head

    def attention(x: Array, name: str) -> Array:
        queries = [place(q, f"{name}.q_norm") for q in split(linear(x, f"{name}.q_proj"), config.heads)]
        keys = [place(k, f"{name}.k_norm") for k in split(linear(x, f"{name}.k_proj"), config.kv_heads)]
        values = split(linear(x, f"{name}.v_proj"), config.kv_heads)
        group = config.heads // config.kv_heads
        heads = [attend(q, keys[h // group], values[h // group]) for h, q in enumerate(queries)]
        return linear(np.concatenate(heads, axis=1), f"{name}.o_proj")

    def feedforward(x: Array, name: str) -> Array:
        up = linear(x, f"{name}.up_proj")
        if config.activation == "swiglu":
            inner = silu(linear(x, f"{name}.gate_proj")) * up
        else:
            inner = {"gelu": gelu, "relu": relu}[config.activation](up)
        return linear(inner, f"{name}.down_proj")

    x = np.array([weights["embedding.weight"][token] for token in ids])
    if config.scale_embedding:
        x = x * math.sqrt(config.width)
    for p in range(len(ids)):
        if config.position == "learned":
            x[p] += weights["position.weight"][p]
        if config.position == "sinusoidal":
            x[p] += np.array([sinusoid(p, i, config.width) for i in range(config.width)]).astype(table)

    for n in range(config.layers):
        layer = f"layers.{n}"
        if config.norm_placement == "pre":
            x = x + attention(norm(x, f"{layer}.attention_norm"), f"{layer}.attention")
            x = x + feedforward(norm(x, f"{layer}.feedforward_norm"), f"{layer}.feedforward")
        else:
            x = norm(x + attention(x, f"{layer}.attention"), f"{layer}.attention_norm")
            x = norm(x + feedforward(x, f"{layer}.feedforward"), f"{layer}.feedforward_norm")
    if config.norm_placement == "pre":
        x = norm(x, "norm")
    return x @ weights["embedding.weight" if config.tie else "output.weight"].T
