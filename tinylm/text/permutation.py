"""Pseudo-random permutations whose elements are computed one by one, so that no array of all of them is needed."""

import math
from collections.abc import Sequence

import numpy as np

ROUNDS = 12  # of the Feistel network; with 8, some orders of five items are measurably more frequent (decision 027)


class Permutation:
    """A permutation of range(n) that depends on `key`, in constant memory.

    A generalised Feistel network (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains") permutes the pairs
    (left, right) of range(a) x range(b), where a * b is the smallest such product at or above n with a = ceil(sqrt(n)).
    Values of n or more are permuted again until they are below n (cycle walking).
    """

    def __init__(self, n: int, key: Sequence[int]) -> None:
        """n: at least 1, below 2^62. key: non-negative integers."""
        self._n = np.uint64(n)
        columns = math.isqrt(n - 1) + 1
        self._sizes = (np.uint64(columns), np.uint64(-(-n // columns)))
        self._keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """The elements at `indices`, which are in range(n): (N,) -> (N,) of int64."""
        values = self._permute_pairs(np.asarray(indices).astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self._n)):
            values[outside] = self._permute_pairs(values[outside])
        return values.astype(np.int64)

    def _permute_pairs(self, values: np.ndarray) -> np.ndarray:
        """One pass of the Feistel network: (N,) -> (N,) of uint64, both below a * b."""
        a, b = self._sizes
        left: np.ndarray = values // b
        right: np.ndarray = values % b
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = (left + _hash(right, key) % a) % a
            else:
                right = (right + _hash(left, key) % b) % b
        return left * b + right


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014) of `values + key` modulo 2^64: (N,) -> (N,) of uint64."""
    values = values + key  # arrays of uint64 wrap around
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
