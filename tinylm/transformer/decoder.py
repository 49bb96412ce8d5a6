"""The decoder-only transformer, and the base class of models with causal self-attention (Radford et al. 2018)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinylm.transformer.attention import causal_mask, segment_mask, segment_positions, valid_tokens
from tinylm.transformer.kv_cache import Cache, KVCache, SlidingWindowCache
from tinylm.transformer.stack import Output, Transformer


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
