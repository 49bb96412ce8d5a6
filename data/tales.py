"""Tells the plots: casts them, keeps the cast through every step, and sets the result in paragraphs."""

from english import number_word, wrapped
from people import TOWNSFOLK, Person
from plots import ENDINGS, OPENINGS, PLOTS, Plot
from voice import Cast, Member, Voice

INTERLUDES = ("{beat}",) * 7 + ("{calm_scene}",) * 4 + ("{scene}",)
PRESENT_TENSE_SHARE = 0.12
BEAT_CHANCE = 0.45
PARAGRAPH_CHANCE = 0.4


class Teller:
    """Tells one tale after another, each plot in its turn."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._dice = voice.dice

    def tale(self) -> str:
        """A title and a story under it."""
        plot = PLOTS[self._dice.deal(tuple(PLOTS))]
        cast = self._cast()
        title = self._voice.phrase(self._dice.deal(plot.titles), cast, "now").upper()
        form = "now" if self._dice.chance(PRESENT_TENSE_SHARE) else "past"
        paragraphs = self._paragraphs(self._passages(plot, cast, form))
        return "\n\n".join([title, *map(wrapped, paragraphs)])

    def _passages(self, plot: Plot, cast: Cast, form: str) -> list[str]:
        """The steps of the plot in order, with some scenery and small business in between."""
        templates = [self._dice.deal(OPENINGS)]
        for step in plot.steps:
            if self._dice.chance(BEAT_CHANCE):
                templates.append(self._dice.deal(INTERLUDES))
            templates.append(self._dice.deal(step))
        templates.append(self._dice.deal(ENDINGS))
        return [self._voice.say(template, cast, form) for template in templates if template]

    def _paragraphs(self, passages: list[str]) -> list[str]:
        paragraphs = [passages[0]]
        for passage in passages[1:]:
            if self._dice.chance(PARAGRAPH_CHANCE):
                paragraphs.append(passage)
            else:
                paragraphs[-1] += " " + passage
        return paragraphs

    def _cast(self) -> Cast:
        """Everything any plot gives a name to."""
        people = dict(zip("ABCDE", self._dice.several(TOWNSFOLK, 5), strict=True))
        return people | self._objects(people) | self._beast() | self._numbers()

    def _objects(self, people: dict[str, Person]) -> dict[str, Member]:
        choose = self._voice.phrase
        places = self._dice.several(self._voice.rules["landmark"], 3)
        swaps = self._dice.several(self._voice.rules["tool"], 5)
        gifts = self._dice.several(self._voice.rules["soup_gift"], 4)
        goods = self._dice.several(self._voice.rules["bulk"], 2)
        vessels = self._dice.several(self._voice.rules["vessel"], 2)
        return {
            "thing": choose("{material} {trinket}"),
            "prize": choose("{material} {trinket}"),
            "present": choose("{colour} {present}"),
            "lesson": choose("{lesson}"),
            "contest_dish": choose("{contest_dish}"),
            "noise": choose("{noise}"),
            "feat": choose("{feat}", {**self._numbers(), "place": places[0], "place2": places[1]}),
            "fish_kind": choose("{fish.plural}"),
            "the_port": choose("{port}"),
            "the_ship": choose("{ship}"),
            "the_feast": choose("{feast}"),
            "the_month": choose("{month}"),
            "the_colour": choose("{colour}"),
            **dict(zip(("place", "place2", "place3"), places, strict=True)),
            **{f"swap{n}": choose("{thing_adj} ") + tool for n, tool in enumerate(swaps, 1)},
            **{f"gift{n}": gift for n, gift in enumerate(gifts, 1)},
            **{f"bulk{n}": bulk for n, bulk in enumerate(goods, 1)},
            "vessel1": choose("{noun.plural}", {"noun": vessels[0]}),
            "vessel2": choose("{noun.plural}", {"noun": vessels[1]}),
            "vessel1_one": vessels[0],
        }

    def _beast(self) -> dict[str, Member]:
        is_male = self._dice.chance(0.5)
        return {
            "beast": self._voice.phrase("{pet}"),
            "beast_name": self._voice.phrase("{pet_name}"),
            "beast_he": "he" if is_male else "she",
            "beast_him": "him" if is_male else "her",
            "beast_his": "his" if is_male else "her",
        }

    def _numbers(self) -> dict[str, Member]:
        """Three parts and their total, what is left on the way, and a price with its product."""
        part1, part2, part3 = (self._dice.between(2, 9) for _ in range(3))
        price = self._dice.between(2, 9)
        numbers = {
            "part1": part1, "part2": part2, "part3": part3, "total": part1 + part2 + part3,
            "left1": part2 + part3, "price1": price, "product1": part1 * price,
        }  # fmt: skip
        return {name: number_word(number) for name, number in numbers.items()}
