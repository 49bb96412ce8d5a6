"""The keys and values that one layer has computed, kept so that a new token costs one token's work (seed 002)."""

import torch
from torch import Tensor


class KVCache:
    """Room for `length` slots of one layer. Rows of unequal length end together: row b is padding before starts[b]."""

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        length: int,
        head_width: int,
        device: torch.device,
        dtype: torch.dtype,
        starts: Tensor | None = None,
    ) -> None:
        self.keys = torch.empty(batch, n_kv_heads, length, head_width, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.starts = starts
        self.offset = 0

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, K, T, W) keys and values; return all held so far, each (B, K, offset + T, W).

        Raises ValueError when there is no room for them.
        """
        end = self.offset + keys.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"the cache has {self.keys.shape[2]} slots, and {end} are needed")
        self.keys[:, :, self.offset : end] = keys
        self.values[:, :, self.offset : end] = values
        self.offset = end
        return self.keys[:, :, :end], self.values[:, :, :end]
