"""One layer: attention and feed-forward, each with a residual connection and a normalisation (seeds 000, 001, 004)."""

from collections.abc import Callable

from torch import Tensor, nn

from tinylm.model.cache import KVCache
from tinylm.model.position import Rotation


class PreNormBlock(nn.Module):
    """x + sublayer(norm(x)), twice."""

    def __init__(
        self, attention: nn.Module, feedforward: nn.Module, make_norm: Callable[[], nn.Module], dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm()
        self.attention = attention
        self.feedforward_norm = make_norm()
        self.feedforward = feedforward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation, mask, cache))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class PostNormBlock(PreNormBlock):
    """norm(x + sublayer(x)), twice, as first published (Vaswani et al. 2017)."""

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        x = self.attention_norm(x + self.dropout(self.attention(x, rotation, mask, cache)))
        return self.feedforward_norm(x + self.dropout(self.feedforward(x)))
