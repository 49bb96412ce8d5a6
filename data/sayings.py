"""Proverbs and riddles of the town."""

from english import wrapped
from people import TRADE_WORK
from voice import Voice

SAYING_PHRASES: dict[str, tuple[str, ...]] = {
    "trade": tuple(TRADE_WORK),
    "proverb": (
        "a {vice} {trade} always blames the {tool}",
        "{abstraction} never knocked at a shut door",
        "the {animal} that waits for {meal} eats last",
        "better {food} in peace than {food} in debt",
        "whoever lends a {tool} buys a new one",
        "a {tool} in the hand is worth a {vessel_type} on the horizon",
        "no {fish} was ever caught in bed",
        "the {weather_adj} {daypart} makes the {virtue} {trade}",
        "{abstraction} is a guest, but {abstraction} is a lodger",
        "you cannot salt a {fish} with promises",
        "a {trade} without {abstraction} is a {vessel} without {bulk}",
        "even the {animal} has its {weekday}",
        "little by little the {vessel} fills with {bulk}",
        "where the {bird} nests, the {trade} rests",
        "do not count your {fish.plural} before the net is in",
        "a {virtue} word weighs less than {bulk} and goes further",
        "old {crop.plural} and old friends need no polish",
        "every {trade} was once a {vice} child",
        "the tide is {virtue}, but it is never late",
        "{abstraction} and {abstraction} cannot share a {furniture}",
        "the {vice} {animal} finds the empty {vessel}",
        "a borrowed {garment} is always {weather_adj}",
        "if {abstraction} were {bulk}, we should all be rich",
        "one {tool} in use is better than {few} on the wall",
        "never {deed_short} on a {weekday}, nor quarrel before {meal}",
        "when {abstraction} leaves by the window, {abstraction} comes in at the door",
        "it takes a {season} to make a {trade} and an hour to lose one",
        "a {weather_adj} {month} fills the {indoors}",
        "he who is {vice} at {meal} is {vice} at sea",
        "the {tool} does not care who holds it",
        "speak to a {trade} of {bulk} and you will hear of nothing else",
        "{mood} in the {daypart}, {mood} by {meal}",
        "a {colour} {garment} does not make a {trade}",
        "trust the {bird}, but tie up the boat",
        "nobody values {bulk} until the {vessel} is empty",
        "the {trade}'s own {washable} is the last to be washed",
        "give a {animal} {bulk} and it will ask for {bulk}",
        "many {crop.plural} make a {vessel}, and many days make a {trade}",
        "{abstraction} is cheap until you have to buy it",
        "the longest {street_noun} begins at your own step",
        "a {mood} heart rows a lighter boat",
        "the louder the {bird}, the smaller the egg",
        "no wind is {virtue} to a ship with no {ship_part}",
        "he {virtue} to a fault is {vice} to a friend",
        "a {trade} and a {trade} will never agree on {bulk}",
        "what the {season} lends, the {season} takes back",
        "even a stopped clock likes to be wound",
        "you may hide the {bulk}, but not the smell",
        "better a {virtue} {animal} than a {vice} {trade}",
        "the {tree} that bends in {month} stands in {month}",
        "{few} {trade.plural} and no {tool}: that is a meeting",
        "{weather_adj} {weekday}, {weather_adj} week",
        "ask the {trade}, but watch the {bird}",
        "a shared {crop} has no pips",
        "let the {vice} speak first and the {virtue} last",
        "there is no lock against {abstraction}",
    ),
    "street_noun": ("road", "street", "voyage", "rope", "lane", "night", "letter", "list"),
    "deed_short": (
        "sell a {tool}", "sweep the {indoors}", "hem a {garment}", "borrow {bulk}", "launch a boat",
        "cut your hair", "shear a {animal}", "lend a {tool}", "move a {furniture}",
        "count your {crop.plural}", "sail for {port}",
    ),
}  # fmt: skip

