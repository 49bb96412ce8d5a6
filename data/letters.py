"""Letters, and the answers to them."""

from dataclasses import dataclass

from dates import MONTHS, Day
from english import capital, ordinal, wrapped
from people import BY_NAME, ME, TOWNSFOLK, Person, kin_of, relation
from voice import Cast, Member, Voice

KIN_SHARE = 0.4
REPLY_SHARE = 0.6
POSTSCRIPT_SHARE = 0.3

# A is "I", W is the writer, B the reader, C and D are in the news.
LETTER_PHRASES: dict[str, tuple[str, ...]] = {
    "letter_opening": (
        "I hope this finds you {mood_good} and your {body} better.",
        "Forgive me for not writing since {feast}. I have been {deed.ing@I}.",
        "It is {hour_plain} and {weather_clause.now}, so I shall write to you instead of {deed.ing@I}.",
        "You will be {glad} to hear that {C} {deed.past@C}.",
        "I write in haste, for {weather_clause.now} and the {vessel_type} sails {hour}.",
        "What a {season} we have had! {clause.past.cap}, and {clause.past}.",
        "You asked for news, so here it is: {clause.past}.", "I meant to write {when}, but {clause.past}.",
    ),
    "glad": ("glad", "sorry", "surprised", "amused", "relieved", "delighted", "astonished", "pleased"),
    "letter_thanks": (
        "Thank you for the {gift}, which came {when} {gift_state}.",
        "The {gift} you sent has come at last, {gift_state}, and I thank you for it.",
        "I have shown your {gift} to {C}, who is {mood}, and to {D}, who is {mood}.",
        "Your {gift} is the best that I ever had.", "What a {gift}! I keep it {where}.",
        "Everyone admires the {gift} you gave me, except {someone}.",
        "I think of you every time I see the {gift} that you sent.",
    ),
    "gift_state": (
        "in good order", "only a little broken", "wrapped in {strand}", "wet through", "smelling of {bulk}",
        "without its lid", "by the hand of {someone}", "in a {vessel} of {bulk}", "with {junk} inside",
        "to my great {feeling}",
    ),
    "hour_plain": (
        "past midnight", "{weekday} evening", "nearly {meal} time", "barely light", "the eve of {feast}",
        "{feast}",
    ),
    "letter_news": (
        "{C} {deed.past@C}, and {D} {deed.past@D}.", "{C}, who {C.habit.now}, {deed.past@C} {when}.",
        "On {weekday} {clause.past}, and on {weekday} {clause.past}.", "Since you left, {clause.past}.",
        "I have {deed.done@I} and {deed.done@I}, and now I am {mood}.",
        "As for me, I {my_work} every day, and in the evening I {deed.now@I}.",
        "{D} says that {clause.past}, but {C} says that it was {someone} who {deed.past}.",
        "My {pet} {animal_deed.past}, and I have not been {mood} since.",
        "I {deed.past@I} {when}, which made {C} {mood}.",
        "We shall have {food} on {feast}, if {weather_clause.now} or not.",
        "{C} and {D} no longer speak, because of {topic}.",
        "The doctor tells me that my {body} will mend if I never {deed.base@I}.",
        "I dreamed of {dream_of}; I wonder what it means.",
        "There is a new {trade_guess} {where}, who means to {deed.base@they}.",
        "They are selling {bulk} for {few} pence the {vessel}, and {clause.past}.", "{scene.past}",
        "{remark.now@I}", "{remark.now@I}",
    ),
    "letter_question": (
        "{question}", "{question}", "Do you still {deed.base@you}?",
        "Is it as {weather_adj} with you as it is here?", "Have you {deed.done@you}, as you promised?",
        "Would you like my {thing}?",
    ),
    "letter_request": (
        "Please send me {request} by the next {vessel_type}.",
        "If you can spare {request}, I should be glad of it.",
        "Could you let me have {request}? I will pay on {weekday}.",
        "I need {request}, and I can get it nowhere but from you.",
    ),
    "letter_end": (
        "I must stop now, for {clause.now}.", "The candle is nearly out, and so am I.",
        "Come before {feast} if you can.", "Write soon, and tell me about {topic}.",
        "{C} sends you {feeling} and {food}.", "Remember me to {someone}.",
        "Do not {deed.base@you} before I come.", "It is time to {my_work}, so goodbye.",
    ),
    "wish": (
        "a {vessel} of {bulk}", "a {measure} of {bulk}", "{few} {crop.plural}", "a {bundle} of {strand}",
        "a {thing}",
    ),
    "reply_opening": (
        "Your letter of the {their_day} came on {weekday}.",
        "I read your letter of the {their_day} twice, once to {someone}.",
        "So {C} is in the news again! Your letter of the {their_day} made me laugh.",
    ),
    "reply_request": (
        "I am sending you {request}, as you asked.", "You ask for {request}. Here you are, with {junk}.",
        "As for {request}: I have none left, but you shall have a {thing} instead.",
        "With this you will find {request}. Pay me when you can.",
    ),
    "reply_gift": (
        "I am glad that the {gift} pleases you.", "Keep the {gift} out of the rain.",
        "The {gift} was {someone}'s idea.", "Do not lend the {gift} to {someone}.",
    ),
    "postscript": (
        "P.S. {question}", "P.S. {remark.now@I}", "P.S. Burn this letter.",
        "P.S. I have found your {garment}.", "P.S. The {pet} is well.", "P.S. Never mind about the {tool}.",
        "P.S. {C} says that {clause.past}.",
    ),
    "closing": (
        "Your {virtue} {kin}", "Your {mood_good} {kin}", "Your {kin}",
        "With {warm_feeling} and {warm_feeling}, your {kin}", "Ever your {virtue} {kin}",
        "In haste, your {kin}",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sheet:
    """Who writes to whom, when, and whether it is an answer."""

    writer: Person
    reader: Person
    day: Day
    is_reply: bool


class Correspondent:
    """Writes letters."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._dice = voice.dice

    def letters(self) -> str:
        """A letter, and often the answer to it, about the same present, request and neighbours."""
        writer, reader, *others = self._people()
        day = Day(self._dice.between(1, 18), self._dice.pick(MONTHS))
        shared: Cast = {
            "C": others[0], "D": others[1], "their_day": ordinal(day.number),
            "gift": self._voice.phrase("{thing}"), "request": self._voice.phrase("{wish}"),
        }  # fmt: skip
        letter = self._letter(Sheet(writer, reader, day, is_reply=False), shared)
        if not self._dice.chance(REPLY_SHARE):
            return letter
        later = Day(day.number + self._dice.between(2, 10), day.month)
        return f"{letter}\n\n{self._letter(Sheet(reader, writer, later, is_reply=True), shared)}"

    def _people(self) -> list[Person]:
        """Writer, reader and two people in the news; often the first two are family."""
        people = self._dice.several(TOWNSFOLK, 4)
        family = tuple(kin_of(people[0]))
        if family and self._dice.chance(KIN_SHARE):
            reader = BY_NAME[self._dice.pick(family)]
            return [people[0], reader, *[person for person in people[1:] if person != reader][:2]]
        return people

    def _letter(self, sheet: Sheet, shared: Cast) -> str:
        writer, reader = sheet.writer, sheet.reader
        members: dict[str, Member] = {
            "A": ME, "W": writer, "B": reader, "kin": relation(reader, writer),
            "my_work": self._voice.phrase("{W.work.base}", {"W": writer}),
        }  # fmt: skip
        cast = {**shared, **members}
        heading = f"{writer.home}, Tolver\n{sheet.day}"
        paragraphs = [wrapped(self._voice.say(text, cast)) for text in self._body(sheet.is_reply)]
        after = [f"{capital(self._voice.phrase('{closing}', cast))},\n{writer.first}"]
        if self._dice.chance(POSTSCRIPT_SHARE):
            after.append(wrapped(self._voice.say("{postscript}", cast)))
        return "\n\n".join([heading, f"Dear {reader.first},", *paragraphs, *after])

    def _body(self, is_reply: bool) -> tuple[str, str, str]:
        """The three paragraphs, as templates."""
        opening = "{reply_opening} {reply_gift}" if is_reply else "{letter_opening} {letter_thanks}"
        request = "{reply_request}" if is_reply else "{letter_request}"
        news, more_news = (" {letter_news}" * self._dice.between(1, 3) for _ in range(2))
        return (
            f"{opening}{news}",
            f"{more_news} {{letter_question}} {request}".strip(),
            "{letter_news} {letter_end}",
        )
