"""Key/value caches, one per attention layer, for incremental decoding. Shapes: see `tinylm.transformer`."""

from typing import Protocol

import torch
from torch import Tensor


class AttentionCache(Protocol):
    """The part of a key/value cache that attention uses."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, K, T, W); return those that any new token attends to, each (B, K, S, W).

        Keys and values of one row, (1, K, T, W), are appended to each row of an empty cache, and those of one row
        are returned.
        """
        ...


class Cache(AttentionCache, Protocol):
    """The key/value cache of one self-attention layer.

    offset: number of tokens processed so far, including padding and tokens that the cache has dropped.
    starts: (B,), the number of padding slots at the left of each row; `None` without padding.
    """

    offset: int
    starts: Tensor | None

    def reorder(self, rows: Tensor) -> None:
        """Replace row b by row rows[b], as beam search does. rows: (B',); B' may be smaller than B.

        `starts` is not reordered.
        """
        ...


class KVCache:
    """Cache of full attention with `length` preallocated slots."""

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        starts: Tensor | None = None,
    ) -> None:
        self.keys = torch.empty(batch, n_kv_heads, length, head_dim, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.starts = starts
        self.offset = 0

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `Cache.update`, (B, K, T, W) -> (B, K, offset + T, W). Raises ValueError when the slots are used up."""
        end = self.offset + keys.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"the cache has {self.keys.shape[2]} slots, and {end} are needed")
        self.keys[:, :, self.offset : end] = keys
        self.values[:, :, self.offset : end] = values
        self.offset = end
        rows = len(keys)
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def reorder(self, rows: Tensor) -> None:
        """As `Cache.reorder`."""
        self.keys, self.values = self._reordered(self.keys, rows), self._reordered(self.values, rows)

    def _reordered(self, slots: Tensor, rows: Tensor) -> Tensor:
        """(B, K, length, W) -> (B', K, length, W). Copies the filled slots only."""
        reordered = slots.new_empty(len(rows), *slots.shape[1:])  # (B', K, length, W)
        reordered[:, :, : self.offset] = slots[rows, :, : self.offset]
        return reordered


class StaticCache:
    """The slots of a KVCache for a CUDA graph: tensors stay in place, and the slot of a token is a tensor.

    All slots are returned, and a mask hides those that are not used. slot: (1,), of the next token; the caller advances
    it, and knows positions and padding.
    """

    def __init__(self, cache: KVCache, slot: Tensor) -> None:
        self.keys, self.values, self.slot = cache.keys, cache.values, slot

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of one token per row, (B, K, 1, W), and return those of all slots, (B, K, S, W)."""
        self.keys.index_copy_(2, self.slot, keys)
        self.values.index_copy_(2, self.slot, values)
        return self.keys, self.values


class SlidingWindowCache:
    """Cache of sliding-window attention: keeps the last `window` - 1 tokens, so that its memory is bounded."""

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        window: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        starts: Tensor | None = None,
    ) -> None:
        self.keys = torch.empty(batch, n_kv_heads, 0, head_dim, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.window = window
        self.starts = starts
        self.offset = 0

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `Cache.update`, (B, K, T, W) -> (B, K, S, W): at most window - 1 cached tokens and T new ones."""
        batch, rows = len(self.keys), len(keys)
        self.offset += keys.shape[2]
        keys = torch.cat((self.keys[:rows], keys), dim=2)  # (B, K, S, W)
        values = torch.cat((self.values[:rows], values), dim=2)  # (B, K, S, W)
        first = max(0, keys.shape[2] - (self.window - 1))
        # A view of the last tokens would keep the whole tensor alive.
        self.keys = keys[:, :, first:].expand(batch, -1, -1, -1).clone()
        self.values = values[:, :, first:].expand(batch, -1, -1, -1).clone()
        return keys, values

    def reorder(self, rows: Tensor) -> None:
        """As `Cache.reorder`."""
        self.keys, self.values = self.keys[rows], self.values[rows]  # (B', K, S, W)


class CrossCache:
    """Keys and values of the encoder's output, computed at the first decoding step and reused afterwards.

    keys_and_values: each (B, K, S, W); `None` before `fill`.
    """

    def __init__(self) -> None:
        self.keys_and_values: tuple[Tensor, Tensor] | None = None

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, each (B, K, S, W)."""
        self.keys_and_values = keys, values

    def reorder(self, rows: Tensor) -> None:
        """As `Cache.reorder`."""
        if self.keys_and_values is not None:
            keys, values = self.keys_and_values
            self.keys_and_values = keys[rows], values[rows]  # (B', K, S, W) each
