"""Token ids that are stored in several files (shards), as one array."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

MAX_OPEN_SHARDS = 128  # each keeps a file open, and some systems allow 256 per process


class ShardedTokens:
    """The ids of all shards as one read-only array, (N,), indexed by an integer or a slice with step 1.

    sizes: ids per shard. dtype: of the ids. open_shard: opens the shard with a given index: (sizes[index],). It is
    called when the shard is first read, and again if MAX_OPEN_SHARDS other shards were read since.
    """

    ndim = 1

    def __init__(self, sizes: Sequence[int], dtype: np.dtype[Any], open_shard: Callable[[int], np.ndarray]) -> None:
        self.dtype = dtype
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._starts = self._ends - sizes
        self._shard = functools.lru_cache(maxsize=MAX_OPEN_SHARDS)(open_shard)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, key: int | slice) -> Any:
        """An id, or the ids of a slice, (M,).

        Raises IndexError, ValueError for a slice with another step than 1, and the errors of `open_shard`.
        """
        if not isinstance(key, slice):
            index = range(len(self))[key]
            shard = int(np.searchsorted(self._ends, index, side="right"))
            return self._shard(shard)[index - int(self._starts[shard])]
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError("ids of several shards are read with step 1")
        if start >= stop:
            return np.zeros(0, dtype=self.dtype)
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        parts = [
            self._shard(shard)[max(start - self._starts[shard], 0) : stop - self._starts[shard]]
            for shard in map(int, range(first, last + 1))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All ids in memory, (N,); called by `np.asarray`."""
        return np.asarray(self[:], dtype=dtype)


Tokens = np.ndarray | ShardedTokens
