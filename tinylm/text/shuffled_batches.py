"""Training batches of examples in a new random order each epoch, of similar length where rows are padded."""

from collections.abc import Callable

import numpy as np

from tinylm.text.batches import Batch

POOL_BATCHES = 50  # batches whose examples are sorted by length together


class ShuffledBatches:
    """Training batches in which each epoch has every example once. Batch number n depends only on the seed and n.

    examples: (M,), indices of examples. make_batch: makes a batch of the examples with given indices.
    sort_keys: (K, N), lengths by the index of an example, the last row being the primary key (np.lexsort). For batches
        with little padding, the examples are sorted by them within pools of POOL_BATCHES batches, and the batches are
        shuffled. With `None`, examples of any lengths share a batch.
    """

    def __init__(
        self,
        examples: np.ndarray,
        make_batch: Callable[[np.ndarray], Batch],
        batch_size: int,
        seed: int,
        sort_keys: np.ndarray | None,
    ) -> None:
        self._examples = examples
        self._make_batch = make_batch
        self._batch_size = batch_size
        self._seed = seed
        self._sort_keys = sort_keys
        self.batches_per_epoch = -(-len(examples) // batch_size)
        self._epoch = -1
        self._batches: list[np.ndarray] = []

    def batch(self, number: int) -> Batch:
        """Batch number `number`: at most `batch_size` examples."""
        epoch, position = divmod(number, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return self._make_batch(self._batches[position])

    def _shuffled(self, epoch: int) -> list[np.ndarray]:
        """The examples of each batch of an epoch."""
        rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        order = rng.permutation(self._examples)
        if self._sort_keys is None:
            return _split(order, self._batch_size)
        batches: list[np.ndarray] = []
        for pool in _split(order, POOL_BATCHES * self._batch_size):
            batches += _split(pool[np.lexsort(self._sort_keys[:, pool])], self._batch_size)
        return [batches[i] for i in rng.permutation(len(batches))]


def _split(examples: np.ndarray, size: int) -> list[np.ndarray]:
    return [examples[start : start + size] for start in range(0, len(examples), size)]
