"""The architectures: decoder, encoder and encoder-decoder, on their base classes `Stack` and `Transformer`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinylm.kernels.layers import linear
from tinylm.transformer.attention import (
    AttentionCache,
    Cache,
    CrossCache,
    KVCache,
    SlidingWindowCache,
    causal_mask,
    padding_mask,
    segment_mask,
    segment_positions,
    valid_tokens,
)
from tinylm.transformer.blocks import Memory, RoutingSummary, merge_summaries, summarise_routing
from tinylm.transformer.layers import CrossEntropy, Dropout
from tinylm.transformer.position import Position


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
        cache: Sequence[AttentionCache] | None = None,
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
    def width(self) -> int:
        """Number of features of a hidden vector."""
        return self.embedding.weight.shape[1]

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


class Encoder(Transformer):
    """Encoder-only transformer (BERT)."""

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Output:
        """(B, T) -> (B, T, D). lengths: (B,), tokens per row; the padding after them is masked."""
        return encode(self, self.embed(ids), lengths)


def encode(stack: Stack, x: Tensor, lengths: Tensor | None) -> Output:
    """Run embedded tokens (B, T, D) through a bidirectional stack. lengths: (B,), tokens per row; padding is masked."""
    positions = torch.arange(x.shape[1], device=x.device)  # (T,)
    mask = padding_mask(lengths, x.shape[1])
    valid = None if lengths is None else valid_tokens(lengths, x.shape[1])
    return stack.run_layers(x, positions, [mask] * len(stack.layers), valid=valid)


class CacheShape(NamedTuple):
    """The sizes of the key/value caches of a model.

    windows: per layer, the sliding-window size in tokens (the query included), or `None` for full attention
        (Beltagy et al. 2020).
    """

    n_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]


class Autoregressive(Transformer):
    """A transformer with causal self-attention: base class of the decoder and the encoder-decoder."""

    def __init__(self, *args: Any, cache_shape: CacheShape) -> None:
        super().__init__(*args)
        self.n_kv_heads, self.head_dim, self.windows = cache_shape

    def positions_and_masks(self, ids: Tensor, cache: Sequence[Cache] | None) -> tuple[Tensor, list[Tensor | None]]:
        """Positions of the tokens `ids` (B, T), as (T,) or (B, T), and one mask per layer (see `causal_mask`)."""
        n_tokens = ids.shape[1]
        offset, starts = (cache[0].offset, cache[0].starts) if cache else (0, None)
        positions = torch.arange(offset, offset + n_tokens, device=ids.device)  # (T,)
        if starts is not None:
            positions = (positions - starts.unsqueeze(1)).clamp(min=0)  # (B, T)
        masks = {window: causal_mask(n_tokens, offset, starts, ids.device, window) for window in set(self.windows)}
        return positions, [masks[window] for window in self.windows]

    def make_cache(self, batch: int, length: int, starts: Any | None = None) -> list[Cache]:
        """One empty cache per layer: a KVCache with `length` slots, or a SlidingWindowCache.

        starts: (B,), left padding (see `Cache`), as a tensor or another argument of `torch.as_tensor`.
        """
        weight = self.embedding.weight
        starts = None if starts is None else torch.as_tensor(starts, device=weight.device)

        def make(window: int | None) -> Cache:
            cache_type, slots = (KVCache, length) if window is None else (SlidingWindowCache, window)
            return cache_type(batch, self.n_kv_heads, slots, self.head_dim, weight.device, weight.dtype, starts)

        return [make(window) for window in self.windows]


class Decoder(Autoregressive):
    """Decoder-only transformer (GPT)."""

    def forward(
        self,
        ids: Tensor,
        cache: Sequence[Cache] | None = None,
        segments: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Output:
        """(B, T) -> (B, T, D). With a cache, ids are the tokens after the cached ones.

        segments: (B, T), for rows of several texts: the number of each token's text, 0 for padding. Attention is causal
            within each text, and the positions of each text start at 0. `cache` and `lengths` are ignored.
        lengths: (B,), tokens per row; the routing summary leaves out the padding on the right.
        """
        if segments is None:
            valid = None if lengths is None else valid_tokens(lengths, ids.shape[1])
            return self.run_layers(self.embed(ids), *self.positions_and_masks(ids, cache), cache, valid=valid)
        by_window = {window: segment_mask(segments, window) for window in set(self.windows)}
        masks = [by_window[window] for window in self.windows]
        return self.run_layers(self.embed(ids), segment_positions(segments), masks, valid=segments > 0)

    @torch.inference_mode()
    def last_logits(self, ids: Any, cache: Sequence[Cache] | None) -> Tensor:
        """Next-token logits after the last token, without gradients: (B, T) -> (B, V).

        ids: a tensor or another argument of `torch.as_tensor`.
        """
        return self.logits(self(torch.as_tensor(ids, device=self.device), cache).hidden[:, -1])


class EncoderDecoder(Autoregressive):
    """A decoder with cross-attention to the output of `encoder`. Encoder and decoder share one embedding."""

    def __init__(self, *args: Any, cache_shape: CacheShape, encoder: Stack) -> None:
        super().__init__(*args, cache_shape=cache_shape)
        self.encoder = encoder

    def encode(self, source: Tensor, lengths: Tensor | None = None) -> tuple[Memory, Output]:
        """(B, S) -> the memory for cross-attention, and the encoder's output. lengths: (B,), tokens per source."""
        output = encode(self.encoder, self.embed(source), lengths)
        return Memory(output.hidden, padding_mask(lengths, source.shape[1])), output

    def decode(
        self,
        ids: Tensor,
        memory: Memory,
        cache: Sequence[Cache] | None = None,
        cross_cache: Sequence[CrossCache] | None = None,
        valid: Tensor | None = None,
    ) -> Output:
        """(B, T) -> (B, T, D). With caches, ids are the tokens after the cached ones.

        valid: (B, T), False for padding.
        """
        positions, masks = self.positions_and_masks(ids, cache)
        return self.run_layers(self.embed(ids), positions, masks, cache, memory, cross_cache, valid)

    def forward(
        self, ids: Tensor, source: Tensor, lengths: Tensor | None = None, valid: Tensor | None = None
    ) -> Output:
        """Encode and decode, as in training: (B, T) and (B, S) -> (B, T, D).

        lengths: (B,), tokens per source. valid: (B, T), False for padding.
        """
        memory, encoded = self.encode(source, lengths)
        decoded = self.decode(ids, memory, valid=valid)
        summaries = [output.routing for output in (encoded, decoded) if output.routing is not None]
        return Output(decoded.hidden, merge_summaries(summaries) if summaries else None)

    def probe(self, ids: Tensor) -> Output:
        return self(ids, ids)

    def make_cross_cache(self) -> list[CrossCache]:
        """One empty cross-attention cache per layer."""
        return [CrossCache() for _ in self.layers]
