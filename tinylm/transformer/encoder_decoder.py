"""The encoder-decoder transformer, for translation (Vaswani et al. 2017)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tinylm.transformer.attention import padding_mask
from tinylm.transformer.block import Memory
from tinylm.transformer.decoder import Autoregressive, CacheShape
from tinylm.transformer.encoder import encode
from tinylm.transformer.kv_cache import Cache, CrossCache
from tinylm.transformer.routing import merge_summaries
from tinylm.transformer.stack import Output, Stack


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
        """As `Transformer.probe`, with the ids (B, T) as both source and target."""
        return self(ids, ids)

    def make_cross_cache(self) -> list[CrossCache]:
        """One empty cross-attention cache per layer."""
        return [CrossCache() for _ in self.layers]
