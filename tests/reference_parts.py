"""The models as their formulas read, in the manner of reference.py: numpy, float64, one token and one head at a time,
sharing nothing with the code they judge.

The decoder, the encoder, the encoder-decoder with all their parts, low-rank and bottleneck adapters, beam search.
A row vector x meets a matrix as x W; a weight stored as (outputs, inputs) is transposed first. Symbols as in
reference.py, and E experts, F inner width, S source tokens.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests import reference
from tests.reference import Array, Precision, _affine, gelu, layer_norm, relu, rms_norm, silu, softmax

Weights = dict[str, Array]
Visible = Callable[[int, int], bool]
Prefix = tuple[int, ...]


def gelu_exact(x: Array) -> Array:
    """x times the probability that a standard normal variable is below it: x / 2 (1 + erf(x / sqrt(2)))."""
    return np.array([entry / 2 * (1 + math.erf(entry / math.sqrt(2))) for entry in x])


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"gelu": gelu, "gelu-exact": gelu_exact, "relu": relu, "silu": silu}
GATES: dict[str, Callable[[Array], Array]] = {"swiglu": silu, "geglu": gelu, "geglu-exact": gelu_exact}
POSITIONS = ("rope", "learned", "sinusoidal", "relative", "none")


# Attention: which keys a query attends to.


def causal(i: int, j: int) -> bool:
    """A query attends to itself and all positions before it."""
    return j <= i


def windowed(window: int) -> Visible:
    """A query attends to the last `window` tokens, itself included: local attention (Beltagy et al. 2020)."""
    return lambda i, j: j <= i and i - j < window


def bidirectional(length: int) -> Visible:
    """Every query attends to the first `length` positions; the rest is padding."""
    return lambda i, j: j < length


def relative_row(i: int, j: int, clip: int) -> int:
    """The row of a table that belongs to the offset j - i: clip(j - i, K) + K, with clip(x, K) = max(-K, min(K, x))."""
    return max(-clip, min(clip, j - i)) + clip


def attend_full(
    queries: Array,
    keys: Array,
    values: Array,
    visible: Visible,
    relative_keys: Array | None = None,
    relative_values: Array | None = None,
    clip: int | None = None,
    multiplier: float | None = None,
) -> Array:
    """One head: e_ij = q_i . (k_j + aK_ij) / sqrt(W), and head_i = sum_j softmax_j(e_ij) (v_j + aV_ij).

    The sums run over every j that i may see; aK_ij and aV_ij are rows of two tables (2 clip + 1, W) by the clipped
    offset j - i, and zero without a table (Shaw et al. 2018, section 3). Queries (T, W), keys and
    values (S, W). `multiplier` replaces 1/sqrt(W).
    """

    def offset_vector(table: Array | None, i: int, j: int) -> Array | float:
        if table is None:
            return 0.0
        assert clip is not None
        assert len(table) == 2 * clip + 1
        assert len(queries) == len(keys)
        return table[relative_row(i, j, clip)]

    heads = []
    for i, query in enumerate(queries):
        seen = [j for j in range(len(keys)) if visible(i, j)]
        scale = 1 / math.sqrt(len(query)) if multiplier is None else multiplier
        scores = np.array([query @ (keys[j] + offset_vector(relative_keys, i, j)) * scale for j in seen])
        head = np.zeros(values.shape[1])
        for weight, j in zip(softmax(scores), seen, strict=True):
            head = head + weight * (values[j] + offset_vector(relative_values, i, j))
        heads.append(head)
    return np.array(heads)


# Rotation: which features turn, and how fast.


def rope_rate(pair: int, width: int, theta: float, scaling: Any) -> float:
    """Radians per token of one pair of features, of `width` rotated ones: theta^(-2i/width), or a scaled rate.

    linear: the rate over s (Chen et al. 2023). llama3 (Llama 3.1), with the wavelength 2 pi / rate and the context L
    before scaling: a wavelength above L / low is divided as in linear, one below L / high kept, and between them the
    two are mixed by (L / wavelength - low) / (high - low). yarn (Peng et al. 2023): the same by the index of the pair,
    between the pairs that turn beta_fast times and beta_slow times in L, rounded outwards.
    """
    rate = theta ** (-2 * pair / width)
    if scaling is None:
        return rate
    slow = rate / scaling.factor
    if scaling.kind == "linear":
        return slow
    length = scaling.original_context
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / rate
        if wavelength > length / scaling.low_freq_factor:
            return slow
        if wavelength < length / scaling.high_freq_factor:
            return rate
        mix = (length / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return (1 - mix) * slow + mix * rate
    assert scaling.kind == "yarn"
    ends = [
        width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), width - 1)
    ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
    return slow * ramp + rate * (1 - ramp)


def rope_magnitude(scaling: Any) -> float:
    """The factor of turned vectors: sqrt(1/t) = 0.1 ln(s) + 1 of yarn (Peng et al. 2023, equation 22), else 1."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1 if scaling.attention_factor is None else scaling.attention_factor


