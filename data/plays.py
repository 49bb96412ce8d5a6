"""Scenes for two or three voices."""

from english import wrapped
from people import TOWNSFOLK, Person
from voice import Cast, Member, Voice

# An exchange is some speeches, each with its speaker. Whatever is not a rule, such as `x` for a thing, `spot`
# for a place or `act` for a deed, stays the same from the first speech to the last: see `_props`.
EXCHANGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "greeting": (
        ("A: Good {daypart}, {B}.", "B: {is_it}"),
        ("A: {exclaim}, {B}! You look {mood}.", "B: I am {mood}. {remark.now@I}"),
        ("A: There you are, {B}.", "B: Here I am. {ask_yes}", "A: {yes_or_no}"),
        ("B: Is that you, {A}?", "A: Who else would be {A.work.ing} {hour}?"),
        ("A: {B}! Come in out of the {rain_noun}.", "B: Thank you. {remark.now@I}"),
        ("B: Are you busy, {A}?", "A: I am {A.work.ing}, as you see. {command}"),
    ),
    "middle": (
        ("A: {ask_yes}", "B: {yes_or_no}", "A: {remark.now@I}"),
        ("B: {ask_yes}", "A: {yes_or_no} {ask_yes}", "B: {yes_or_no}"),
        ("A: {ask_where}", "B: {spot.cap}.", "A: {spot.cap}? {exclaim}."),
        ("B: {ask_where}", "A: {where.cap}, I think."),
        ("A: {ask_who}", "B: {someone}.", "A: I thought it was {C}.", "B: {C} was {deed.ing@C}."),
        ("B: {ask_who}", "A: {C}, of course. {C.he.cap} {C.habit.now@C}."),
        ("A: {ask_when}", "B: {when.cap}.", "A: So long ago?"),
        ("B: {ask_when}", "A: {when.cap}, or not at all."),
        ("A: What is the price of {goods} in {port}?", "B: {few.cap} pence the {box}.", "A: For {goods}!"),
        (
            "B: Why did {C} {act.base@C}?", "A: Because {past_event}.",
            "B: That is no reason to {act.base@they}.",
        ),
        (
            "A: Which is worse, a {ill} or a {fault} neighbour?",
            "B: A {fault} neighbour. A {ill} goes away.", "A: So will {C}, some day.",
        ),
        (
            "B: How many {wares} can one {animal} carry?", "A: {few.cap}.",
            "B: Then we shall need more {animal.plural}.",
        ),
        ("A: {remark.now@I}", "B: {remark.now@I}", "A: {exclaim}!"),
        ("A: Where is my {x}?", "B: Your {x} is {spot}.", "A: What is my {x} doing {spot}?", "B: {excuse}"),
        (
            "B: I have found a {x} {spot}. Is it yours?", "A: A {x}? No. Mine was {colour}.",
            "B: Then it must be {someone}'s {x}.",
        ),
        (
            "A: Who {act.past@C}?", "B: I think it was {C} who {act.past@C}.",
            "A: {C}? But {C} is a {C.trade}. A {C.trade} could never {act.base@C}.",
        ),
        (
            "A: They say that {C} has {act.done@C}.", "B: {C} would never {act.base@C}.",
            "A: And yet {C.he} has.",
        ),
        (
            "A: {command}", "B: I will not. {remark.now@I}", "A: Then I shall ask {C}.",
            "B: Ask {C}. {C.he.cap} is {vice}, and {C.habit.now@C}.",
        ),
        (
            "B: You are {fault}, {A}.", "A: I am not {fault}. I am {virtue}.", "B: {C} says you are {fault}.",
            "A: {C} is a {animal}.",
        ),
        (
            "A: Do you remember {feast}?", "B: When {past_event}?",
            "A: No, that was the year before. I mean when {past_event2}.",
        ),
        (
            "A: I dreamed of {dream}.", "B: Of {dream}? That means {abstraction}.",
            "A: Last time you said it meant {abstraction}.",
        ),
        (
            "B: What have you got in that {box}?", "A: {goods.cap}.", "B: {goods.cap}? In a {box}?",
            "A: Where do you keep yours?",
        ),
        (
            "A: My {part} hurts.", "B: Then rub your {part} with {goods}.",
            "A: I did. Now it smells of {goods} as well.",
        ),
        (
            "B: Will it {rain}, do you think?", "A: My {part} says yes.",
            "B: And what does your other {part} say?",
        ),
        (
            "A: What is the matter, {B}?", "B: I am {state}.", "A: You were {state} on {weekday}.",
            "B: I was {mood} on {weekday}. Today I am {state}.",
        ),
        (
            "A: Listen! What was that {noise}?",
            "B: I heard no {noise}. {thing_clause.now.cap}, that is all.", "A: There it is again.",
        ),
        (
            "B: Teach me to {skill@you}.", "A: First you must learn to {lesson}.",
            "B: But I can {lesson} already.", "A: Show me, then.",
        ),
        (
            "A: I need {goods}.", "B: What for?", "A: {A.dish.cap}.", "B: Nobody puts {goods} in {A.dish}.",
            "A: {someone} does.",
        ),
        (
            "B: Have you paid {C}?", "A: Twice. Once in {goods} and once in {payment}.",
            "B: {C.he.cap} says you have not.", "A: {C.he.cap} did not like the {payment}.",
        ),
        (
            "A: Shall we {act.base@we}?", "B: Now? But {weather_clause.now}.",
            "A: Then we shall {act.base@we} {when}.",
        ),
        (
            "B: Guess what I saw {spot}.", "A: A {animal}?", "B: Better. A {animal}, with a {x}.",
            "A: {exclaim}. Whose {x}?",
        ),
        ("A: {proverb.now.cap}.", "B: Who says so?", "A: {C}.", "B: {C} also says that {proverb.now}."),
        (
            "A: I am afraid of {A.dread}.", "B: Of {A.dread}? Here {spot}?",
            "A: You may laugh, {B}, but what about {B.dread}?",
        ),
        (
            "B: Why do you always {habit_of_A}?", "A: Do I? And why do you always {habit_of_B}?",
            "B: I never noticed that I did.",
        ),
    ),
    "with C": (
        ("C: {remark.now@I}", "A: Nobody asked you, {C}.", "B: I did. {ask_yes}", "C: {yes_or_no}"),
        (
            "C: Has either of you seen my {x}?", "A: Not I.", "B: It is {spot}.",
            "C: It was {spot} yesterday. Now there is only {junk}.",
        ),
        ("C: I have news! {past_event.cap}.", "A: We know.", "B: We have known since {weekday}."),
        (
            "C: What are you two talking about?", "A: {topic.cap}.", "B: You.",
            "C: I hope you said I was {virtue}.",
        ),
        ("C: {command}", "B: In a moment. {A} is telling me about {topic}.", "C: Again?"),
        ("C: {goods.cap}! Who will buy my {goods}?", "A: Not today.", "B: Not ever, {C}."),
    ),
    "farewell": (
        ("A: I must go. {clause.now.cap}.", "B: Good night, {A}.", "A: Good night."),
        ("B: Until {weekday}, then.", "A: Until {weekday}, if {weather_clause.now} or not."),
        ("A: It is late.", "B: It is always late when you {act.base@you}."),
        ("B: Take this {x} with you.", "A: I shall put it {spot}.", "B: Put it where you like, but go."),
        ("A: I shall say no more.", "B: Thank you.", "A: Except that {past_event}."),
        ("B: {exclaim}! The {bell}!", "A: Run, {B}!"),
    ),
}  # fmt: skip