RIDDLES: dict[str, tuple[str, ...]] = {
    "a candle": (
        "I am tall when I am young and short when I am old", "I weep and feel no sorrow",
        "I eat myself for supper", "the dark runs from me", "a breath is the end of me",
    ),
    "an anchor": (
        "I sleep while I work", "when I am wanted I am thrown away", "I hold what is larger than I am",
        "I go down dry and come up muddy", "I have arms and no hands",
    ),
    "the tide": (
        "I come twice a day and never knock", "I lift what no crane can lift", "I obey the moon",
        "I take the beach away and give it back", "no door keeps me out of the harbour",
    ),
    "a net": (
        "I am mostly holes", "I hold fish but no water", "the more of me you cut, the bigger my gaps",
        "I am thrown out empty and pulled in full", "knots are all I have",
    ),
    "a bell": (
        "I have one tongue and say one word", "I speak only when I am struck",
        "I hang all my life and am not guilty", "I call others to church and never go in",
        "the fog makes me talk",
    ),
    "a shadow": (
        "I am longest when the day is short of light", "I follow you home and pay no fare",
        "you cannot lift me", "at noon I hide under your feet", "I fall and am never hurt",
    ),
    "an egg": (
        "I am a house with no door", "break me and I am useful", "my gold is kept in a white wall",
        "I was laid down and never stood up", "a hen is proud of me",
    ),
    "smoke": (
        "I leave by the roof", "I am born of fire and fear the wind", "I have no wings and I rise",
        "I sting your eyes and touch nothing", "the herring knows me well",
    ),
    "a letter": (
        "I speak without a mouth", "I travel with my face hidden", "you break my red heart to hear me",
        "I am folded before I am read", "Martha Quill weighs me",
    ),
    "a clock": (
        "I have hands and cannot hold", "I run all day and stay on the wall",
        "I have a face that is never washed", "I count and never reach thirteen",
        "when I am wound I do not bleed",
    ),
    "a needle": (
        "I have one eye and cannot see", "my tail is longer than I am",
        "I go in and out and leave a path behind", "I am small, and ships would not sail without me",
        "I wear a thread and no shirt",
    ),
    "a river": (
        "I have a mouth and never eat", "I have a bed and never sleep", "I run and have no legs",
        "I go to the sea and never arrive", "the mill is glad of me",
    ),
    "a loaf": (
        "I rise without getting up", "I am beaten and not angry", "my skin is harder than my heart",
        "I go into the fire white and come out brown", "knives are fond of me",
    ),
    "a mirror": (
        "I have your face and no head", "I show the room and keep no room",
        "when you lift your left hand I lift my right", "break me and there are many of you",
        "I never tell a lie or a story",
    ),
    "a rope": (
        "I am many and I am one", "I am strong when I am twisted", "I am tied and have done no wrong",
        "Percy Knott walks backwards for my sake", "sailors know me by my knots",
    ),
    "the wind": (
        "I open doors and have no hand", "I fill what I cannot hold", "you hear me and never see me",
        "I comb the grass and tangle the hair", "I am named for where I come from",
    ),
    "a bucket": (
        "I go down light and come up heavy", "I have one ear and no head",
        "I drink with my mouth and never swallow", "the well is my dark home",
        "a hole in me is the end of me",
    ),
    "salt": (
        "I come from the sea and vanish in the soup", "without me the meal is dull",
        "I keep fish and have no barrel of my own", "too much of me spoils the pot",
        "tears have a little of me",
    ),
    "ice": (
        "I am a floor in January and nothing in June", "I am water and can be carried in the hand",
        "the sun undoes me", "I float in my own mother", "Hugh Barrow fears me",
    ),
    "a key": (
        "I have teeth and do not bite", "I am small and open great things", "turn me and I speak once",
        "lose me and you sleep outside", "I live in the pocket and work at the door",
    ),
    "a snail": (
        "I carry my house and pay no rent", "my road is silver", "I am early for nothing",
        "I have horns and never fight", "Flora Jessop cannot abide me",
    ),
    "a book": (
        "I have leaves and no branches", "I have a back and no belly", "I speak when I am opened",
        "I am full of others and own nothing", "Winifred Gale walks with me",
    ),
    "a boat": (
        "I have a belly and no stomach", "I walk on water and limp on land", "I have ribs and no heart",
        "I have a bow and no arrow", "a cork is my cousin",
    ),
    "the moon": (
        "I am thin and then fat and then thin", "I have a face at night and borrow my light",
        "I pull the sea by the sleeve", "I am in the puddle and in the sky", "dogs sing to me",
    ),
}  # fmt: skip


class Sage:
    """Knows the sayings."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice

    def proverbs(self) -> str:
        """A title and a handful of sayings, a line each."""
        dice = self._voice.dice
        title = self._voice.phrase(
            "{heading}",
            {"heading": dice.deal(("Sayings of Tolver", "Things people say", "Proverbs", "Old words"))},
        )
        sayings = [self._voice.say("{proverb}.", form="now") for _ in range(dice.between(3, 7))]
        return "\n".join([title.upper(), "", *map(wrapped, sayings)])

    def riddle(self) -> str:
        """Three or four clues and the answer to them."""
        dice = self._voice.dice
        answer = dice.deal(tuple(RIDDLES))
        clues = dice.several(RIDDLES[answer], dice.between(2, 4))
        question = self._voice.say(". ".join(clues) + ". What am I?")
        return "\n".join(["A RIDDLE", "", wrapped(question), f"Answer: {answer}."])
