"""Sums in words, as the schoolteacher of Tolver sets them, with the answers."""

from english import joined, number_word, plural, wrapped
from people import TOWNSFOLK
from voice import Member, Voice

LESSON_PHRASES: dict[str, tuple[str, ...]] = {
    "losing": (
        "{A} has {had} {nouns} and {loses}. How many has {he} left? {had} less {lost} is {rest}.",
        "{A} {A.work}, earns {had} pence, and spends {lost} of them on {bulk}. What is left? {rest} pence.",
        "There are {had} {nouns} {where}. {A} takes {lost}. How many are still there? {rest}, for {rest} "
        "and {lost} is {had}.",
    ),
    "loses": (
        "gives {lost} to {B}", "loses {lost} {where}", "sells {lost} to {B}", "drops {lost} into the {water}",
        "feeds {lost} to the {pet}", "lends {lost} to {B}",
    ),
    "gaining": (
        "{A} has {one} {nouns}, {B} has {two} and {C} has {three}. How many have they together? {one} and "
        "{two} is {one_two}, and {three} is {all}.",
        "{A} finds {one} {nouns} {where} and {two} {where}. How many is that? {one} and {two} is {one_two}.",
    ),
    "pricing": (
        "A {noun} costs {price} pence. What does {A} pay for {number}? {number} times {price} is {product}.",
        "{A} buys {number} {nouns} from {B} at {price} pence. How much does {B} get? {product} pence.",
        "{A} puts {price} {nouns} into each of {number} {vessel.plural}. How many are there? {product}.",
    ),
    "sharing": (
        "{sharers} share {product} {nouns}. How many does each of them get? {product} by {count} is {each}.",
    ),
    "travelling": (
        "{A} {travels} {each} miles in an hour. How far in {hours} hours? "
        "{count} times {each} is {product} miles.",
    ),
    "travels": ("walks", "rows", "rides", "sails", "runs", "drives a cart", "swims", "skates"),
}  # fmt: skip


class Teacher:
    """Sets sums."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._dice = voice.dice

    def lesson(self) -> str:
        """A title and two to four sums."""
        sums = [self._sum() for _ in range(self._dice.between(2, 4))]
        return "\n\n".join(["RUTH AMBLIN'S SUMS", *map(wrapped, sums)])

    def _sum(self) -> str:
        kind = self._dice.pick(("losing", "gaining", "pricing", "sharing", "travelling"))
        people = self._dice.several(TOWNSFOLK, 4)
        noun = self._voice.phrase("{crop}")
        cast: dict[str, Member] = {
            **dict(zip("ABCD", people, strict=True)), "noun": noun, "nouns": plural(noun), **self._numbers(),
        }  # fmt: skip
        count = self._dice.between(2, 4) if kind == "sharing" else self._dice.between(2, 9)
        each = self._dice.between(2, 9)
        cast |= {
            "count": str(count), "each": str(each), "product": str(count * each), "hours": number_word(count),
            "number": str(count), "price": str(each),
            "sharers": joined([person.first for person in people[:count]]),
        }  # fmt: skip
        return self._voice.say(f"{{{kind}}}", cast, "now")

    def _numbers(self) -> dict[str, str]:
        """Numbers to add and to take away, with what comes of it."""
        one, two, three = (self._dice.between(2, 15) for _ in range(3))
        had, lost = self._dice.between(6, 20), self._dice.between(2, 5)
        numbers = {
            "one": one, "two": two, "three": three, "one_two": one + two, "all": one + two + three,
            "had": had, "lost": lost, "rest": had - lost,
        }  # fmt: skip
        return {name: str(number) for name, number in numbers.items()}
