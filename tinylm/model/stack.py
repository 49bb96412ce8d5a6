"""What all transformers here have in common: a stack of layers, and around it an embedding and an output layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tinylm.model.block import Memory
from tinylm.model.cache import Cache, CrossCache
from tinylm.model.dropout import Dropout
from tinylm.model.linear import linear
from tinylm.model.position import Position
from tinylm.model.routing import RoutingSummary, summarise, together


class Output(NamedTuple):
    """hidden: (B, T, D). routing: what mixtures of experts tell in training."""

    hidden: Tensor
    routing: RoutingSummary | None = None

    @property
    def aux(self) -> Tensor:
        """The sum of auxiliary losses over the batch's sequences, zero for a dense model."""
        return self.hidden.new_zeros(()) if self.routing is None else self.routing.balance


class Stack(nn.Module):
    """Positions, layers, and what ends them: a normalisation after pre-norm blocks, `nn.Identity()` after post-norm."""

    def __init__(self, position: Position, layers: Sequence[nn.Module], norm: nn.Module, dropout: float) -> None:
        super().__init__()
        self.position = position
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.dropout = Dropout(dropout)

    def through_layers(
        self,
        x: Tensor,
        positions: Tensor,
        masks: Sequence[Tensor | None],
        cache: Sequence[Cache] | None = None,
        memory: Memory | None = None,
        cross_cache: Sequence[CrossCache] | None = None,
        real: Tensor | None = None,
    ) -> Output:
        """Embedded tokens (B, T, D) at positions (T,) or (B, T), with a mask a layer, as (B, 1, T, S).

        real: (B, T), which of them are no padding, and count in what is told of routing.
        """
        x = self.dropout(self.position.add(x, positions))
        rotation = self.position.rotation(positions)
        told: list[RoutingSummary] = []
        for index, layer in enumerate(self.layers):
            x, routing = layer(
                x,
                rotation,
                masks[index],
                cache[index] if cache else None,
                memory,
                cross_cache[index] if cross_cache else None,
            )
            if routing is not None:
                told.append(summarise(routing, real))
        return Output(self.norm(x), together(told) if told else None)


class Transformer(Stack):
    """A stack with an embedding before it and an output layer after it; `None` for output shares the embedding's matrix
    (seed 004).
    """

    def __init__(
        self,
        position: Position,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        *,
        embedding: nn.Embedding,
        output: nn.Linear | None,
        context: int,
        embedding_scale: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(position, layers, norm, dropout)
        self.embedding = embedding
        self.output = output
        self.context = context
        self.embedding_scale = embedding_scale

    @property
    def vocab_size(self) -> int:
        return self.embedding.num_embeddings

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D)"""
        x = self.embedding(ids)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def probe(self, ids: Tensor) -> Output:
        """What the model makes of ids (B, T), whatever else it takes."""
        return self(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""
        if self.output is None:
            return linear(hidden, self.embedding.weight)
        return self.output(hidden)
