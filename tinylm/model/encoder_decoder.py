"""The encoder-decoder transformer: a source is read whole, and a target written that looks at it (seeds 001, 004)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tinylm.model.block import Memory
from tinylm.model.cache import Cache, CrossCache
from tinylm.model.decoder import Autoregressive
from tinylm.model.encoder import encode
from tinylm.model.mask import padding_mask
from tinylm.model.routing import together
from tinylm.model.stack import Output, Stack


class EncoderDecoder(Autoregressive):
    """A decoder whose layers look at the output of `encoder`; both sides share the embedding (Vaswani et al. 2017)."""

    def __init__(self, *parts: Any, encoder: Stack, **choices: Any) -> None:
        super().__init__(*parts, **choices)
        self.encoder = encoder

    def encode(self, source: Tensor, lengths: Tensor | None = None) -> tuple[Memory, Output]:
        """(B, S) -> what the decoder's layers see. lengths: (B,), after which a row is padding."""
        output = encode(self.encoder, self.embed(source), lengths)
        return Memory(output.hidden, padding_mask(lengths, source.shape[1])), output

    def decode(
        self,
        ids: Tensor,
        memory: Memory,
        cache: Sequence[Cache] | None = None,
        cross_cache: Sequence[CrossCache] | None = None,
        real: Tensor | None = None,
    ) -> Output:
        """(B, T) -> (B, T, D). With caches, ids are what follows the tokens they hold. real: (B, T), no padding."""
        positions, masks = self.sight(ids, cache)
        return self.through_layers(self.embed(ids), positions, masks, cache, memory, cross_cache, real)

    def forward(self, ids: Tensor, source: Tensor, lengths: Tensor | None = None, real: Tensor | None = None) -> Output:
        """Both sides at once, as in training: (B, T) and (B, S) -> (B, T, D). lengths: (B,), of the sources.

        real: (B, T), which ids are no padding.
        """
        memory, encoded = self.encode(source, lengths)
        decoded = self.decode(ids, memory, real=real)
        both = [output.routing for output in (encoded, decoded) if output.routing is not None]
        return Output(decoded.hidden, together(both) if both else None)

    def probe(self, ids: Tensor) -> Output:
        return self(ids, ids)

    def make_cross_cache(self) -> list[CrossCache]:
        return [CrossCache() for _ in self.layers]
