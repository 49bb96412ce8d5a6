"""Turns templates into sentences.

A template is English with holes, and is written with these marks:

    {landmark}        an entry of the rule of that name, itself a template
    {A} {A.trade}     somebody in the cast, or something about them; {A.work} is a piece of their daily work
    {he} {his} ...    the pronouns of the subject, who is A unless said otherwise
    {deed@B}          the same rule with B as its subject; @new is somebody not met yet, called {name}
    {deed.now}        the same rule in another verb form: base, past, now, ing or done
    {crop.plural}     the plural; {x.cap} begins with a capital, {x.upper} is all capitals
    {remark.spoken}   ends with a comma instead of a full stop, to go before "said she"
    {someone}         the name of somebody not met yet
    ~walk             a verb that agrees with the subject, in the form in force
    *walk  ^walk      a verb that agrees with "it", or with "they"
    <one|other>       one of several wordings
    [perhaps]         something to leave out half the time
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dice import Dice
from english import capital, past_participle, past_tense, plural, present_participle, third_person, tidy
from people import IT, ME, THEY, TOWNSFOLK, TRADE_WORK, WE, YOU, Person, Pronoun

Member = Person | Pronoun | str
Cast = Mapping[str, Member]

PRONOUNS: dict[str, Pronoun] = {"I": ME, "we": WE, "you": YOU, "it": IT, "they": THEY}
FORMS = frozenset({"base", "past", "now", "ing", "done"})
OPEN_FORM = "open"
FINISHES = frozenset({"plural", "spoken", "cap", "upper"})

_CHOICE = re.compile(r"<([^<>]*)>")
_OPTION = re.compile(r"\[([^][]*)\]")
_VERB = re.compile(r"([~*^])([a-z]+)")
_SLOT = re.compile(r"\{(\w+)((?:\.\w+)*)(?:@(\w+))?\}")


@dataclass(frozen=True)
class Scope:
    """What a template can refer to: the cast, the subject of the clause, the verb form, and who was met.

    While the subject is None, verbs and pronouns that depend on it are left as they are.
    """

    cast: Cast
    subject: Person | Pronoun | None
    form: str
    met: list[Person]

    @property
    def pronoun(self) -> Pronoun:
        if isinstance(self.subject, Person):
            return self.subject.pronoun
        return self.subject or IT

    @property
    def name(self) -> str:
        return self.subject.first if isinstance(self.subject, Person) else self.pronoun.he


def conjugated(base: str, form: str, pronoun: Pronoun) -> str:
    """A verb in one of the FORMS, agreeing with its subject."""
    match form:
        case "past":
            return past_tense(base, is_plural=pronoun in (WE, YOU, THEY))
        case "now" if base == "be" and not pronoun.takes_s:
            return "am" if pronoun == ME else "are"
        case "now":
            return third_person(base) if pronoun.takes_s else base
        case "ing":
            return present_participle(base)
        case "done":
            return past_participle(base)
        case _:
            return base


class Voice:
    """Speaks templates with words chosen by the dice."""

    def __init__(self, dice: Dice, rules: Mapping[str, tuple[str, ...]]) -> None:
        self.dice = dice
        self.rules = rules

    def say(self, template: str, cast: Cast | None = None, form: str = "past") -> str:
        """The template as finished sentences."""
        return tidy(self.phrase(template, cast, form))

    def phrase(self, template: str, cast: Cast | None = None, form: str = "past") -> str:
        """The template as words in the middle of a sentence."""
        lead = (cast or {}).get("A", IT)
        return self._expand(template, self._scope(cast, IT if isinstance(lead, str) else lead, form))

    def outline(self, template: str, cast: Cast | None = None) -> str:
        """A template with all words chosen, and a subject and a verb form still to be given to it."""
        return self._expand(template, self._scope(cast, None, OPEN_FORM))

    def _scope(self, cast: Cast | None, subject: Person | Pronoun | None, form: str) -> Scope:
        members: dict[str, Member] = {**PRONOUNS, **(cast or {})}
        met = [member for member in members.values() if isinstance(member, Person)]
        return Scope(members, subject, form, met)

    def _expand(self, template: str, scope: Scope) -> str:
        text = self._settle(template)
        text = _VERB.sub(lambda mark: self._verb(mark, scope), text)
        return _SLOT.sub(lambda slot: self._fill(slot, scope), text)

    def _settle(self, text: str) -> str:
        """Choose between the alternatives and drop or keep the options, innermost first."""
        while _CHOICE.search(text) or _OPTION.search(text):
            text = _CHOICE.sub(lambda choice: self.dice.pick(choice[1].split("|")), text)
            text = _OPTION.sub(lambda option: option[1] if self.dice.chance(0.5) else "", text)
        return text

    def _verb(self, mark: re.Match[str], scope: Scope) -> str:
        if scope.form == OPEN_FORM:
            return mark[0]
        pronoun = {"~": scope.pronoun, "*": IT, "^": THEY}[mark[1]]
        return conjugated(mark[2], scope.form, pronoun)

    def _fill(self, slot: re.Match[str], scope: Scope) -> str:
        name, modifiers, bound_to = slot[1], slot[2].split(".")[1:], slot[3]
        if bound_to:
            scope = self._with_subject(bound_to, scope)
        for modifier in modifiers:
            if modifier in FORMS:
                scope = replace(scope, form=modifier)
        text = self._value(name, modifiers, scope)
        if "plural" in modifiers:
            text = plural(text)
        if "spoken" in modifiers:
            text = re.sub(r"\.$", ",", text)
        if "cap" in modifiers:
            text = capital(text)
        return text.upper() if "upper" in modifiers else text

    def _with_subject(self, key: str, scope: Scope) -> Scope:
        subject = self._stranger(scope) if key == "new" else scope.cast[key]
        if isinstance(subject, str):
            raise ValueError(f"{key} is {subject!r}, which cannot be a subject")
        return replace(scope, subject=subject)

    def _value(self, name: str, modifiers: list[str], scope: Scope) -> str:
        member = scope.cast.get(name)
        if isinstance(member, str):
            return self._expand(member, scope)
        if member is not None:
            return self._about(member, modifiers, replace(scope, subject=member))
        if name == "name":
            return scope.name
        if name == "someone":
            return self._mention(self._stranger(scope))
        if hasattr(scope.pronoun, name):
            return str(getattr(scope.pronoun, name)) if scope.subject else f"{{{name}}}"
        return self._expand(self.dice.deal(self.rules[name]), scope)

    def _about(self, member: Person | Pronoun, modifiers: list[str], scope: Scope) -> str:
        facts = [word for word in modifiers if word not in FORMS | FINISHES]
        if not facts:
            return scope.name
        fact = facts[0]
        if hasattr(scope.pronoun, fact):
            return str(getattr(scope.pronoun, fact))
        if fact == "work" and isinstance(member, Person):
            return self._expand(self.dice.deal(TRADE_WORK[member.trade]), scope)
        return self._expand(str(getattr(member, fact)), scope)

    def _stranger(self, scope: Scope) -> Person:
        unmet = [person for person in TOWNSFOLK if person not in scope.met]
        person = self.dice.pick(unmet)
        scope.met.append(person)
        return person

    def _mention(self, person: Person) -> str:
        """The ways neighbours name a neighbour."""
        roll = self.dice.below(10)
        if roll < 6:
            return person.first
        if roll < 8:
            return person.full
        return f"{person.first} the {person.trade}" if roll < 9 else f"the {person.trade}"
