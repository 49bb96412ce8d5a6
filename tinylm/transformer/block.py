"""Transformer blocks: attention and feed-forward, each with a residual connection and a norm (Vaswani et al. 2017)."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from tinylm.transformer.feedforward import Routing
from tinylm.transformer.kv_cache import AttentionCache, CrossCache
from tinylm.transformer.layers import Dropout
from tinylm.transformer.position import Rotation


class Memory(NamedTuple):
    """Encoder output for cross-attention. hidden: (B, S, D). mask: (B, 1, 1, S), False for padding, or `None`."""

    hidden: Tensor
    mask: Tensor | None


class PreNormBlock(nn.Module):
    """x + sublayer(norm(x)) for each sublayer: self-attention, optionally cross-attention, feed-forward.

    Each sublayer's norm is named after it: `attention_norm` for `attention`.
    """

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        make_norm: Callable[[], nn.Module],
        dropout: float,
        cross_attention: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm()
        self.attention = attention
        self.cross_attention_norm = make_norm() if cross_attention is not None else None
        self.cross_attention = cross_attention
        self.feedforward_norm = make_norm()
        self.feedforward = feedforward
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Tensor | None,
        cache: AttentionCache | None,
        memory: Memory | None = None,
        cross_cache: CrossCache | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """(B, T, D) -> (B, T, D), and the routing of a mixture of experts in training, else `None`."""
        y = self.attention(self._sublayer_input(x, "attention"), rotation, mask, cache)
        x = self._add(x, y, "attention")
        if self.cross_attention is not None:
            assert memory is not None
            y = self.cross_attention(self._sublayer_input(x, "cross_attention"), *memory, cross_cache)
            x = self._add(x, y, "cross_attention")
        y, routing = self.feedforward(self._sublayer_input(x, "feedforward"))
        return self._add(x, y, "feedforward"), routing

    def _sublayer_input(self, x: Tensor, sublayer: str) -> Tensor:
        return self._norm(sublayer, x)

    def _add(self, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
        """Add the sublayer output y to the residual stream x: (B, T, D) -> (B, T, D)."""
        return x + self.dropout(y)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, f"{name}_norm")(x)


class PostNormBlock(PreNormBlock):
    """norm(x + sublayer(x)) for each sublayer, as in the original transformer (Vaswani et al. 2017)."""

    def _sublayer_input(self, x: Tensor, sublayer: str) -> Tensor:
        return x

    def _add(self, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
        return self._norm(sublayer, x + self.dropout(y))


class SandwichNormBlock(PreNormBlock):
    """x + post_norm(sublayer(norm(x))) for each sublayer (Ding et al. 2021; Gemma 3)."""

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        make_norm: Callable[[], nn.Module],
        dropout: float,
        cross_attention: nn.Module | None = None,
    ) -> None:
        super().__init__(attention, feedforward, make_norm, dropout, cross_attention)
        self.attention_post_norm = make_norm()
        self.cross_attention_post_norm = make_norm() if cross_attention is not None else None
        self.feedforward_post_norm = make_norm()

    def _add(self, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
        return x + self.dropout(self._norm(f"{sublayer}_post", y))


class ParallelBlock(PreNormBlock):
    """x + attention(attention_norm(x)) + feedforward(feedforward_norm(x)) (GPT-NeoX, Black et al. 2022).

    Cross-attention is not supported.
    """

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Tensor | None,
        cache: AttentionCache | None,
        memory: Memory | None = None,
        cross_cache: CrossCache | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """(B, T, D) -> (B, T, D), and the routing of a mixture of experts in training, else `None`."""
        attended = self.attention(self.attention_norm(x), rotation, mask, cache)
        y, routing = self.feedforward(self.feedforward_norm(x))
        return x + self.dropout(attended) + self.dropout(y), routing


class PreNormBlockWithoutResidual(PreNormBlock):
    """sublayer(norm(x)) for each sublayer: an ablation without residual connections."""

    def _add(self, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
        return self.dropout(y)


class PostNormBlockWithoutResidual(PostNormBlock):
    """norm(sublayer(x)) for each sublayer: an ablation without residual connections."""

    def _add(self, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
        return self._norm(sublayer, self.dropout(y))
