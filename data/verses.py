"""Rhymed verse.

A line is an opening that scans and one of the four-syllable ends of a rhyme: "The lantern swung" and
"across the bay".
"""

from collections.abc import Callable
from dataclasses import dataclass

from dice import Dice
from english import capital, number_word, plural, tidy
from people import BY_NAME, IT, Pronoun
from rhymes import (
    COUNTED,
    LEADS,
    LOSSES,
    RHYMES,
    SHORT_ADJECTIVES,
    SHORT_NOUNS,
    SHORT_VERBS,
    TROCHEE_NAMES,
    TROCHEE_TRADES,
    TROCHEES,
    WORD_RHYMES,
)


@dataclass(frozen=True)
class Hero:
    """Whom a song is about: the words that bring them in, and the pronoun that follows."""

    opening: str
    pronoun: Pronoun


Stanza = Callable[[Hero, str], list[str]]


class Poet:
    """Makes songs."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice

    def song(self) -> str:
        """A title and two to four stanzas about one hero, all in one form."""
        hero = self._hero()
        stanza: Stanza = self._dice.pick((self._ballad, self._couplets, self._crossed))
        entrance = f"{hero.opening} {self._verb()}"
        stanzas = [stanza(hero, entrance)]
        stanzas += [stanza(hero, self._opening(hero)) for _ in range(self._dice.between(1, 3))]
        return "\n\n".join([hero.opening.upper(), *(_set(lines) for lines in stanzas)])

    def countdown(self) -> str:
        """A counting rhyme: they leave one by one until none is left."""
        count, noun = self._dice.between(3, 7), self._dice.pick(COUNTED)
        families = self._dice.several(WORD_RHYMES, count)
        verses = [self._departure(count - gone, noun, family) for gone, family in enumerate(families)]
        title = f"{number_word(count)} {plural(noun)}"
        return "\n\n".join([title.upper(), *verses])

    def _departure(self, left: int, noun: str, family: tuple[str, ...]) -> str:
        first, second = self._dice.several(family, 2)
        adjective, loss = self._dice.pick(SHORT_ADJECTIVES), self._dice.pick(LOSSES).format(word=second)
        before = number_word(left)
        after = number_word(left - 1) if left > 1 else "none"
        those = noun if left == 1 else plural(noun)
        there = f"{before} {adjective} {those} by the {first},"
        return _set([there, f"{loss};", f"{before} less one is {after}."])

    def _hero(self) -> Hero:
        kind = self._dice.below(4)
        if kind == 0:
            name = self._dice.pick(TROCHEE_NAMES)
            return Hero(f"Old {name}", BY_NAME[name].pronoun)
        if kind == 1:
            trade = self._dice.pick(tuple(TROCHEE_TRADES))
            return Hero(f"The {trade}", TROCHEE_TRADES[trade])
        if kind == 2:
            return Hero(f"The {self._dice.pick(TROCHEES)}", IT)
        return Hero(f"The {self._dice.pick(SHORT_ADJECTIVES)} {self._dice.pick(SHORT_NOUNS)}", IT)

    def _verb(self) -> str:
        return self._dice.deal(SHORT_VERBS)

    def _ends(self, hero: Hero, count: int) -> list[str]:
        """`count` line ends that rhyme with each other."""
        family = RHYMES[self._dice.deal(tuple(RHYMES))]
        ends = self._dice.several(family, count)
        return [end.format(he=hero.pronoun.he, his=hero.pronoun.his) for end in ends]

    def _opening(self, hero: Hero) -> str:
        """Four syllables with a subject and a verb."""
        if self._dice.chance(0.5):
            return f"{self._dice.deal(LEADS)} {hero.pronoun.he} {self._verb()}"
        if self._dice.chance(0.5):
            return f"{self._dice.pick(('The', 'A'))} {self._dice.deal(TROCHEES)} {self._verb()}"
        return f"The {self._dice.deal(SHORT_ADJECTIVES)} {self._dice.deal(SHORT_NOUNS)} {self._verb()}"

    def _turn(self, hero: Hero) -> str:
        """Two syllables that carry the sentence on."""
        return f"{self._dice.pick(('and', 'then', hero.pronoun.he))} {self._verb()}"

    def _ballad(self, hero: Hero, entrance: str) -> list[str]:
        """Long and short lines by turns; the short ones rhyme."""
        short = self._ends(hero, 2)
        loose = self._ends(hero, 1) + self._ends(hero, 1)
        return [
            f"{entrance} {loose[0]},",
            f"{self._turn(hero)} {short[0]};",
            f"{self._opening(hero)} {loose[1]},",
            f"{self._turn(hero)} {short[1]}.",
        ]

    def _couplets(self, hero: Hero, entrance: str) -> list[str]:
        """Four long lines, rhyming two by two."""
        return self._long_lines(hero, entrance, self._ends(hero, 2) + self._ends(hero, 2))

    def _crossed(self, hero: Hero, entrance: str) -> list[str]:
        """Four long lines, rhyming first with third and second with fourth."""
        one, two = self._ends(hero, 2), self._ends(hero, 2)
        return self._long_lines(hero, entrance, [one[0], two[0], one[1], two[1]])

    def _long_lines(self, hero: Hero, entrance: str, ends: list[str]) -> list[str]:
        starts = [entrance] + [self._opening(hero) for _ in ends[1:]]
        return [f"{start} {end}{stop}" for start, end, stop in zip(starts, ends, ",;,.", strict=True)]


def _set(lines: list[str]) -> str:
    return "\n".join(capital(tidy(line)) for line in lines)
