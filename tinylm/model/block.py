"""One layer: attention and feed-forward, each with a residual connection and a normalisation (seeds 000, 001, 004)."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from tinylm.model.cache import Cache, CrossCache
from tinylm.model.dropout import Dropout
from tinylm.model.position import Rotation
from tinylm.model.routing import Routing


class Memory(NamedTuple):
    """What a decoder sees of the source: the encoder's output (B, S, D), and what of it is no padding (B, 1, 1, S)."""

    hidden: Tensor
    mask: Tensor | None


class PreNormBlock(nn.Module):
    """x + sublayer(norm(x)), for each sublayer. With `cross_attention`, a look at the source stands between the two."""

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
        cache: Cache | None,
        memory: Memory | None = None,
        cross_cache: CrossCache | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """(B, T, D) -> (B, T, D), and what a mixture of experts tells of itself."""
        y = self.attention(self._enter(x, self.attention_norm), rotation, mask, cache)
        x = self._leave(x, self.dropout(y), self.attention_norm)
        if self.cross_attention is not None:
            assert self.cross_attention_norm is not None and memory is not None
            y = self.cross_attention(self._enter(x, self.cross_attention_norm), *memory, cross_cache)
            x = self._leave(x, self.dropout(y), self.cross_attention_norm)
        y, routing = self.feedforward(self._enter(x, self.feedforward_norm))
        return self._leave(x, self.dropout(y), self.feedforward_norm), routing

    def _enter(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x)

    def _leave(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        return x + y


class PostNormBlock(PreNormBlock):
    """norm(x + sublayer(x)), for each sublayer, as first published (Vaswani et al. 2017)."""

    def _enter(self, x: Tensor, norm: nn.Module) -> Tensor:
        return x

    def _leave(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        return norm(x + y)


class PreNormChain(PreNormBlock):
    """sublayer(norm(x)), for each sublayer: no residual connection, to see what one is worth."""

    def _leave(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        return y


class PostNormChain(PostNormBlock):
    """norm(sublayer(x)), for each sublayer: no residual connection."""

    def _leave(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        return norm(y)
