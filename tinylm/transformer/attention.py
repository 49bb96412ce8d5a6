"""Multi-head attention with its masks and key/value caches: self-attention with grouped queries, and cross-attention
(Vaswani et al. 2017).

`SelfAttention` and `CrossAttention` hold the projections and use the cache. Their core computes attention from the
queries, keys and values of all heads: `DotProduct`, or `RelativeDotProduct` for self-attention with relative positions.
Shape letters: see `tinylm.transformer`.
"""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tinylm.kernels.layers import causal_triangle, dot_product_attention
from tinylm.transformer.layers import Dropout, Linear, as_product_input
from tinylm.transformer.position import Rotation, rotate


class AttentionCache(Protocol):
    """The part of a key/value cache that attention uses."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, K, T, W); return those that any new token attends to, each (B, K, S, W).

        Keys and values of one row, (1, K, T, W), are appended to each row of an empty cache, and those of one row
        are returned.
        """
        ...


class Cache(AttentionCache, Protocol):
    """The key/value cache of one self-attention layer.

    offset: number of tokens processed so far, including padding and tokens that the cache has dropped.
    starts: (B,), the number of padding slots at the left of each row; `None` without padding.
    """

    offset: int
    starts: Tensor | None

    def reorder(self, rows: Tensor) -> None:
        """Replace row b by row rows[b], as beam search does. rows: (B',); B' may be smaller than B.

        `starts` is not reordered.
        """
        ...


class KVCache(Cache):
    """Cache of full attention with `length` preallocated slots."""

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        starts: Tensor | None = None,
    ) -> None:
        self.keys = torch.empty(batch, n_kv_heads, length, head_dim, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.starts = starts
        self.offset = 0

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K, T, W) -> (B, K, offset + T, W). Raises ValueError when the slots are used up."""
        end = self.offset + keys.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"the cache has {self.keys.shape[2]} slots, and {end} are needed")
        self.keys[:, :, self.offset : end] = keys
        self.values[:, :, self.offset : end] = values
        self.offset = end
        rows = len(keys)
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def reorder(self, rows: Tensor) -> None:
        def reordered(slots: Tensor) -> Tensor:
            found = slots.new_empty(len(rows), *slots.shape[1:])  # (B', K, length, W)
            found[:, :, : self.offset] = slots[rows, :, : self.offset]  # the filled slots only
            return found

        self.keys, self.values = reordered(self.keys), reordered(self.values)


class StaticCache(AttentionCache):
    """The slots of a KVCache for a CUDA graph: tensors stay in place, and the slot of a token is a tensor.

    All slots are returned, and a mask hides those that are not used. slot: (1,), of the next token; the caller advances
    it, and knows positions and padding.
    """

    def __init__(self, cache: KVCache, slot: Tensor) -> None:
        self.keys, self.values, self.slot = cache.keys, cache.values, slot

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of one token per row, (B, K, 1, W), and return those of all slots, (B, K, S, W)."""
        self.keys.index_copy_(2, self.slot, keys)
        self.values.index_copy_(2, self.slot, values)
        return self.keys, self.values


class SlidingWindowCache(KVCache):
    """Cache of sliding-window attention: keeps the last `window` - 1 tokens, so that its memory is bounded."""

    def __init__(self, batch: int, n_kv_heads: int, window: int, *args: Any) -> None:
        super().__init__(batch, n_kv_heads, 0, *args)
        self.window = window

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K, T, W) -> (B, K, S, W): at most window - 1 cached tokens and T new ones."""
        batch, rows = len(self.keys), len(keys)
        self.offset += keys.shape[2]
        keys = torch.cat((self.keys[:rows], keys), dim=2)  # (B, K, S, W)
        values = torch.cat((self.values[:rows], values), dim=2)  # (B, K, S, W)
        first = max(0, keys.shape[2] - (self.window - 1))
        # A view of the last tokens would keep the whole tensor alive.
        self.keys = keys[:, :, first:].expand(batch, -1, -1, -1).clone()
        self.values = values[:, :, first:].expand(batch, -1, -1, -1).clone()
        return keys, values


class CrossCache:
    """Keys and values of the encoder's output, computed at the first decoding step and reused afterwards.

    keys_and_values: each (B, K, S, W); `None` before the first step.
    """

    def __init__(self) -> None:
        self.keys_and_values: tuple[Tensor, Tensor] | None = None

    def reorder(self, rows: Tensor) -> None:
        """Replace row b by row rows[b]."""
        if self.keys_and_values is not None:
            keys, values = self.keys_and_values
            self.keys_and_values = keys[rows], values[rows]  # (B', K, S, W) each


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

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        mask: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). mask: broadcastable to (B, 1, T, S), True to attend; replaces the causal mask."""
        x = as_product_input(x)
        q = self._queries(x)  # (B, H, T, W)
        k, v = self._keys_and_values(x)  # (B, K, T, W)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.update(k, v)  # (B, K, S, W)
        return self._merge(self.core(q, k, v, mask, self.causal))  # (B, T, D)


class CrossAttention(_MultiHeadAttention):
    """Queries from the decoder, keys and values from the encoder's output (Vaswani et al. 2017)."""

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, cache: CrossCache | None = None) -> Tensor:
        """(B, T, D) and encoder output (B, S, D) -> (B, T, D). With a filled cache, `memory` is not used.

        mask: broadcastable to (B, 1, T, S), True to attend.
        """
        keys_and_values = (cache and cache.keys_and_values) or self._keys_and_values(memory)
        if cache is not None:
            cache.keys_and_values = keys_and_values
        return self._merge(self.core(self._queries(x), *keys_and_values, mask, False))  # (B, T, D)