PLAY_PHRASES: dict[str, tuple[str, ...]] = {
    "is_it": (
        "Is it good? {weather_clause.now.cap}.", "Good {daypart}, {A}. {question}",
        "Not very. {remark.now@I}", "So you say.",
    ),
    "stage": (
        "<The {indoors} of {someone}|Outside {landmark}|{street}|Under a {tree}|The deck of the {ship}|The "
        "{in_spot}>. <Early|Late|A {weather_adj}> {daypart}. {A.upper} is {A.work.ing}. Enter {B.upper} "
        "with {load@B}.",
        "<Near {landmark}|The {indoors} of {landmark}|On {street}>, {hour}. {weather_clause.cap}. {A.upper} "
        "and {B.upper} {deed@they}.",
        "<The {on_spot}|The {in_spot}|Behind {landmark}>, {weekday} {daypart}. {thing_clause.cap}. "
        "{B.upper} {small_deed@B} and {small_deed@B}. Enter {A.upper}, {mood}.",
    ),
    "ask_yes": (
        "Have you seen {someone} {where}?", "Did you {deed.base@you} {when}?",
        "Is it true that {clause.past}?", "Will it {rain}?", "Can you {skill@you}?",
        "Is that {food} I smell?", "Have you ever {deed.done@you}?", "Are you still {mood}?",
        "Would you {deed.base@you} for {few} pence?", "May I borrow your {tool}?", "Do you like {food}?",
        "Were you born in {port}?",
    ),
    "yes_or_no": (
        "No.", "Yes.", "Perhaps.", "Not since {weekday}.", "Only {when}.", "I could not say.",
        "Not while {weather_clause.now}.", "Certainly not.", "Certainly.", "Every {weekday}.",
        "Never, and I never will.", "Yes, and so has {someone}'s {pet}.", "No, but {someone} might.",
        "Only because {clause.past}.", "Not before {meal}.", "Yes, though I am {mood}.",
        "Yes. No. It depends.",
    ),
    "ask_where": (
        "Where did you put the {x}?", "Where did {someone} go?", "Where do you keep the {goods}?",
        "Where shall we {act.base@we}?", "Where was {C} {when}?", "Where is the {vessel_type} from {port}?",
        "Where did you find that {x}?", "Where does your {pet} sleep?",
    ),
    "ask_who": (
        "Who {deed.past@they} {when}?", "Who told you about {topic}?", "Who sold you that {x}?",
        "Who taught you to {skill@you}?", "Whose {x} is that {where}?", "Who won the {feast_thing}?",
        "Who will {act.base@they} now?",
    ),
    "ask_when": (
        "When did you last {act.base@you}?", "When did {C} {act.base@C}?",
        "When was the {mendable} last mended?", "When did you learn to {skill@you}?",
        "When were you last {mood}?", "When did {someone} sail for {port}?",
    ),
    "excuse": (
        "Getting wet.", "What it always does.", "{someone} put it there.", "It was the {animal}.",
        "Ask {someone}.", "Nothing, as far as I can see.", "You left it there {when}.", "Waiting for you.",
        "I needed it to {deed.base@I}.",
    ),
    "bargain_word": (
        "It is hardly scratched.", "It was {someone}'s.", "I have seen better in {port}.", "It has a crack.",
        "And a {crop}.", "My {pet} would not have it.", "It came all the way from {port}.",
        "{weather_clause.cap}, and I am tired.", "{exclaim}.", "It is too {taste}.",
        "You will not find another.", "{someone} has one for less.", "It smells of {bulk}.",
        "Feel the weight of it.",
    ),
    "business": (
        "({A.upper} {small_deed}.)", "({B.upper} {small_deed@B}.)", "({thing_clause.cap}.)",
        "({weather_clause.cap}.)", "(A {animal} {animal_deed}.)",
        "({A.upper} and {B.upper} {small_deed@they}.)", "(A {sound} outside.)", "(Silence.)",
    ),
    "entrance": (
        "(Enter {C.upper} with {load@C}.)", "(Enter {C.upper}, {mood}.)", "(Enter {C.upper}, {deed.ing@C}.)",
    ),
    "leaving": (
        "(Exit {A.upper}, {how}.)", "(Exit {B.upper} {toward}.)", "(They go out.)",
        "({A.upper} {small_deed}. Curtain.)", "(Curtain.)",
    ),
}  # fmt: skip


