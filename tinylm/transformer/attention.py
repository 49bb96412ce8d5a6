"""Multi-head attention: self-attention with grouped queries and a cache, and cross-attention (Vaswani et al. 2017).

`SelfAttention` and `CrossAttention` hold the projections and use the cache. Their core computes attention from the
queries, keys and values of all heads: `DotProduct`, or `RelativeDotProduct` for self-attention with relative positions.
Shape letters: see `tinylm.transformer`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinylm.kernels.layers import causal_triangle, dot_product_attention
from tinylm.transformer.kv_cache import AttentionCache, CrossCache
from tinylm.transformer.layers import Dropout, Linear
from tinylm.transformer.position import Rotation, rotate


def causal_mask(
    queries: int,
    offset: int,
    starts: Tensor | None = None,
    device: torch.device | None = None,
    window: int | None = None,
) -> Tensor | None:
    """True where query t, at slot i = offset + t, attends to slot s: i - window < s <= i, and s >= starts[b] in row b.

    Slots before starts[b] are padding in row b. A padding query attends only to itself, so that its softmax is defined;
    no other query attends to it. Slots before the first query's window, which a SlidingWindowCache drops, have no
    column in the mask.

    Returns (T, S), or (B, 1, T, S) with `starts`, where S is the number of columns; `None` if plain causal attention
    needs no mask.
    """
    first = 0 if window is None else max(0, offset - (window - 1))
    is_plain_causal = queries == 1 or (offset == 0 and (window is None or queries <= window))
    if starts is None and is_plain_causal:
        return None
    query_slots = torch.arange(offset, offset + queries, device=device).unsqueeze(1)  # (T, 1)
    key_slots = torch.arange(first, offset + queries, device=device)  # (S,)
    allowed = key_slots <= query_slots  # (T, S)
    if window is not None:
        allowed &= key_slots > query_slots - window
    if starts is None:
        return allowed
    in_row = key_slots >= starts.view(-1, 1, 1)  # (B, 1, S)
    return ((allowed & in_row) | (key_slots == query_slots)).unsqueeze(1)  # (B, 1, T, S)


def segment_mask(segments: Tensor, window: int | None) -> Tensor:
    """Causal attention within each of the texts that share a row: (B, T) -> (B, 1, T, T).

    Query i attends to slot s if both have the same number in `segments`, s <= i and, with a window, s > i - window.
    """
    slots = torch.arange(segments.shape[1], device=segments.device)
    distance = slots.unsqueeze(1) - slots  # (T, T)
    allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return (allowed & (segments.unsqueeze(2) == segments.unsqueeze(1))).unsqueeze(1)  # (B, 1, T, T)


def segment_positions(segments: Tensor) -> Tensor:
    """The position of each token in its text: (B, T) -> (B, T). A text is a run of equal numbers in a row.

    Padding, whose number is 0, has the position 0, since a row of several texts may be longer than the context.
    """
    slots = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)  # (B, T)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(segments > 0, slots - torch.where(begins, slots, 0).cummax(dim=1).values, 0)


def padding_mask(lengths: Tensor | None, keys: int) -> Tensor | None:
    """`valid_tokens` broadcast over heads and queries: (B,) -> (B, 1, 1, S). `None` without `lengths`."""
    if lengths is None:
        return None
    return valid_tokens(lengths, keys).view(-1, 1, 1, keys)  # (B, 1, 1, S)


def valid_tokens(lengths: Tensor, slots: int) -> Tensor:
    """True for the first lengths[b] slots of row b, False for padding: (B,) -> (B, S)."""
    return torch.arange(slots, device=lengths.device) < lengths.unsqueeze(1)  # (B, S)


class DotProduct(nn.Module):
    """softmax(scale q k^T) v for each head, where scale is 1/sqrt(W) unless given (Vaswani et al. 2017)."""

    def __init__(self, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """q (B, H, T, W), k and v (B, K, S, W) -> (B, H, T, W): see `dot_product_attention`."""
        dropout = self.dropout.p if self.training else 0.0
        return dot_product_attention(q, k, v, mask, causal, self.scale, dropout)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """The scores scale q k^T, before mask and softmax: (B, H, T, W) and (B, K, S, W) -> (B, H, T, S)."""
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return q @ repeat_heads(k, q.shape[1]).transpose(-1, -2) * scale


class RelativeDotProduct(nn.Module):
    """e_ij = scale q_i (k_j + a_ij)^T and z_i = sum_j softmax_j(e_ij) (v_j + b_ij) (Shaw et al. 2018).

    scale is 1/sqrt(W) unless given. a_ij and b_ij are learned vectors, shared by all heads, for the offset j - i
    clipped to [-clip, clip].
    """

    def __init__(self, head_dim: int, clip: int, dropout: float, scale: float | None) -> None:
        super().__init__()
        self.clip = clip
        self.dropout = Dropout(dropout)
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self.relative_keys = nn.Parameter(torch.empty(2 * clip + 1, head_dim))
        self.relative_values = nn.Parameter(torch.empty(2 * clip + 1, head_dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """q (B, H, T, W), k and v (B, K, S, W) -> (B, H, T, W).

        mask: broadcastable to (B, 1, T, S), True to attend; it replaces the causal mask.
        """
        offsets = self._offsets(q, k)  # (B, H, T, S)
        weights = self.dropout(attention_weights(self.scores(q, k), mask, causal))  # (B, H, T, S)
        # Weights of equal offsets are summed first, so that no (B, H, T, S, W) tensor of value vectors is needed.
        by_offset = weights.new_zeros(*weights.shape[:-1], 2 * self.clip + 1)  # (B, H, T, 2C+1)
        by_offset = by_offset.scatter_add(-1, offsets, weights)
        return weights @ repeat_heads(v, q.shape[1]) + _matmul_rows(by_offset, self.relative_values)  # (B, H, T, W)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """The scores e_ij, before mask and softmax: (B, H, T, W) and (B, K, S, W) -> (B, H, T, S)."""
        relative_scores = _matmul_rows(q, self.relative_keys.T).gather(-1, self._offsets(q, k))  # (B, H, T, S)
        return (q @ repeat_heads(k, q.shape[1]).transpose(-1, -2) + relative_scores) * self.scale

    def _offsets(self, q: Tensor, k: Tensor) -> Tensor:
        """The row of `relative_keys` and `relative_values` for each query and key: (B, H, T, S)."""
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        query_slots = torch.arange(keys - queries, keys, device=q.device).unsqueeze(1)  # (T, 1)
        key_slots = torch.arange(keys, device=q.device)  # (S,)
        offsets = (key_slots - query_slots).clamp(-self.clip, self.clip) + self.clip  # (T, S)
        return offsets.expand(batch, heads, queries, keys)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head for the H / K query heads that share it: (B, K, S, W) -> (B, H, S, W)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attention_weights(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Masked softmax over the keys, computed in fp32 or more: (B, H, T, S) -> (B, H, T, S).

    mask: broadcastable to (B, 1, T, S), True to attend; without one, `causal` masks the keys after each query.
    """
    queries, keys = scores.shape[-2:]
    if mask is None and causal:
        mask = causal_triangle(queries, keys, scores.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def _matmul_rows(x: Tensor, matrix: Tensor) -> Tensor:
    """(..., N) and (N, M) -> (..., M), as one 2-D product.

    Whether `x @ matrix` is a batched product, which rounds differently, depends on which operand requires a gradient.
    """
    return (x.reshape(-1, x.shape[-1]) @ matrix).view(*x.shape[:-1], -1)  # (..., M)


class Heads(NamedTuple):
    """Number of query heads, number of key/value heads, head dimension."""

    query: int
    kv: int
    dim: int


class _MultiHeadAttention(nn.Module):
    """The projections to queries, keys, values and output, around a core that computes attention.

    `q_norm` and `k_norm` normalise the queries and keys of each head; `nn.Identity()` for no QK-norm. `qkv_bias`:
    whether `q_proj`, `k_proj` and `v_proj` have biases; `output_bias`: whether `o_proj` has one.
    """

    def __init__(
        self,
        width: int,
        heads: Heads,
        core: DotProduct | RelativeDotProduct,
        q_norm: nn.Module,
        k_norm: nn.Module,
        qkv_bias: bool = False,
        output_bias: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = heads.dim
        self.q_proj = Linear(width, heads.query * heads.dim, qkv_bias)
        self.k_proj = Linear(width, heads.kv * heads.dim, qkv_bias)
        self.v_proj = Linear(width, heads.kv * heads.dim, qkv_bias)
        self.o_proj = Linear(heads.query * heads.dim, width, output_bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.core = core

    def _queries(self, x: Tensor) -> Tensor:
        return self.q_norm(self._split(self.q_proj(x))).transpose(1, 2)  # (B, H, T, W)

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.k_norm(self._split(self.k_proj(x))), self._split(self.v_proj(x))  # (B, S, K, W) each
        return keys.transpose(1, 2), values.transpose(1, 2)  # (B, K, S, W) each

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # (B, T, H, W)

    def _merge(self, y: Tensor) -> Tensor:
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, D)


class SelfAttention(_MultiHeadAttention):
    """Self-attention. `causal`: without a mask, a token attends only to itself and earlier tokens."""

    def __init__(self, *args: Any, causal: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.causal = causal

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) -> queries (B, H, T, W), keys and values (B, K, T, W)."""
        q = self._queries(x)  # (B, H, T, W)
        k, v = self._keys_and_values(x)  # (B, K, T, W)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        mask: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). mask: broadcastable to (B, 1, T, S), True to attend; replaces the causal mask."""
        q, k, v = self.project(x, rotation)
        if cache is not None:
            k, v = cache.update(k, v)  # (B, K, S, W)
        return self._merge(self.core(q, k, v, mask, self.causal))  # (B, T, D)


class CrossAttention(_MultiHeadAttention):
    """Queries from the decoder, keys and values from the encoder's output (Vaswani et al. 2017)."""

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, cache: CrossCache | None = None) -> Tensor:
        """(B, T, D) and encoder output (B, S, D) -> (B, T, D). With a filled cache, `memory` is not used.

        mask: broadcastable to (B, 1, T, S), True to attend.
        """
        keys_and_values = cache.keys_and_values if cache is not None else None
        if keys_and_values is None:
            keys_and_values = self._keys_and_values(memory)
            if cache is not None:
                cache.fill(*keys_and_values)
        return self._merge(self.core(self._queries(x), *keys_and_values, mask, False))  # (B, T, D)
