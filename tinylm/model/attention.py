"""Attention with many heads: to a sequence itself, with fewer key/value heads and a cache, and to a source (seeds 0-4).

The heads' queries, keys and values meet in a core, one of two: torch's fused kernels, or an explicit softmax with
relative positions.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.model.cache import Cache, CrossCache
from tinylm.model.dropout import Dropout
from tinylm.model.linear import Linear
from tinylm.model.position import Rotation, rotate

FEW_KEYS = 512


class DotProduct(nn.Module):
    """softmax(scale q k^T) v for every head, where scale is 1/sqrt(W) unless given.

    Query head h reads key/value head h // (H / K). On a CPU it is written out where the fused kernel has no dropout, or
    is slower.
    With `causal` and without a mask, a query sees the keys up to its own; queries and keys end together.
    """

    def __init__(self, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """(B, H, T, W) and two of (B, K, S, W) -> (B, H, T, W). mask: as (B, 1, T, S), True where a query may see."""
        dropping = self.dropout.p if self.training else 0.0
        if q.device.type == "cpu" and (dropping or _is_short_gradient(q, k)):
            return self._explicit(q, k, v, mask, causal)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropping,
            is_causal=causal and mask is None and q.shape[2] > 1,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Queries of heads that read the same keys are rows of one product."""
        batch, kv_heads, keys, width = k.shape
        queries, heads_each = q.shape[2], q.shape[1] // kv_heads
        rows = q.reshape(batch * kv_heads, heads_each * queries, width)  # (B*K, H/K*T, W)
        k, v = (x.reshape(batch * kv_heads, keys, width) for x in (k, v))  # (B*K, S, W)
        if mask is None:
            mask = _causal(queries, keys, q.device) if causal else torch.ones(1, 1, dtype=torch.bool, device=q.device)
        mask = mask.expand(1 if mask.dim() == 2 else batch, 1, queries, keys)
        hidden = q.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)  # (1 or B, 1, T, S)
        hidden = hidden.repeat(1, kv_heads if len(mask) > 1 else 1, heads_each, 1).flatten(0, 1)  # (..., H/K*T, S)
        scale = width**-0.5 if self.scale is None else self.scale
        scores = torch.baddbmm(hidden, rows, k.transpose(1, 2), alpha=scale)  # (B*K, H/K*T, S)
        return (self.dropout(scores.softmax(dim=-1)) @ v).view(batch, -1, queries, width)  # (B, H, T, W)


