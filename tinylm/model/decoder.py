"""The decoder-only transformer: token ids in, hidden vectors out, logits on request (seeds 001, 002)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tinylm.model.cache import Cache, KVCache, RollingCache
from tinylm.model.mask import causal_mask
from tinylm.model.stack import Output, Transformer


class Autoregressive(Transformer):
    """A transformer whose tokens see none that come later.

    `windows` has a number of tokens for each layer that looks back over so many, its own included, and `None` for one
    that sees them all (seed 002).
    """

    def __init__(
        self, *parts: Any, n_kv_heads: int, head_width: int, windows: Sequence[int | None], **choices: Any
    ) -> None:
        super().__init__(*parts, **choices)
        self.n_kv_heads = n_kv_heads
        self.head_width = head_width
        self.windows = tuple(windows)

    def sight(self, ids: Tensor, cache: Sequence[Cache] | None) -> tuple[Tensor, list[Tensor | None]]:
        """The tokens' positions, (T,) or (B, T), and for each layer the mask of what they may see."""
        steps = ids.shape[1]
        offset, starts = (cache[0].offset, cache[0].starts) if cache else (0, None)
        positions = torch.arange(offset, offset + steps, device=ids.device)  # (T,)
        if starts is not None:
            positions = (positions - starts.unsqueeze(1)).clamp(min=0)  # (B, T)
        masks = {window: causal_mask(steps, offset, starts, ids.device, window) for window in set(self.windows)}
        return positions, [masks[window] for window in self.windows]

    def make_cache(self, batch: int, length: int, starts: Tensor | None = None) -> list[Cache]:
        """An empty cache a layer, for `length` slots. starts: (B,), where each row's tokens begin, if not all at 0."""
        weight = self.embedding.weight

        def make(window: int | None) -> Cache:
            kind, slots = (KVCache, length) if window is None else (RollingCache, window)
            return kind(batch, self.n_kv_heads, slots, self.head_width, weight.device, weight.dtype, starts)

        return [make(window) for window in self.windows]


class Decoder(Autoregressive):
    def forward(self, ids: Tensor, cache: Sequence[Cache] | None = None) -> Output:
        """(B, T) -> (B, T, D). With a cache, ids are the tokens that follow those it holds."""
        return self.through_layers(self.embed(ids), *self.sight(ids, cache), cache)

    def last_logits(self, ids: Tensor, cache: Sequence[Cache] | None, count: int) -> Tensor:
        """(B, T) -> (B, count, V), for what follows each of the last tokens."""
        return self.logits(self(ids, cache).hidden[:, -count:])
