"""The keys and values that one layer has computed, kept so that a new token costs one token's work (seed 002)."""

from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """What attention needs of a layer's memory. `offset` is how many tokens it has seen.

    Rows of unequal length end together: row b is padding before starts[b].
    """

    offset: int
    starts: Tensor | None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, K, T, W) keys and values; return those that the new tokens may see, each (B, K, S, W)."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Let row b go on from what row rows[b] held; there may be fewer rows than before."""
        ...

    def rewind(self, tokens: int) -> None:
        """Forget so many of the last tokens. Raises ValueError where older ones were forgotten for them."""
        ...


class KVCache:
    """Room for `length` slots of one layer, of which each token sees all that came before."""

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
        """All held so far: S is offset + T. Raises ValueError when there is no room for the new ones."""
        end = self.offset + keys.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"the cache has {self.keys.shape[2]} slots, and {end} are needed")
        self.keys[:, :, self.offset : end] = keys
        self.values[:, :, self.offset : end] = values
        self.offset = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reorder(self, rows: Tensor) -> None:
        self.keys, self.values = self._rows(self.keys, rows), self._rows(self.values, rows)

    def rewind(self, tokens: int) -> None:
        self.offset -= tokens

    def _rows(self, held: Tensor, rows: Tensor) -> Tensor:
        """Slots that are not filled yet are not copied."""
        chosen = held.new_empty(len(rows), *held.shape[1:])
        chosen[:, :, : self.offset] = held[rows, :, : self.offset]
        return chosen


class RollingCache:
    """The last slots of a layer that looks back over `window` tokens: its memory stops growing there."""

    def __init__(
        self,
        batch: int,
        n_kv_heads: int,
        window: int,
        head_width: int,
        device: torch.device,
        dtype: torch.dtype,
        starts: Tensor | None = None,
    ) -> None:
        self.keys = torch.empty(batch, n_kv_heads, 0, head_width, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.window = window
        self.starts = starts
        self.offset = 0

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The last window - 1 slots before the new ones, and the new ones."""
        keys, values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)  # (B, K, S, W)
        self.offset += keys.shape[2] - self.keys.shape[2]
        kept = min(self.window - 1, keys.shape[2])
        self.keys = keys[:, :, keys.shape[2] - kept :].clone()  # a view would hold on to all of it
        self.values = values[:, :, values.shape[2] - kept :].clone()
        return keys, values

    def reorder(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]

    def rewind(self, tokens: int) -> None:
        if tokens:
            raise ValueError("a cache of a window has given up what was before its tokens")


class CrossCache:
    """The keys and values of an encoder's output, filled by the first token and read by all later ones."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None

    @property
    def held(self) -> tuple[Tensor, Tensor] | None:
        """Each (B, K, S, W), or `None` before they are there."""
        return self._held

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Each (B, K, S, W)."""
        self._held = keys, values

    def reorder(self, rows: Tensor) -> None:
        if self._held is not None:
            self._held = self._held[0][rows], self._held[1][rows]