def rotary_part(
    x: Array, position: int, rates: list[float], magnitude: float = 1.0, table: Precision = np.float64
) -> Array:
    """One head's vector with pair (i, i + R/2) of its first R features turned by position times rate; the rest stays.

    `table` is the precision in which cosines and sines, times the magnitude, are stored.
    """
    half = len(rates)
    turned = x.copy()
    for i, rate in enumerate(rates):
        angle = position * rate
        turned[i], turned[i + half] = reference.rotate_pair(x[i], x[i + half], angle, table, magnitude)
    return turned


# Feed-forward: one network, or a few of many.

FEEDFORWARD_PARTS = ("up_proj", "up_bias", "gate_proj", "gate_bias", "down_proj", "down_bias")


def feedforward(x: Array, parts: Weights, activation: str) -> Array:
    """act(x U^T + b_U) D^T + b_D for one token (Vaswani et al. 2017), or (gate(x G^T + b_G) * (x U^T + b_U)) D^T + b_D.

    `parts` holds `up_proj` (F, D), `down_proj` (D, F), of gated ones `gate_proj` (F, D), and their biases if any.
    """
    up = _affine(x @ parts["up_proj"].T, None, parts.get("up_bias"))
    if activation in GATES:
        inner = GATES[activation](_affine(x @ parts["gate_proj"].T, None, parts.get("gate_bias"))) * up
    else:
        inner = ACTIVATIONS[activation](up)
    return _affine(inner @ parts["down_proj"].T, None, parts.get("down_bias"))


def largest(probabilities: Array, k: int) -> list[int]:
    """The indices of the k largest, largest first; of two equal ones the lower index first."""
    return sorted(range(len(probabilities)), key=lambda e: (-probabilities[e], e))[:k]


def router_probabilities(x: Array, router_weight: Array) -> Array:
    """softmax(x R^T) over all E experts for one token: D and (E, D) give E."""
    return softmax(x @ router_weight.T)


def route(x: Array, router_weight: Array, k: int, normalise: bool | None = None) -> list[tuple[int, float]]:
    """The k likeliest experts and their weights p_e / sum of the chosen p, largest first (Shazeer et al. 2017).

    A softmax over all logits, renormalised over the chosen, is the softmax over the chosen logits alone. Unless
    `normalise` decides, a single expert keeps its p_e, through which alone the router learns (Fedus et al. 2021).
    """
    probabilities = router_probabilities(x, router_weight)
    chosen = largest(probabilities, k)
    if not (k > 1 if normalise is None else normalise):
        return [(e, float(probabilities[e])) for e in chosen]
    total = sum(float(probabilities[e]) for e in chosen)
    return [(e, float(probabilities[e]) / total) for e in chosen]


def experts_forward(
    x: Array, weights: Weights, prefix: str, k: int, activation: str, mode: str, normalise: bool | None = None
) -> Array:
    """One token through its chosen experts, with w_e from `route` (Shazeer et al. 2017).

    "route": sum over chosen e of w_e expert_e(x). "merge": every matrix and bias becomes the sum over chosen e of
    w_e times that of expert e, and x passes through that one network.
    """
    chosen = route(x, weights[f"{prefix}.router.weight"], k, normalise)
    names = [name for name in FEEDFORWARD_PARTS if f"{prefix}.{name}" in weights]
    out = np.zeros(len(x))
    if mode == "route":
        for e, weight in chosen:
            out = out + weight * feedforward(x, {name: weights[f"{prefix}.{name}"][e] for name in names}, activation)
        return out
    assert mode == "merge"
    merged = {name: np.zeros_like(weights[f"{prefix}.{name}"][0]) for name in names}
    for e, weight in chosen:
        for name in names:
            merged[name] = merged[name] + weight * weights[f"{prefix}.{name}"][e]
    return feedforward(x, merged, activation)


