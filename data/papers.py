"""Diaries, notices, and portraits of the townsfolk."""

from dates import MONTHS, Day
from english import capital, number_word, tidy, wrapped
from people import BY_NAME, ME, TOWNSFOLK, kin_of
from voice import Cast, Voice

# In a diary A is "I", W is the writer, C and D are in the news.
PAPER_PHRASES: dict[str, tuple[str, ...]] = {
    "diary_line": (
        "{deed.cap@I}.", "{deed.cap@I}, and {deed@I}.", "{clause.cap}.", "I ~be {mood} all {daypart}.",
        "{scene}", "I {my_work_past}, and {clause}.", "{C} {deed@C}. I {small_deed@I}.",
        "{weather_clause.cap}.", "{weather_clause.cap}. I {deed@I}.", "Supper: {food}.",
        "{D} called. We talked about {topic}.", "{remark.now@I}", "No word from {D}.",
        "Must remember to {deed.base@I}.", "I did not {deed.base@I}.", "Dreamed of {dream_of}.",
        "Spent {few} pence on {bulk}.", "Could not sleep because {clause}.", "{question}",
        "Why did I {deed.base@I}? I do not know.", "I have now {deed.done@I} {few_times}.",
    ),
    "few_times": (
        "twice", "three times", "once too often", "every day this week", "for the last time", "at last",
    ),
    "portrait_line": (
        "{he.cap} {deed.now} every {weekday}, and {deed.now} when {clause.now}.",
        "{he.cap} {A.work.now} <by day|before noon|in summer> and {A.work.now} <at night|after dark|in "
        "winter>.",
        "Do not speak of {A.dread} in front of {him}.", "Nothing frightens {him} but {A.dread}.",
        "Offer {him} {A.dish} and {he} will tell you everything.", "On {feast} {he} always cooks {A.dish}.",
        "{his.cap} {A.pride} is known all over Tolver.",
        "{he.cap} would not sell {his} {A.pride} for {few} {vessel.plural} of {bulk}.",
        "{he.cap} is {virtue} and {virtue}, though somewhat {vice}.",
        "People call {him} {vice}; {his} friends call {him} {virtue}.",
        "{he.cap} wears a {colour} {garment}, even in {month}.",
        "{he.cap} can {skill}, but {he} cannot {skill}.",
        "Once, in a {weather_adj} {month}, {he} {deed.past}.",
        "{he.cap} has never {deed.done}, and hopes never to.", "You will find {him} {where}, {A.work.ing}.",
        "{his.cap} {pet}, {pet_name}, {animal_deed.now}.",
        "What does {he} want? To {deed.base}, and to be left alone by {someone}.",
        '{he.cap} says: "{remark.now@I}"', "If {clause.now}, {he} {small_deed.now}.",
    ),
    "portrait_start": (
        "{A.full} is the {A.trade} of {A.home}. {he.cap} {A.habit.now}.",
        "{A.full}, {A.trade}. {his.cap} house is on {A.home}.",
        "On {A.home} lives {A.full}, who is a {A.trade} and {A.habit.now}.",
        "Who {A.habit.now}? {A.full}, the {A.trade} of {A.home}.",
        "Look for {A.full} on {A.home}: the {A.trade} who {A.habit.now}.",
    ),
    "notice": (
        "LOST|between {landmark} and {landmark}, {when}, a {item}. It is {colour} and {taste_of_thing}. "
        "Whoever brings the {item} to {A.full}, {A.home}, will have {pence} pence[ and {food}].",
        "FOUND|{where}, a {item}. The owner may have the {item} from {A.full}, the {A.trade}, on {A.home}, "
        "for {pence} pence.",
        "FOR SALE|A {item}, {sale_state}. Also {few} {crop.plural} and a {vessel} of {bulk}. The {item} "
        "costs {pence} pence. Ask for {A.full}, {A.home}[, but not during {meal}].",
        "WANTED|A {virtue} {elder_or_child} to {deed.base@they}. Must be able to {skill@they}, and not "
        "afraid of {A.dread}. {pence.cap} pence a week. {A.full}, {A.trade}, {A.home}.",
        "MEETING|There will be a meeting at {landmark} on {weekday} {hour} about {topic}. Bring your own "
        "{furniture}. {A.full} will speak, and {someone} will answer. {drinks.cap} afterward.",
        "{ship.upper}|The {vessel_type} of that name sails for {port} on {weekday}, {hour}, with {bulk} and "
        "{bulk}. Passage {pence} pence; {animal.plural} half. No {strand} on deck. {A.full}.",
        "WARNING|The {mendable} {where} is not safe. {clause.past.cap} there {when}. Use {street} until "
        "{A.full} the {A.trade} has mended it.",
        "{feast.upper}|The {feast_thing} begins {hour} {where}; the {feast_thing} follows. {someone} will "
        "judge the {dish}. Last {season} {clause.past}; this must not happen again. {A.full}.",
        "LESSONS|{A.full}, {A.trade}, of {A.home}, will teach anyone to {skill@they} in {few_days} for "
        "{pence} pence. {someone} can do it already, and {someone} almost.",
        "APOLOGY|I, {A.full}, {A.trade}, said on {weekday} that {someone} {deed.past}. This was not so. "
        "{clause.past.cap}.",
        "THANKS|{A.full} of {A.home} thanks all who helped when {clause.past}, above all {someone}, who "
        "{deed.past}[, and {someone}'s {pet}].",
    ),
    "elder_or_child": ("man or woman", "boy or girl", "person", "couple", "widow", "{trade_guess}"),
    "taste_of_thing": (
        "scratched", "rather old", "much loved", "of no use to anyone else", "marked with a {bird}",
        "heavier than it looks",
    ),
    "sale_state": (
        "nearly new", "hardly dropped", "as good as any in {port}", "last used on {feast}",
        "smelling of {bulk}", "complete",
    ),
}  # fmt: skip