class RelativeDotProduct(nn.Module):
    """e_ij = q_i (k_j + a_ij)^T / sqrt(W) and z_i = sum_j softmax_j(e_ij) (v_j + b_ij) (seed 002; Shaw et al. 2018).

    a_ij and b_ij are learned vectors, shared by all heads, for the offset j - i clipped to [-clip, clip].
    """

    def __init__(self, head_width: int, clip: int, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.clip = clip
        self.dropout = Dropout(dropout)
        self.scale = 1 / math.sqrt(head_width) if scale is None else scale
        self.relative_keys = nn.Parameter(torch.empty(2 * clip + 1, head_width))
        self.relative_values = nn.Parameter(torch.empty(2 * clip + 1, head_width))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """(B, H, T, W) and two of (B, K, S, W) -> (B, H, T, W). mask: as (B, 1, T, S), True where a query may see."""
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        k, v = (repeat_heads(x, heads) for x in (k, v))  # (B, H, S, W)
        query_slots = torch.arange(keys - queries, keys, device=q.device).unsqueeze(1)  # (T, 1)
        key_slots = torch.arange(keys, device=q.device)  # (S,)
        offsets = (key_slots - query_slots).clamp(-self.clip, self.clip) + self.clip  # (T, S)
        offsets = offsets.expand(batch, heads, queries, keys)  # (B, H, T, S)
        relative_scores = _rows_times(q, self.relative_keys.T).gather(-1, offsets)  # (B, H, T, S)
        scores = (q @ k.transpose(-1, -2) + relative_scores) * self.scale  # (B, H, T, S)
        weights = self.dropout(attention_weights(scores, mask, causal))  # (B, H, T, S)
        # Weights of equal offsets are added up first, so that no vector is held for every pair of tokens.
        by_offset = weights.new_zeros(batch, heads, queries, 2 * self.clip + 1)  # (B, H, T, 2C+1)
        by_offset = by_offset.scatter_add(-1, offsets, weights)
        return weights @ v + _rows_times(by_offset, self.relative_values)  # (B, H, T, W)


def _is_short_gradient(q: Tensor, k: Tensor) -> bool:
    """Whether a CPU's fused kernel would lose: its backward pass is slow for few keys of 16 bits (decision 007)."""
    return torch.is_grad_enabled() and q.dtype == torch.bfloat16 and k.shape[2] <= FEW_KEYS


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Each key/value head for every query head that reads it: (B, K, S, W) -> (B, H, S, W)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attention_weights(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The softmax over what each query may see: (B, H, T, S) -> (B, H, T, S). Queries and keys end together."""
    queries, keys = scores.shape[-2:]
    if mask is None and causal:
        mask = _causal(queries, keys, scores.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """(T, S), True where a query may see; queries and keys end together."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _rows_times(x: Tensor, matrix: Tensor) -> Tensor:
    """(..., N) and (N, M) -> (..., M), as one product of matrices: torch would choose by what requires a gradient."""
    return (x.reshape(-1, x.shape[-1]) @ matrix).view(*x.shape[:-1], -1)


class _Heads(nn.Module):
    """The projections around a core. `q_norm` and `k_norm` normalise each head's queries and keys; pass `nn.Identity()`
    for none.
    """

    def __init__(
        self,
        width: int,
        n_heads: int,
        n_kv_heads: int,
        bias: bool,
        core: DotProduct | RelativeDotProduct,
        q_norm: nn.Module,
        k_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.head_width = width // n_heads
        self.q_proj = Linear(width, n_heads * self.head_width, bias)
        self.k_proj = Linear(width, n_kv_heads * self.head_width, bias)
        self.v_proj = Linear(width, n_kv_heads * self.head_width, bias)
        self.o_proj = Linear(n_heads * self.head_width, width, bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.core = core

    def _queries(self, x: Tensor) -> Tensor:
        return self.q_norm(self._split(self.q_proj(x))).transpose(1, 2)  # (B, H, T, W)

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.k_norm(self._split(self.k_proj(x))), self._split(self.v_proj(x))  # (B, S, K, W) each
        return keys.transpose(1, 2), values.transpose(1, 2)  # (B, K, S, W) each

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width))  # (B, T, H, W)

    def _join(self, y: Tensor) -> Tensor:
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, D)


class Attention(_Heads):
    """Self-attention. `causal`: a token sees those before it; otherwise it sees all."""

    def __init__(self, *heads: Any, causal: bool = True, **parts: Any) -> None:
        super().__init__(*heads, **parts)
        self.causal = causal

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). A mask of `None` lets a token see all that it may see by its kind."""
        q = self._queries(x)  # (B, H, T, W)
        k, v = self._keys_and_values(x)  # (B, K, T, W)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.update(k, v)  # (B, K, S, W)
        return self._join(self.core(q, k, v, mask, self.causal))  # (B, T, D)


class CrossAttention(_Heads):
    """The decoder's look at the source: queries from it, keys and values from the encoder's output (seeds 001, 004)."""

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, cache: CrossCache | None = None) -> Tensor:
        """(B, T, D) and (B, S, D) -> (B, T, D). A filled cache stands for the memory, which is then not read."""
        held = cache.held if cache is not None else None
        if held is None:
            held = self._keys_and_values(memory)
            if cache is not None:
                cache.fill(*held)
        return self._join(self.core(self._queries(x), *held, mask, False))  # (B, T, D)
