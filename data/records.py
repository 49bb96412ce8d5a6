"""Papers with numbers in them, all of which add up: ledgers, logs, weather reports and tide tables."""

from dates import MONTHS, Day
from english import counted, ordinal, plural, wrapped
from people import BY_NAME, TOWNSFOLK
from voice import Voice

LEDGER_WIDTH = 40
TIDE_STEP = 12 * 60 + 25
DAY_MINUTES = 24 * 60

SHOPS: dict[str, tuple[str, ...]] = {
    "Ada": (
        "loaf", "bun", "plum cake", "oatcake", "seed cake", "rye loaf", "gingerbread man", "pie crust",
        "biscuit", "roll",
    ),
    "Felix": (
        "egg", "cheese", "jar of honey", "pound of tea", "tin of mustard", "pound of sugar", "lemon",
        "bag of rice", "ham",
    ),
    "Maud": (
        "herring", "cod", "pair of kippers", "crab", "plaice", "plate of oysters", "lobster",
        "bag of cockles", "eel", "haddock",
    ),
    "Esther": (
        "candle", "box of wicks", "cake of soap", "pot of tallow", "lantern", "wax taper", "lamp glass",
        "pint of oil",
    ),
    "Flora": (
        "cabbage", "bunch of mint", "marrow", "pumpkin", "leek", "rose bush", "basket of pears",
        "row of beans", "sunflower",
    ),
    "Dora": (
        "pint of milk", "pat of butter", "jug of cream", "cheese", "pail of whey", "egg", "bowl of curds",
    ),
    "Walter": (
        "hinge", "horseshoe", "bag of nails", "poker", "gate latch", "chain link", "boat hook", "kettle lid",
        "hoop",
    ),
    "Nell": (
        "herring net", "ball of twine", "cork float", "shrimp net", "hammock", "bone needle",
        "yard of netting",
    ),
    "Percy": (
        "coil of rope", "tow line", "bell rope", "clothes line", "ball of string", "skipping rope",
        "fathom of cable",
    ),
    "Olive": ("jug", "bowl", "teapot", "flower pot", "mug", "butter dish", "tile", "jam jar", "pie dish"),
    "Zillah": (
        "bottle", "lamp glass", "windowpane", "bead", "tumbler", "glass float", "inkwell", "fish bowl",
    ),
    "Lydia": (
        "bale of wool", "sack of pepper", "bolt of calico", "chest of tea", "roll of silk", "cask of figs",
        "bag of cloves",
    ),
    "Susan": ("barrel", "tub", "bucket", "churn", "cask", "barrel lid", "keg", "set of hoops", "washtub"),
    "Barnaby": (
        "shirt", "waistcoat", "pair of breeches", "collar", "button", "new hem", "patch", "coat lining",
        "nightshirt",
    ),
}  # fmt: skip

CREWS = ("Isaac", "Ivy", "Ned", "Owen", "Tom", "Jonas", "Lydia")

RECORD_PHRASES: dict[str, tuple[str, ...]] = {
    "log_line": (
        "{weather_clause.cap}.", "{weather_clause.cap}; {weather_clause}.", "{ned} {deed@ned}.",
        "{ned} ~have a {ailment}.", "the cook ~serve {food}, and the crew {feel} it.",
        "sighted a {vessel_type}, bound for {port}.", "{few} {bird.plural} {birds_deed_sea}.",
        "the {ship_part} *be mended with {strand}.",
        "passed {few} {fish.plural} and a {vessel} marked {port}.", "a {sound} *be heard below. {a_cause}",
        "{ned} *lose {his@ned} {garment} overboard.", "the crew ^sing {tune}.", "set the {sail}.",
        "took in the {sail}.", "{ned} *be {mood} and *will not {deed.base@ned}.",
        "the ship's cat *eat a {bird}.", "sounded: {fathoms} fathoms, {bottom}.",
    ),
    "feel": ("^praise", "^eat", "^bury", "^refuse", "^dream of", "^forgive"),
    "a_cause": (
        "It *be the {animal}.", "No cause found.", "It *be {ned}, snoring.", "Rats.",
        "The {bulk} ~have shifted.",
    ),
    "birds_deed_sea": (
        "^follow the ship", "^rest on the {ship_part}", "^pass, flying {compass}", "^fall silent",
    ),
    "sail": ("foresail", "mainsail", "topsail", "jib", "staysail", "storm jib", "mizzen"),
    "fathoms": ("four", "five", "six", "seven", "nine", "eleven", "thirteen", "seventeen", "twenty"),
    "bottom": ("sand", "mud", "shells", "rock", "weed", "fine gravel", "clay"),
    "falling_glass": (
        "Rain before {meal}.", "Rain by {daypart}, and wind behind it.", "Boats should stay in.",
        "Take in the washing, says Hannah Frome.", "Worse to come.", "{someone} expects snow on the hill.",
        "Shut the windows on {street}.", "No ferry after {meal}.",
    ),
    "rising_glass": (
        "Clearing by {meal}.", "Fair, with a light air.", "Good drying weather, says Hannah Frome.",
        "Boats may go out.", "Better to come.", "{someone} expects sun on the hill.",
        "Open the windows on {street}.", "A good day to {deed.base@they}.",
    ),
    "steady_glass": (
        "No change.", "Much as yesterday.", "The same again tomorrow.", "Neither better nor worse.",
        "Still, says Tom Carrow.",
    ),
    "cold_wind": ("cold", "raw", "bitter", "sharp", "frosty", "hard and dry"),
    "warm_wind": ("mild", "soft", "wet", "warm", "damp and mild", "sleepy"),
    "seen": (
        "{few} {bird.plural} {outdoors}.", "{sea_adj.cap} water off the Point.", "{weather_clause.cap}.",
        "{thing_clause.cap}.", "{vessel_type.cap} from {port} overdue.",
        "{fish.plural.cap} reported off {landmark}.", "Sky {sky_adj} over {landmark}.",
    ),
}  # fmt: skip


