"""Base classes of all architectures: a stack of layers, and a transformer with an embedding and an output layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tinylm.transformer.block import Memory
from tinylm.transformer.cross_entropy import CrossEntropy
from tinylm.transformer.dropout import Dropout
from tinylm.transformer.kv_cache import Cache, CrossCache
from tinylm.transformer.linear import linear
from tinylm.transformer.position import Position
from tinylm.transformer.routing import RoutingSummary, merge_summaries, summarise_routing


class Output(NamedTuple):
    """hidden: (B, T, D). routing: summary of mixture-of-experts layers in training, else `None`."""

    hidden: Tensor
    routing: RoutingSummary | None = None

    @property
    def aux(self) -> Tensor:
        """Auxiliary loss (), summed over the layers and the sequences of the batch; zero without `routing`."""
        return self.hidden.new_zeros(()) if self.routing is None else self.routing.balance_loss


class Stack(nn.Module):
    """Position scheme, layers and final norm. norm: `nn.Identity()` if the layers are post-norm blocks.

    dropout: rate of the dropout before the first layer.
    """

    def __init__(self, position: Position, layers: Sequence[nn.Module], norm: nn.Module, dropout: float) -> None:
        super().__init__()
        self.position = position
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.dropout = Dropout(dropout)

    def run_layers(
        self,
        x: Tensor,
        positions: Tensor,
        masks: Sequence[Tensor | None],
        cache: Sequence[Cache] | None = None,
        memory: Memory | None = None,
        cross_cache: Sequence[CrossCache] | None = None,
        valid: Tensor | None = None,
    ) -> Output:
        """Run embedded tokens through the position scheme, all layers and the final norm: (B, T, D) -> (B, T, D).

        positions: (T,), or (B, T) if they differ between rows.
        masks: one attention mask per layer, broadcastable to (B, 1, T, S), or `None` (see `attention_mask`).
        cache: one key/value cache per layer.
        memory, cross_cache: the encoder's output, and one cross-attention cache per layer.
        valid: (B, T), False for padding, which the routing summary leaves out.
        """
        x = self.dropout(self.position.add(x, positions))
        rotations = self.position.rotations(positions, len(self.layers))
        summaries: list[RoutingSummary] = []
        for index, layer in enumerate(self.layers):
            x, routing = layer(
                x,
                rotations[index],
                masks[index],
                cache[index] if cache else None,
                memory,
                cross_cache[index] if cross_cache else None,
            )
            if routing is not None:
                summaries.append(summarise_routing(routing, valid))
        return Output(self.norm(x), merge_summaries(summaries) if summaries else None)


class Embeddings(NamedTuple):
    """The layers between token ids and a stack.

    output: output layer; `None` uses the embedding's weight (Press and Wolf 2017).
    scale: factor of embedded tokens, rounded to their dtype as in Gemma.
    """

    embedding: nn.Embedding
    output: nn.Linear | None
    scale: float = 1.0


class Transformer(Stack):
    """A stack with an embedding before it and an output layer after it.

    context: maximum sequence length in tokens.
    """

    def __init__(
        self,
        position: Position,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        dropout: float,
        embeddings: Embeddings,
        context: int,
    ) -> None:
        super().__init__(position, layers, norm, dropout)
        self.embedding, self.output, self.embedding_scale = embeddings
        self.cross_entropy = CrossEntropy()
        self.context = context

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.embedding.num_embeddings

    @property
    def output_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the output layer, or of the embedding if they are tied."""
        layer = self.embedding if self.output is None else self.output
        return [parameter for parameter in layer.parameters() if parameter.requires_grad]

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D)"""
        x = self.embedding(ids)
        return x if self.embedding_scale == 1.0 else x * x.new_full((), self.embedding_scale)

    def probe(self, ids: Tensor) -> Output:
        """Forward pass on ids (B, T) in any architecture; an encoder-decoder takes them as both source and target."""
        return self(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""
        if self.output is None:
            return linear(hidden, self.embedding.weight)
        return self.output(hidden)
