"""Scaled dot-product attention with many heads, fewer key/value heads, and an optional cache (seeds 000-004)."""

import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.model.cache import KVCache
from tinylm.model.position import Rotation, rotate


class Attention(nn.Module):
    """softmax(q k^T / sqrt(W)) v for every head, causal; query head h reads key/value head h // (H / K).

    `q_norm` and `k_norm` normalise each head's queries and keys before they are rotated; pass `nn.Identity()` for none.
    """

    def __init__(
        self,
        width: int,
        n_heads: int,
        n_kv_heads: int,
        bias: bool,
        dropout: float,
        q_norm: nn.Module,
        k_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.head_width = width // n_heads
        self.grouped = n_kv_heads != n_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(width, n_heads * self.head_width, bias)
        self.k_proj = nn.Linear(width, n_kv_heads * self.head_width, bias)
        self.v_proj = nn.Linear(width, n_kv_heads * self.head_width, bias)
        self.o_proj = nn.Linear(n_heads * self.head_width, width, bias)
        self.q_norm = q_norm
        self.k_norm = k_norm

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). A mask of `None` is causal attention among the T tokens themselves."""
        q = self.q_norm(self._heads(self.q_proj(x)))  # (B, H, T, W)
        k = self.k_norm(self._heads(self.k_proj(x)))  # (B, K, T, W)
        v = self._heads(self.v_proj(x))  # (B, K, T, W)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.update(k, v)  # (B, K, S, W)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and x.shape[1] > 1,
            enable_gqa=self.grouped,
        )  # (B, H, T, W)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, D)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (B, H, T, W)