class Clerk:
    """Keeps the records."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._dice = voice.dice

    def _say(self, rule: str) -> str:
        return self._voice.say(f"{{{rule}}}", form="now")

    def _date(self) -> str:
        day = Day(self._dice.between(1, 28), self._dice.pick(MONTHS))
        return f"{self._voice.phrase('{weekday}')} {day}"

    def ledger(self) -> str:
        """One customer's purchases: each line is a number times a price, and the total is their sum."""
        keeper = BY_NAME[self._dice.pick(tuple(SHOPS))]
        customer = self._dice.pick([person for person in TOWNSFOLK if person != keeper])
        rows, total = [], 0
        for item in self._dice.several(SHOPS[keeper.first], self._dice.between(2, 5)):
            number, price = self._dice.between(1, 12), self._dice.between(1, 12)
            total += number * price
            rows.append(_row(f"{counted(number, item)} at {price}", number * price))
        title = f"{keeper.full.upper()}, {keeper.trade.upper()}"
        heading = f"Sold to {customer.full}, {self._date()}"
        return "\n".join([title, "", heading, "", *rows, _row("Total", total), *self._payment(total)])

    def _payment(self, total: int) -> list[str]:
        """Paid with something over, paid in part, or exactly."""
        kind = self._dice.below(3)
        if kind == 0:
            paid = total + self._dice.between(1, 20)
            return [_row("Paid", paid), _row("Change", paid - total)]
        if kind == 1:
            paid = self._dice.between(1, total)
            return [_row("Paid", paid), _row("Owing", total - paid)]
        return [_row("Paid in full", total)]

    def stock(self) -> str:
        """What a shop had, sold and had left, day by day."""
        keeper = BY_NAME[self._dice.pick(tuple(SHOPS))]
        item = plural(self._dice.pick(SHOPS[keeper.first]))
        had = self._dice.between(30, 90)
        lines = []
        for day in ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"):
            sold = self._dice.between(0, min(had, 15))
            lines.append(f"{day}: had {had}, sold {sold}, left {had - sold}.")
            had -= sold
            if self._dice.chance(0.3):
                made = self._dice.between(2, 20)
                lines.append(f"Made {made} more, so {had} and {made} is {had + made}.")
                had += made
        return "\n".join([f"{keeper.first.upper()}'S {item.upper()}", "", *lines])

    def log(self) -> str:
        """A voyage: every day the miles made are taken from the miles to go, until none are left."""
        captain, mate = (BY_NAME[name] for name in self._dice.several(CREWS, 2))
        ship, start, goal = self._voice.phrase("{ship}"), *self._dice.several(self._voice.rules["port"], 2)
        to_go = total = self._dice.between(90, 400)
        day, month = self._dice.between(1, 18), self._dice.pick(MONTHS)
        heading = f"Captain {captain.full}. From {start} to {goal}, {total} miles."
        entries = [wrapped(heading)]
        while to_go:
            made = min(to_go, self._dice.between(20, 99))
            to_go -= made
            progress = f"{made} miles, {to_go} to go" if to_go else f"{made} miles and came to {goal}"
            start_of_entry = f"{Day(day, month)}. Wind {self._voice.phrase('{compass}')}; made {progress}."
            notes = ["{log_line}"] * self._dice.between(1, 3)
            entry = [self._voice.say(note, {"A": captain, "ned": mate}) for note in notes]
            entries.append(wrapped(" ".join([start_of_entry, *entry])))
            day += 1
        return "\n\n".join([f"LOG OF THE {ship.upper()}", *entries])

    def weather(self) -> str:
        """The day's report: the glass foretells the weather, and the wind decides how cold it is."""
        wind = self._voice.phrase("{compass}")
        glass, change = self._dice.between(285, 309), self._dice.between(-4, 4)
        trend = "falling" if change < 0 else "rising" if change > 0 else "steady"
        feel = self._say("cold_wind" if wind.startswith(("north", "east")) else "warm_wind").lower()
        lines = [
            f"Wind {wind}, {feel}.",
            f"Glass {glass / 10} inches, {trend} from {(glass - change) / 10}.",
            *(self._say("seen") for _ in range(self._dice.between(1, 3))),
            self._say(f"{trend}_glass"),
        ]
        return f"THE WEATHER AT TOLVER, {self._date().upper()}\n\n{wrapped(' '.join(lines))}"

    def tides(self) -> str:
        """High water for some days: each tide comes twelve hours and twenty-five minutes after the last."""
        minutes = self._dice.between(0, 11 * 60)
        day, month = self._dice.between(1, 22), self._dice.pick(MONTHS)
        lines = []
        for number in range(day, day + self._dice.between(3, 6)):
            times = []
            while minutes < DAY_MINUTES:
                times.append(f"{minutes // 60:2}.{minutes % 60:02}")
                minutes += TIDE_STEP
            minutes -= DAY_MINUTES
            lines.append(f"{ordinal(number):>4}  {'  '.join(times)}")
        return "\n".join([f"HIGH WATER AT TOLVER, {month.upper()}", "", *lines])


def _row(text: str, amount: int) -> str:
    """A ledger line with the amount at the right-hand edge."""
    return f"{text:<{LEDGER_WIDTH - 6}}{amount:>6}"
