"""Seeded chance for the corpus.

Python promises that `random.Random(seed).random()` gives the same numbers in every version, and
promises it for no other method; so every choice here is made from `random()` alone, and the corpus
comes out the same, byte for byte, wherever it is made.
"""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A source of choices that depends on its seed and on nothing else."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._decks: dict[tuple[str, ...], list[str]] = {}

    def below(self, limit: int) -> int:
        """A whole number from 0 up to, but not including, `limit`."""
        return int(self._random.random() * limit)

    def between(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random.random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """One of the items, each equally likely."""
        return items[self.below(len(items))]

    def several(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items, in random order."""
        pool = list(items)
        return [pool.pop(self.below(len(pool))) for _ in range(count)]

    def deal(self, items: tuple[str, ...]) -> str:
        """One of the items, none coming a second time before all the others have come once."""
        deck = self._decks.setdefault(items, [])
        if not deck:
            deck.extend(self.several(items, len(items)))
        return deck.pop()