class Stage:
    """Puts on scenes."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._dice = voice.dice

    def scene(self) -> str:
        """A title, a setting, and talk between two people, sometimes with a third coming in."""
        cast = dict(zip("ABC", self._dice.several(TOWNSFOLK, 3), strict=True))
        lines = [self._say("{stage}", cast), *self._exchange("greeting", cast)]
        for exchange in self._dice.several(EXCHANGES["middle"], self._dice.between(2, 5)):
            lines += self._spoken(exchange, cast)
            if self._dice.chance(0.3):
                lines.append(self._say("{business}", cast))
        if self._dice.chance(0.5):
            lines += self._bargain(cast)
        if self._dice.chance(0.4):
            lines += [self._say("{entrance}", cast), *self._exchange("with C", cast)]
        lines += [*self._exchange("farewell", cast), self._say("{leaving}", cast)]
        title = f"{cast['A'].first} and {cast['B'].first}"
        return "\n\n".join([title.upper(), "\n".join(wrapped(line) for line in lines)])

    def _say(self, template: str, cast: Cast) -> str:
        return self._voice.say(template, cast, "now")

    def _exchange(self, kind: str, people: dict[str, Person]) -> list[str]:
        return self._spoken(self._dice.pick(EXCHANGES[kind]), people)

    def _spoken(self, exchange: tuple[str, ...], people: dict[str, Person]) -> list[str]:
        """The speeches of an exchange, with the same props in all of them."""
        cast: Cast = people | self._props(people)
        return [self._speech(speech, cast) for speech in exchange]

    def _speech(self, speech: str, cast: Cast) -> str:
        speaker, _, words = speech.partition(": ")
        return f"{self._voice.phrase(f'{{{speaker}.upper}}', cast)}: {self._say(words, cast)}"

    def _props(self, people: dict[str, Person]) -> dict[str, Member]:
        choose = self._voice.phrase
        habits = {f"habit_of_{key}": choose(f"{{{key}.habit.base@{key}}}", people) for key in "AB"}
        return {
            "act": self._voice.outline("{deed}", people),
            "daypart": choose("{daypart}"),
            "weekday": choose("{weekday}"),
            "lesson": choose("{lesson}"),
            "x": choose("{thing}"),
            "spot": choose("{where}"),
            "goods": choose("{bulk}"),
            "box": choose("{vessel}"),
            "part": choose("{body}"),
            "state": choose("{mood}"),
            "noise": choose("{sound}"),
            "dream": choose("{dream_of}"),
            "fault": choose("{vice}"),
            "payment": choose("{feeling}"),
            "ill": choose("{ailment}"),
            "wares": choose("{crop.plural}"),
            "past_event": choose("{clause.past}"),
            "past_event2": choose("{clause.past}"),
            **habits,
        }

    def _bargain(self, people: dict[str, Person]) -> list[str]:
        """Price and offer come toward each other by the same steps until they meet."""
        step, rounds, offer = self._dice.between(1, 4), self._dice.between(1, 3), self._dice.between(2, 12)
        price = offer + 2 * step * rounds
        cast: Cast = people | {"x": self._voice.phrase("{thing}")}
        lines = ["A: How much is that {x}?", f"B: {price} pence.", f"A: {price}! I will give you {offer}."]
        for _ in range(rounds - 1):
            price, offer = price - step, offer + step
            lines += [f"B: {price}. {{bargain_word}}", f"A: {offer}. {{bargain_word}}"]
        price -= step
        lines += [f"B: {price}, and not a penny less.", f"A: {price}, then. Wrap it up."]
        return [self._speech(line, cast) for line in lines]
