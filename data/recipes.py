"""Recipes, with quantities in proportion to the eaters and steps that use what was listed."""

from dataclasses import dataclass

from english import counted, number_word, plural, wrapped
from people import TOWNSFOLK
from voice import Cast, Member, Voice


@dataclass(frozen=True)
class Part:
    """What goes in: how much for one, between low and high, of which food."""

    low: int
    high: int
    unit: str
    food: str


@dataclass(frozen=True)
class Recipe:
    """A way of cooking; every step can be worded in several ways."""

    name: str
    parts: tuple[Part, ...]
    steps: tuple[tuple[str, ...], ...]


RECIPES = (
    Recipe(
        "{root} soup",
        (
            Part(1, 3, "", "{root}"),
            Part(1, 1, "", "{root2}"),
            Part(2, 3, "ounce", "{grain}"),
            Part(1, 1, "sprig", "{herb}"),
        ),
        (
            (
                "Peel and slice the {roots} and the {roots2}.",
                "Chop the {roots} small, the {roots2} smaller.",
                "Scrub the {roots}, and grate the {roots2}.",
            ),
            (
                "Boil the {grain} in water until soft.",
                "Wash the {grain} twice, then simmer in plenty of water.",
                "Put the {grain} on in cold water, and wait.",
            ),
            ("Add the {roots}, then the {roots2}.", "Put all the roots into the pot together."),
            ("Strew the {herb} on top.", "Tear up the {herb} and stir it in.", "Last comes the {herb}."),
        ),
    ),
    Recipe(
        "{filling} pie",
        (
            Part(4, 4, "ounce", "flour"),
            Part(2, 2, "ounce", "lard"),
            Part(3, 6, "ounce", "{filling}"),
            Part(1, 1, "", "{root}"),
            Part(1, 1, "pinch", "{herb}"),
        ),
        (
            (
                "Rub the lard into the flour and roll it thin.",
                "Make a paste of the flour and lard; let it rest.",
                "Cut the lard into the flour with two knives.",
            ),
            ("Cut up the {filling} with the {roots}.", "Stew the {filling} and the {roots} gently."),
            ("Season with the {herb}.", "Rub in the {herb} with your thumbs.", "Do not forget the {herb}."),
            ("Lid the pie, prick it, and bake it brown.", "Cover it with the paste and bake it for an hour."),
        ),
    ),
    Recipe(
        "{fruit} jam",
        (Part(5, 9, "", "{fruit}"), Part(3, 6, "ounce", "{sweet}"), Part(1, 1, "clove", "")),
        (
            (
                "Wash the {fruits} and take out the stalks.",
                "Stew the {fruits} whole, in a little water.",
                "Pick over the {fruits}; throw the bad ones to the {pet}.",
            ),
            ("Press them through a cloth.", "Mash them with a wooden spoon."),
            ("Stir in the {sweet} and the cloves.", "Add the cloves, and the {sweet} by handfuls."),
            ("Boil until a drop sets on a plate.", "Boil it hard, and skim it as it rises."),
            ("Cover the jars while they are hot.", "Tie down the jars with {colour} cloth."),
        ),
    ),
    Recipe(
        "{fruit} cake",
        (
            Part(3, 3, "ounce", "flour"),
            Part(2, 2, "ounce", "butter"),
            Part(2, 2, "ounce", "{sweet}"),
            Part(1, 1, "", "egg"),
            Part(2, 4, "", "{fruit}"),
        ),
        (
            (
                "Beat the butter with the {sweet}.",
                "Cream the {sweet} and butter until your arm aches.",
                "Melt the butter, and stir in the {sweet}.",
            ),
            ("Break in the eggs, one after another.", "Add the eggs, well beaten."),
            ("Sift the flour over it and fold it in.", "Stir in the flour by spoonfuls."),
            ("Lay the {fruits} on top, sliced.", "Chop the {fruits} and scatter them in."),
            ("Bake it until a straw comes out clean.", "Bake it slowly, and do not slam the door."),
        ),
    ),
)

RECIPE_PHRASES: dict[str, tuple[str, ...]] = {
    "a_root": ("onion", "leek", "turnip", "parsnip", "carrot", "potato", "beetroot", "radish", "shallot"),
    "a_filling": (
        "mutton", "cod", "rabbit", "haddock", "mushroom", "chicken", "bacon", "eel", "pumpkin", "cheese",
    ),
    "a_fruit": ("apple", "pear", "plum", "quince", "damson", "cherry", "gooseberry", "blackberry", "fig"),
    "a_herb": ("thyme", "mint", "parsley", "sage", "dill", "marjoram", "fennel", "sorrel", "tarragon"),
    "a_grain": ("barley", "oatmeal", "rice", "rye", "pearl barley", "wheat", "buckwheat", "millet"),
    "a_sweetener": ("sugar", "honey", "treacle", "syrup"),
    "cooking_end": (
        "Serve with {drinks}.", "Eat it {where}.", "It keeps until {weekday}.",
        "{someone} adds {bulk}, but {someone} is {vice}.", "Do not let the {pet} near it.",
        "It is best on {feast}.", "{someone} likes it {taste}.", "Leave none for {someone}.",
        "Never make it when {weather_clause}.", "It cures a {ailment}, or so {someone} says.",
    ),
    "cooking_aside": (
        "This takes as long as {tune}.", "Do not stop to {deed.base@you}.", "It should smell of {bulk}.",
        "If it is {taste}, begin again.", "Ask a child to stir.", "Use a {material} spoon.",
        "It will look like a wet {garment}; this is right.", "Wait until {thing_clause}.",
    ),
}  # fmt: skip


class Cook:
    """Writes recipes down."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._dice = voice.dice

    def recipe(self) -> str:
        """A title, the ingredients a line each, and what to do with them."""
        recipe, cast, eaters = self._dice.pick(RECIPES), self._larder(), self._dice.between(2, 12)
        cook = self._dice.pick(TOWNSFOLK).first
        title = self._voice.phrase(f"{cook}'s {recipe.name} for {number_word(eaters)}", cast)
        parts = [self._quantity(part, eaters, cast) for part in recipe.parts]
        steps = [self._dice.pick(wordings) for wordings in recipe.steps]
        steps.insert(self._dice.between(1, len(steps)), "{cooking_aside}")
        text = self._voice.say(" ".join([*steps, "{cooking_end}"]), cast, "now")
        return "\n".join([title.upper(), "", *parts, "", wrapped(text)])

    def _larder(self) -> Cast:
        """What the holes in a recipe stand for this time."""
        root, root2 = self._dice.several(self._voice.rules["a_root"], 2)
        fruit = self._voice.phrase("{a_fruit}")
        larder: dict[str, Member] = {
            "root": root, "roots": plural(root), "root2": root2, "roots2": plural(root2),
            "fruit": fruit, "fruits": plural(fruit), "filling": self._voice.phrase("{a_filling}"),
            "herb": self._voice.phrase("{a_herb}"), "grain": self._voice.phrase("{a_grain}"),
            "sweet": self._voice.phrase("{a_sweetener}"),
        }  # fmt: skip
        return larder

    def _quantity(self, part: Part, eaters: int, cast: Cast) -> str:
        """A line of the list of ingredients: 3 onions, 6 ounces of flour."""
        amount = eaters * self._dice.between(part.low, part.high)
        food = self._voice.phrase(part.food, cast)
        if not part.unit:
            return counted(amount, food)
        return counted(amount, f"{part.unit} of {food}" if food else part.unit)