class Scribbler:
    """Writes down what is neither a tale nor a sum."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._dice = voice.dice

    def diary(self) -> str:
        """Some days of one person's diary."""
        writer, *others = self._dice.several(TOWNSFOLK, 3)
        cast: Cast = {
            "A": ME, "W": writer, "C": others[0], "D": others[1],
            "my_work_past": self._voice.phrase("{W.work.past}", {"W": writer}),
        }  # fmt: skip
        number, month = self._dice.between(1, 12), self._dice.pick(MONTHS)
        entries = []
        for _ in range(self._dice.between(2, 5)):
            lines = [self._voice.say("{diary_line}", cast) for _ in range(self._dice.between(2, 4))]
            entries.append(wrapped(f"{Day(number, month)}. {' '.join(lines)}"))
            number += self._dice.between(1, 3)
        return "\n\n".join([f"FROM THE DIARY OF {writer.full.upper()}", *entries])

    def notice(self) -> str:
        """A notice as it hangs on the market cross."""
        cast: Cast = {
            "A": self._dice.pick(TOWNSFOLK), "item": self._voice.phrase("{thing}"),
            "pence": number_word(self._dice.between(2, 40)),
        }  # fmt: skip
        title, text = self._voice.phrase("{notice}", cast, "now").split("|")
        return f"{title}\n\n{wrapped(tidy(text))}"

    def portrait(self) -> str:
        """One of the townsfolk: always the same facts, never in the same words."""
        person = self._dice.pick(TOWNSFOLK)
        templates = ["{portrait_start}"] + ["{portrait_line}"] * self._dice.between(3, 6)
        lines = [self._voice.say(template, {"A": person}, "now") for template in templates]
        for first, kind in kin_of(person).items():
            relative = BY_NAME[first]
            lines.append(f"{capital(person.pronoun.his)} {kind} is {relative.full} the {relative.trade}.")
        return f"{person.full.upper()}\n\n{wrapped(' '.join(lines))}"
