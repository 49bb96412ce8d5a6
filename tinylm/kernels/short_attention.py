"""Scaled dot-product attention by torch's fused kernels, or unfused on a CPU where that is faster (decision 010).

Unfused attention computes scores, softmax and weighted sum as separate operations, and stores the attention weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tinylm.kernels.dropout_bits import dropout as apply_dropout

MAX_UNFUSED_KEYS = 512  # with more keys, the backward pass of the fused kernel is faster in bf16


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """softmax(scale q k^T) v for each head: (B, H, T, W) and two of (B, K, S, W) -> (B, H, T, W).

    Query head h reads key/value head h // (H / K). mask: broadcastable to (B, 1, T, S), True where a query attends.
    With `causal` and without a mask, a query attends to the keys up to its own position; T must then be S, or 1 (the
    last position). `scale` is 1/sqrt(W) unless given. `dropout` is applied to the attention weights.
    """
    if q.device.type == "cpu" and (dropout or _is_unfused_faster(q, k)):
        return _unfused_attention(q, k, v, mask, causal, scale, dropout)
    if q.shape[2] == 1:  # the queries that share a head as rows of one product, so that keys and values are read once
        rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # (B, K, H/K, W)
        return F.scaled_dot_product_attention(rows, k, v, mask, dropout, scale=scale).reshape(q.shape)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None and q.shape[2] > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def max_unfused_keys(device: str, dtype: str) -> int:
    """Largest number of keys with which training without attention dropout is unfused; 0 if it is always fused."""
    return MAX_UNFUSED_KEYS if (device, dtype) == ("cpu", "bf16") else 0


def causal_triangle(queries: int, keys: int, device: torch.device) -> Tensor:
    """(T, S) causal mask, True where a query attends; the last query has the position of the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _is_unfused_faster(q: Tensor, k: Tensor) -> bool:
    """Whether this is bf16 training with few keys, where the backward pass of the fused kernel is slow."""
    return torch.is_grad_enabled() and q.dtype == torch.bfloat16 and k.shape[2] <= MAX_UNFUSED_KEYS


def _unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, dropout: float
) -> Tensor:
    """As `dot_product_attention`; the queries of all heads that share a key/value head are rows of one product."""
    batch, kv_heads, keys, width = k.shape
    queries, group = q.shape[2], q.shape[1] // kv_heads
    rows = q.reshape(batch * kv_heads, group * queries, width)  # (B*K, H/K*T, W)
    k, v = (x.reshape(batch * kv_heads, keys, width) for x in (k, v))  # (B*K, S, W)
    if mask is None and causal:
        mask = causal_triangle(queries, keys, q.device)
    elif mask is None:
        mask = torch.ones(1, 1, dtype=torch.bool, device=q.device)
    mask = mask.expand(1 if mask.dim() == 2 else batch, 1, queries, keys)  # (1 or B, 1, T, S)
    bias = q.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)  # (1 or B, 1, T, S)
    bias = bias.repeat(1, kv_heads if len(mask) > 1 else 1, group, 1).flatten(0, 1)  # (1 or B*K, H/K*T, S)
    scale = width**-0.5 if scale is None else scale
    weights = torch.baddbmm(bias, rows, k.transpose(1, 2), alpha=scale).softmax(dim=-1)  # (B*K, H/K*T, S)
    if dropout:
        weights = apply_dropout(weights, dropout)
    return (weights @ v).view(batch, -1, queries, width)  # (B, H, T, W)
