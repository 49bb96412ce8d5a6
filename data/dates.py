"""Days of no particular year."""

from dataclasses import dataclass

from english import ordinal
from vocabulary import WORDS

MONTHS = WORDS["month"]


@dataclass(frozen=True)
class Day:
    """A date as people write it: 4th March."""

    number: int
    month: str

    def __str__(self) -> str:
        return f"{ordinal(self.number)} {self.month}"
