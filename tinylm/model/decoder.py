"""The decoder-only transformer: token ids in, hidden vectors out, logits on request (seeds 001, 002)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.model.cache import KVCache
from tinylm.model.mask import causal_mask
from tinylm.model.position import Position


class Output(NamedTuple):
    """hidden: (B, T, D). aux: the sum of auxiliary losses over the batch's sequences, zero for a dense model."""

    hidden: Tensor
    aux: Tensor


class Decoder(nn.Module):
    """`output` maps hidden vectors to logits; `None` shares the embedding's matrix (seed 004).

    `norm` ends the stack: a normalisation after pre-norm blocks, `nn.Identity()` after post-norm ones.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        position: Position,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        output: nn.Linear | None,
        *,
        context: int,
        n_kv_heads: int,
        head_width: int,
        embedding_scale: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.position = position
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.output = output
        self.dropout = nn.Dropout(dropout)
        self.context = context
        self.n_kv_heads = n_kv_heads
        self.head_width = head_width
        self.embedding_scale = embedding_scale

    @property
    def vocab_size(self) -> int:
        return self.embedding.num_embeddings

    def forward(self, ids: Tensor, cache: list[KVCache] | None = None) -> Output:
        """(B, T) -> (B, T, D). With a cache, ids are the tokens that follow those it holds."""
        steps = ids.shape[1]
        offset, starts = (cache[0].offset, cache[0].starts) if cache else (0, None)
        positions = torch.arange(offset, offset + steps, device=ids.device)  # (T,)
        mask = None
        if starts is not None:
            positions = (positions - starts.unsqueeze(1)).clamp(min=0)  # (B, T)
            mask = causal_mask(steps, offset, starts, ids.device)
        elif offset and steps > 1:
            mask = causal_mask(steps, offset, device=ids.device)

        x = self.embedding(ids)  # (B, T, D)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        x = self.dropout(self.position.add(x, positions))
        rotation = self.position.rotation(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, mask, cache[index] if cache else None)
        return Output(self.norm(x), x.new_zeros(()))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""
        if self.output is None:
            return F.linear(hidden, self.embedding.weight)
        return self.output(hidden)

    def make_cache(self, batch: int, length: int, starts: Tensor | None = None) -> list[KVCache]:
        """An empty cache a layer, for `length` slots. starts: (B,), where each row's tokens begin, if not all at 0."""
        weight = self.embedding.weight
        return [
            KVCache(batch, self.n_kv_heads, length, self.head_width, weight.device, weight.dtype, starts)
            for _ in self.layers
        ]