def load_balance(probabilities: Array, k: int) -> float:
    """E sum_e f_e P_e for one sequence: (T, E) router probabilities; 1 when both shares are even.

    f_e is the share of the T k assignments that go to e, P_e the mean probability of e over the T tokens
    (Fedus et al. 2021, equations 4 to 6, where k = 1).
    """
    tokens, experts = probabilities.shape
    total = 0.0
    for e in range(experts):
        share = sum(e in largest(row, k) for row in probabilities) / (tokens * k)
        mean = sum(row[e] for row in probabilities) / tokens
        total += share * mean
    return experts * total


def router_entropy(probabilities: Array) -> float:
    """The mean over tokens of -sum_e p_e log p_e, in nats, with 0 log 0 = 0: (T, E)."""
    return sum(-sum(p * math.log(p) for p in row if p > 0) for row in probabilities) / len(probabilities)


# Stacks: the decoder, the encoder, and the two together.


class _Stack:
    """The layers whose names begin with `prefix`; the embedding, which both sides share, is always at the root."""

    def __init__(self, weights: Weights, config: Any, prefix: str, table: Precision) -> None:
        assert config.position in POSITIONS
        self.weights = weights
        self.config = config
        self.prefix = prefix
        self.table = table

    def linear(self, x: Array, name: str) -> Array:
        assert (f"{name}.bias" in self.weights) == self.has_bias(name)
        return _affine(x @ self.weights[f"{name}.weight"].T, None, self.weights.get(f"{name}.bias"))

    def has_bias(self, name: str) -> bool:
        """Whether the projection has a bias: as its group says, or as all of them."""
        groups = {"qkv_bias": "qkv", "output_bias": "o", "ffn_bias": ("up", "gate", "down")}
        group = next(group for group, letters in groups.items() if name.split(".")[-1].split("_")[0] in letters)
        own = getattr(self.config, group)
        return self.config.bias if own is None else own

    def norm(self, x: Array, name: str) -> Array:
        if self.config.norm == "none":
            return x
        one: Callable[..., Array] = {"layernorm": layer_norm, "rmsnorm": rms_norm}[self.config.norm]
        gain, bias = self.weights.get(f"{name}.weight"), self.weights.get(f"{name}.bias")
        assert (gain is not None) == self.config.norm_gain
        assert (bias is not None) == self.config.norm_bias
        if self.config.norm_unit_offset:
            assert gain is not None
            gain = 1 + gain
        eps = self.config.norm_epsilon
        return np.array([one(row, gain, bias, **({} if eps is None else {"eps": eps})) for row in x])

    def embed(self, ids: list[int]) -> Array:
        """Token embeddings, scaled if asked, plus the absolute positions 0, 1, ... where the scheme adds them."""
        width = self.config.width
        x = np.array([self.weights["embedding.weight"][token] for token in ids])
        if self.config.embedding_scale is not None:
            x = x * self.config.embedding_scale
        elif self.config.scale_embedding:
            x = x * math.sqrt(width)
        for p in range(len(ids)):
            if self.config.position == "learned":
                x[p] += self.weights[f"{self.prefix}position.weight"][p]
            if self.config.position == "sinusoidal":
                x[p] += np.array([reference.sinusoid(p, i, width) for i in range(width)]).astype(self.table)
        return x

    def heads(self, x: Array, name: str, norm_name: str | None, rotated: bool) -> list[Array]:
        """The projection `name` of x, cut into heads of width W, each normalised and rotated where that applies."""
        projected, width = self.linear(x, name), self.config.head_dim
        heads = [projected[:, start : start + width] for start in range(0, projected.shape[1], width)]
        if norm_name is not None and self.config.qk_norm:
            heads = [self.norm(head, norm_name) for head in heads]
        if rotated:
            rates, magnitude = self.rotation(int(name.split("layers.")[1].split(".")[0]))
            heads = [
                np.array([rotary_part(row, p, rates, magnitude, self.table) for p, row in enumerate(head)])
                for head in heads
            ]
        return heads

    def rotation(self, layer: int) -> tuple[list[float], float]:
        """The rates of a layer's pairs of features, and the factor of what is turned."""
        config = self.config
        width = config.rotary_dim or config.head_dim
        theta, scaling = config.rope_theta, config.rope_scaling
        if config.local_rope_theta is not None and layer in config.local_layers:
            theta, scaling = config.local_rope_theta, None
        return [rope_rate(pair, width, theta, scaling) for pair in range(width // 2)], rope_magnitude(scaling)

    def attention(self, x: Array, memory: Array, name: str, visible: Visible, positions: bool) -> Array:
        """Queries from x (T, D), keys and values from `memory` (S, D); query head h reads key head h // (H / K).

        `positions`: whether rotation and relative tables apply, which they do in self-attention alone.
        """
        config = self.config
        rotated = positions and config.position == "rope"
        queries = self.heads(x, f"{name}.q_proj", f"{name}.q_norm", rotated)
        keys = self.heads(memory, f"{name}.k_proj", f"{name}.k_norm", rotated)
        values = self.heads(memory, f"{name}.v_proj", None, False)
        assert (len(queries), len(keys), len(values)) == (config.heads, config.kv_heads, config.kv_heads)
        relative: dict[str, Any] = {}
        if positions and config.position == "relative":
            relative = {part: self.weights[f"{name}.core.{part}"] for part in ("relative_keys", "relative_values")}
            relative["clip"] = config.relative_clip
        group = config.heads // config.kv_heads
        relative["multiplier"] = config.attention_multiplier
        if not config.attention_scale:
            relative["multiplier"] = 1.0
        heads = [
            attend_full(q, keys[h // group], values[h // group], visible, **relative) for h, q in enumerate(queries)
        ]
        return self.linear(np.concatenate(heads, axis=1), f"{name}.o_proj")

    def feedforward(self, x: Array, name: str) -> Array:
        config, weights = self.config, self.weights
        names = ("up", "gate", "down") if config.activation in GATES else ("up", "down")
        biased = self.has_bias("down_proj")
        if config.experts > 1:
            stacked = {f"{name}.router.weight": weights[f"{name}.router.weight"]}
            assert len(stacked[f"{name}.router.weight"]) == config.experts
            for part in names:
                own = [f"{name}.experts.{e}.{part}_proj" for e in range(config.experts)]
                stacked[f"{name}.{part}_proj"] = np.array([weights[f"{expert}.weight"] for expert in own])
                assert all((f"{expert}.bias" in weights) == biased for expert in own)
                if biased:
                    stacked[f"{name}.{part}_bias"] = np.array([weights[f"{expert}.bias"] for expert in own])
            k, mode, normalise = config.experts_per_token, config.expert_mode, config.normalise_top_k
            return np.array([experts_forward(row, stacked, name, k, config.activation, mode, normalise) for row in x])
        parts = {}
        for part in names:
            parts[f"{part}_proj"] = weights[f"{name}.{part}_proj.weight"]
            assert (f"{name}.{part}_proj.bias" in weights) == biased
            if biased:
                parts[f"{part}_bias"] = weights[f"{name}.{part}_proj.bias"]
        return np.array([feedforward(row, parts, config.activation) for row in x])

    def sublayer(self, x: Array, name: str, function: Callable[[Array], Array]) -> Array:
        """Pre-norm: x + f(norm(x)). Post-norm: norm(x + f(x)) (Xiong et al. 2020). Sandwich:
        x + post_norm(f(norm(x))) (Gemma 3).

        Without residual connections, the same without x +.
        """
        kept = x if self.config.residual else np.zeros_like(x)
        if self.config.norm_placement == "sandwich":
            return kept + self.norm(function(self.norm(x, f"{name}_norm")), f"{name}_post_norm")
        if self.config.norm_placement == "pre":
            return kept + function(self.norm(x, f"{name}_norm"))
        return self.norm(kept + function(x), f"{name}_norm")

    def adapted(self, y: Array, name: str) -> Array:
        """The output of the sublayer `name`, through its bottleneck if it has one (Houlsby et al. 2019, figure 2)."""
        if f"{name}.down.weight" not in self.weights:
            return y
        down, up = ([self.weights[f"{name}.{part}.{kind}"] for kind in ("weight", "bias")] for part in ("down", "up"))
        return np.array([bottleneck(row, down[0], down[1], up[0], up[1], "gelu") for row in y])

    def layer(self, x: Array, n: int, visible: Visible, memory: Array | None) -> Array:
        """Self-attention, then cross-attention if there is a memory, then feed-forward."""
        name = f"{self.prefix}layers.{n}"
        attention, crossing, feeding = (f"{name}.{part}" for part in ("attention", "cross_attention", "feedforward"))
        if self.config.parallel_residual:  # x + attention(norm(x)) + feedforward(norm(x))
            placed, fed = (self.norm(x, f"{part}_norm") for part in (attention, feeding))
            attended = self.adapted(self.attention(placed, placed, attention, visible, True), attention)
            return x + attended + self.adapted(self.feedforward(fed, feeding), feeding)
        x = self.sublayer(
            x, attention, lambda y: self.adapted(self.attention(y, y, attention, visible, True), attention)
        )
        if memory is not None:
            every = bidirectional(len(memory))
            x = self.sublayer(
                x, crossing, lambda y: self.adapted(self.attention(y, memory, crossing, every, False), crossing)
            )
        return self.sublayer(x, feeding, lambda y: self.adapted(self.feedforward(y, feeding), feeding))

    def hidden(self, ids: list[int], visible: Callable[[int], Visible], memory: Array | None = None) -> Array:
        """The last layer's output (T, D), normalised once more where norms come first; `visible` is asked by layer."""
        x = self.embed(ids)
        for n in range(self.config.encoder_layers if self.prefix else self.config.layers):
            x = self.layer(x, n, visible(n), memory)
        return x if self.config.norm_placement == "post" else self.norm(x, f"{self.prefix}norm")

    def logits(self, hidden: Array) -> Array:
        return hidden @ self.weights["embedding.weight" if self.config.tie else "output.weight"].T

    def causal_or_local(self, n: int) -> Visible:
        local = n in self.config.local_layers
        return windowed(self.config.local_window) if local else causal


def decoder_logits_with_parts(weights: Weights, config: Any, ids: list[int], table: Precision = np.float64) -> Array:
    """The logits (T, V) of one sequence in a decoder.

    `table` is the precision of stored sines and cosines.
    """
    stack = _Stack(weights, config, "", table)
    return stack.logits(stack.hidden(ids, stack.causal_or_local))


def encoder_hidden(
    weights: Weights, config: Any, ids: list[int], length: int, prefix: str = "", table: Precision = np.float64
) -> Array:
    """The final hidden states (T, D): the decoder's layers with the causal mask removed (Devlin et al. 2019).

    Positions from `length` on are padding: no query attends to them, and their own rows have no meaning. `local_layers`
    is about the layers of a decoder, and is not read.
    """
    assert 1 <= length <= len(ids)
    return _Stack(weights, config, prefix, table).hidden(ids, lambda n: bidirectional(length))


def encoder_logits(weights: Weights, config: Any, ids: list[int], length: int, table: Precision = np.float64) -> Array:
    """The logits (T, V) of a masked-token model: the hidden states times the embedding, or `output.weight`."""
    return _Stack(weights, config, "", table).logits(encoder_hidden(weights, config, ids, length, "", table))


def encoder_decoder_logits(
    weights: Weights, config: Any, source: list[int], target: list[int], table: Precision = np.float64
) -> Array:
    """The logits (T, V) after each token of `target`, given `source` (Vaswani et al. 2017).

    In every decoder layer's cross-attention k_j and v_j come from the encoder's final output, q_i from the decoder.
    """
    memory = encoder_hidden(weights, config, source, len(source), "encoder.", table)
    stack = _Stack(weights, config, "", table)
    return stack.logits(stack.hidden(target, stack.causal_or_local, memory))


# Losses.


def log_softmax(scores: Array) -> Array:
    """s_i - log sum_j exp(s_j)."""
    shifted = scores - np.max(scores)
    return shifted - math.log(np.exp(shifted).sum())


def label_smoothed(logits: Array, target: int, smoothing: float) -> float:
    """(1 - s) (-log p_target) + s / V sum_v -log p_v for one token (Szegedy et al. 2016, section 7).

    The target itself has its part of the even share too, as in torch.nn.CrossEntropyLoss.
    """
    log_probabilities = log_softmax(logits)
    even = sum(-entry for entry in log_probabilities) / len(log_probabilities)
    return float((1 - smoothing) * -log_probabilities[target] + smoothing * even)


# Fine-tuning.


def lora(x: Array, weight: Array, A: Array, B: Array, alpha: float, rank: int, rank_stabilised: bool = False) -> Array:
    """x (W0 + s B A)^T with s = alpha / r (Hu et al. 2021), or alpha / sqrt(r) (Kalajdzievski 2023).

    W0 (outputs, inputs), A (r, inputs), B (outputs, r); x is a vector or rows.
    """
    assert len(A) == B.shape[1] == rank
    scale = alpha / math.sqrt(rank) if rank_stabilised else alpha / rank
    return x @ (weight + scale * (B @ A)).T


def bottleneck(x: Array, down: Array, down_bias: Array, up: Array, up_bias: Array, activation: str) -> Array:
    """x + act(x D^T + b_D) U^T + b_U, with D (m, width) and U (width, m) (Houlsby et al. 2019, section 2.1)."""
    inner = ACTIVATIONS[activation](_affine(x @ down.T, None, down_bias))
    return x + _affine(inner @ up.T, None, up_bias)


# Decoding.


def penalised(total: float, length: int, length_penalty: float) -> float:
    """sum log p / ((5 + length) / 6)^alpha (Wu et al. 2016, equation 14); the length counts the end token."""
    return total / ((5 + length) / 6) ** length_penalty


def beam_search(
    next_log_probabilities: Callable[[Prefix], Array], start: int, end: int, beams: int, max_tokens: int, penalty: float
) -> tuple[list[int], float]:
    """The best sequence found, without `start`, and its penalised score.

    At each step every open hypothesis grows by every token, and of all that grew the `beams` with the largest
    sum log p count. Those of them that end are finished, for good. The best `beams` that have not ended stay open,
    until `beams` have finished and no open one scores more than the best of them, at the length that it has so far.
    Where nothing has ended after `max_tokens`, the best open one is it. `next_log_probabilities` takes the tokens so
    far, `start` first, and gives V numbers.
    """
    opened: list[tuple[Prefix, float]] = [((start,), 0.0)]
    finished: list[tuple[Prefix, float]] = []
    for _ in range(max_tokens):
        grown = [
            ((*tokens, token), total + float(step))
            for tokens, total in opened
            for token, step in enumerate(next_log_probabilities(tokens))
            if step > -math.inf
        ]
        grown.sort(key=lambda hypothesis: -hypothesis[1])
        finished += [(tokens, total) for tokens, total in grown[:beams] if tokens[-1] == end]
        opened = [(tokens, total) for tokens, total in grown if tokens[-1] != end][:beams]
        if not opened:
            break
        if len(finished) >= beams:
            best, hope = (
                max(penalised(total, len(tokens) - 1, penalty) for tokens, total in part) for part in (finished, opened)
            )
            if best >= hope:
                break
    scored = [(list(tokens[1:]), penalised(total, len(tokens) - 1, penalty)) for tokens, total in finished or opened]
    return max(scored, key=lambda hypothesis: hypothesis[1])


def best_sequence_by_enumeration(
    next_log_probabilities: Callable[[Prefix], Array], start: int, end: int, max_tokens: int, length_penalty: float
) -> tuple[list[int], float]:
    """As beam_search with room for everything: the best of all sequences of at most `max_tokens` that end.

    Where none can end, the best of all sequences of `max_tokens`.
    """
    others = [token for token in range(len(next_log_probabilities((start,)))) if token != end]

    def score(tokens: Prefix) -> float:
        steps = [next_log_probabilities((start, *tokens[:n]))[token] for n, token in enumerate(tokens)]
        return penalised(float(sum(steps)), len(tokens), length_penalty)

    ending = [(*tokens, end) for length in range(max_tokens) for tokens in itertools.product(others, repeat=length)]
    scored = [(list(tokens), score(tokens)) for tokens in ending]
    if max(value for _, value in scored) == -math.inf:
        scored = [(list(tokens), score(tokens)) for tokens in itertools.product(others, repeat=max_tokens)]
    return max(scored, key=lambda hypothesis: hypothesis[1])
