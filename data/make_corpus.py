"""Write the sample corpus from the grammar in `grammar/`. README.md describes the notation.

    python data/make_corpus.py > data/corpus.txt

The same seed and size give the same bytes on every Python from 3.11 on. `random.Random.random` is the only source
of randomness: it is the one method of `Random` whose sequence Python keeps stable across versions.
"""

import argparse
import operator
import re
import sys
import textwrap
from pathlib import Path
from random import Random

GRAMMAR = Path(__file__).parent / "grammar"
DEFAULT_SEED = 1
DEFAULT_BYTES = 1_050_000
BETWEEN_PIECES = "\n\n\n"
LINE_WIDTH = 72
TABLE_WIDTH = 40

CASES = ("he", "him", "his", "himself")
TENSES = frozenset({"base", "past", "now", "ing", "done"})
OPEN = "open"  # the tense of a kept phrase: its verbs and pronouns are filled in where the phrase is used

RULE = re.compile(r"^([^\s#][^:\n]*):(.*)\n((?: +.*\n|\n)*)", re.MULTILINE)
LINE = re.compile(r"^  (?:(\d+)x )?(.+)$", re.MULTILINE)
CHOICE = re.compile(r"<([^<>]*)>")
OPTION = re.compile(r"\[([^][]*)\]")
MARK = re.compile(r"(?P<agreement>[~*^])(?P<verb>[a-z]+)|\{(?P<slot>[^{}]+)\}")
SLOT = re.compile(r"(?:(\w+) )?(\$?\w+|'[^']+')((?:\.\w+)*)(?:@(\w+))?")  # count, name, modifiers, subject
REPEAT = re.compile(r"(\w+)\.\.(\w+) (.+)")
ASSIGNMENT = re.compile(r"(\w+)=(.+)")
NUMBER = re.compile(r"\w+(?:(?:[-+*]|\.\.)\w+)+")  # 2..9, part1+part2
LETTER = re.compile(r"[A-HJ-Z]")  # a member of the cast; I is a pronoun

Rule = list[list[str]]  # blocks of alternatives; expanding a rule takes one alternative of each block
Person = dict[str, str]  # a row of the rule `people`, by the names in its first row


def parse_rules(text: str) -> dict[str, Rule]:
    """`name: item, item`, or `name:` and a line for each alternative; `3x text` stands for three equal lines."""
    rules: dict[str, Rule] = {}
    for name, items, body in RULE.findall(re.sub(r"\n {4,}", " ", text)):
        if name in rules:
            raise ValueError(f"the rule {name} is defined twice")
        blocks = [LINE.findall(block) for block in body.strip("\n").split("\n\n")]
        lines = [[line for count, line in block for _ in range(int(count or 1))] for block in blocks]
        rules[name] = [items.strip().split(", ")] if items else lines
    return rules


def capital(text: str) -> str:
    """The text with its first letter in upper case, after an opening quotation mark or bracket as well."""
    return re.sub(r"^[\"(]*[a-z]", lambda start: start[0].upper(), text)


def ordinal(number: str) -> str:
    return number + ("th" if number in ("11", "12", "13") else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th"))


class English:
    """Verb forms, plurals, pronouns and numbers. english.txt has the irregular ones."""

    def __init__(self, rules: dict[str, Rule]) -> None:
        self.verbs = {base: (past, done) for base, past, done in map(str.split, rules["irregular_verbs"][0])}
        self.doubling = frozenset(rules["doubling_verbs"][0])
        self.unchanging = frozenset(rules["same_in_plural"][0])
        self.plurals = dict(map(str.split, rules["irregular_plurals"][0]))
        self.pronouns = {row.split()[0]: dict(zip(CASES, row.split(), strict=True)) for row in rules["pronouns"][0]}
        self.finishes = {
            "plural": self.plural,
            "cap": capital,
            "upper": str.upper,
            "spoken": lambda text: re.sub(r"\.$", ",", text),  # "It rains," says Ada.
            "words": lambda number: rules["numbers"][0][int(number)],
            "ordinal": ordinal,
            "tenths": lambda number: f"{int(number) / 10}",
            "clock": lambda minutes: f"{int(minutes) // 60:02}.{int(minutes) % 60:02}",
        }

    def conjugate(self, verb: str, tense: str, pronoun: str) -> str:
        plural = pronoun in ("we", "you", "they")
        if verb == "be" and tense in ("past", "now", "ing"):
            now = "are" if plural else "am" if pronoun == "I" else "is"
            return {"past": "were" if plural else "was", "now": now, "ing": "being"}[tense]
        if tense in ("past", "done"):
            past, done = self.verbs.get(verb) or [self._with_ending(verb, "ed")] * 2
            return past if tense == "past" else done
        if tense == "ing":
            return self._with_ending(verb, "ing")
        if tense == "base" or plural or pronoun == "I" or verb in ("can", "will", "must", "may"):
            return verb
        return "has" if verb == "have" else self.plural(verb)

    def _with_ending(self, verb: str, ending: str) -> str:
        """A regular verb with -ed or -ing; its last letter may be dropped, changed or doubled."""
        if verb.endswith("ie") and ending == "ing":
            return verb[:-2] + "ying"
        if verb.endswith("e"):
            return verb + ending.removeprefix("e") if verb.endswith("ee") else verb[:-1] + ending
        if ending == "ed" and re.search(r"[^aeiou]y$", verb):
            return verb[:-1] + "ied"
        return verb + (verb[-1] if verb in self.doubling else "") + ending

    def plural(self, noun: str) -> str:
        """The plural of a noun, or of the noun before "of": cups of tea."""
        return re.sub(r"[^ ]+(?= of |$)", lambda word: self._plural_word(word[0]), noun, count=1)

    def _plural_word(self, word: str) -> str:
        if word in self.plurals or word in self.unchanging:
            return self.plurals.get(word, word)
        if re.search(r"[^aeiou]y$", word):
            return f"{word[:-1]}ies"
        return word + ("es" if re.search(r"(s|x|z|ch|sh)$", word) or word in ("go", "do") else "s")


class Writer:
    """Expands rules into pieces.

    A subject is a person's first name, a letter of the cast, a pronoun, a kept pronoun's name, or None while it is
    not known.
    """

    def __init__(self, rules: dict[str, Rule], seed: int) -> None:
        columns, *people = [re.split(r" \| ?", row) for row in rules["people"][0]]
        self.people: dict[str, Person] = {row[0]: dict(zip(columns, row, strict=True)) for row in people}
        self.rules = rules | {"first_name": [list(self.people)]}
        self.english = English(rules)
        self.random = Random(seed)
        self.operations = {"+": operator.add, "-": operator.sub, "*": operator.mul, "..": self.between}
        self.decks: dict[tuple[str, int], list[str]] = {}
        self.cast: dict[str, Person] = {}  # by letter, for one piece
        self.kept: dict[str, str] = {}  # phrases and numbers by name, for one piece

    def piece(self) -> str:
        self.cast, self.kept = {}, {}
        return layout(self.tell("piece", "A", "past"))

    def below(self, limit: int) -> int:
        return int(self.random.random() * limit)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def deal(self, rule: str, block: int = 0) -> str:
        """A random alternative from the half that was used least recently, so that none is repeated soon."""
        deck = self.decks.setdefault((rule, block), list(self.rules[rule][block]))
        alternative = deck.pop(self.below(len(deck) // 2 if len(deck) > 3 else len(deck)))
        deck.append(alternative)
        return alternative

    def tell(self, rule: str, subject: str | None, tense: str) -> str:
        """Expand a rule. Several blocks are the steps of a story, with the rule `gap` between them."""
        text, *steps = [self.expand(self.deal(rule, i), subject, tense) for i in range(len(self.rules[rule]))]
        for step in steps:
            text += f" {self.tell('gap', subject, tense)} {capital(step)}"
        return text

    def expand(self, template: str, subject: str | None, tense: str) -> str:
        while CHOICE.search(template) or OPTION.search(template):  # innermost first
            template = CHOICE.sub(lambda choice: (words := choice[1].split("|"))[self.below(len(words))], template)
            template = OPTION.sub(lambda option: option[1] if self.below(2) else "", template)
        return MARK.sub(lambda mark: self._fill(mark, subject, tense), template)

    def _fill(self, mark: re.Match[str], subject: str | None, tense: str) -> str:
        """The text for a verb or a slot."""
        if mark["verb"] and tense == OPEN:
            return mark[0]
        if mark["verb"]:
            agrees_with = {"~": subject, "*": "it", "^": "they"}[mark["agreement"]]
            return self.english.conjugate(mark["verb"], tense, self._pronoun(agrees_with))
        if repeat := REPEAT.fullmatch(mark["slot"]):
            low, high, slot = repeat.groups()
            times = range(self.between(self._number(low), self._number(high)))
            return " ".join(self.expand(f"{{{slot}}}", subject, tense) for _ in times)
        if assignment := ASSIGNMENT.fullmatch(mark["slot"]):
            self._keep(*assignment.groups())
            return ""
        if not (parts := SLOT.fullmatch(mark["slot"])):
            raise ValueError(f"cannot read {mark[0]}")
        count, name, modifiers, bound = parts.groups()
        if bound:
            subject = self._newcomer()["first"] if bound == "new" else bound
        if name in CASES and subject is None:
            return mark[0]
        words = modifiers.split(".")[1:]
        tense = next((word for word in words if word in TENSES), tense)
        facts = [word for word in words if word not in TENSES and word not in self.english.finishes]
        text = self._value(name, facts[0] if facts else "first", subject, tense)
        for word in words:
            text = self.english.finishes.get(word, str)(text)
        if count:
            text = f"{self.kept[count]} {text if self.kept[count] == '1' else self.english.plural(text)}"
        return text

    def _value(self, name: str, fact: str, subject: str | None, tense: str) -> str:
        if name in CASES:
            return self.english.pronouns[self._pronoun(subject)][name]
        if name == "name" or LETTER.fullmatch(name):
            return self._about(self._person(str(subject) if name == "name" else name), fact, tense)
        if name in self.kept:
            return self.expand(self.kept[name], subject, tense)
        if name.startswith("'") or name.isdigit():
            return name.strip("'")
        return self.tell(self.kept[name[1:]] if name.startswith("$") else name, subject, tense)

    def _about(self, person: Person, fact: str, tense: str) -> str:
        if fact in CASES:
            return self.english.pronouns[person["pronoun"]][fact]
        if fact == "full":
            return f"{person['first']} {person['last']}"
        if f"{person['trade']} {fact}" in self.rules:
            return self.tell(f"{person['trade']} {fact}", person["first"], tense)
        return self.expand(person[fact], person["first"], tense)

    def _keep(self, name: str, expression: str) -> None:
        """Keep a number (random, or computed from left to right), a person or a phrase."""
        if name in self.rules:
            raise ValueError(f"{name} is the name of a rule; keep the value under another name")
        if NUMBER.fullmatch(expression):
            terms = re.split(r"([-+*]|\.\.)", expression)
            result, *others = map(self._number, terms[::2])
            for sign, other in zip(terms[1::2], others, strict=True):
                result = self.operations[sign](result, other)
            self.kept[name] = str(result)
        elif LETTER.fullmatch(name):
            self.cast[name] = self.people[self.expand(f"{{{expression}}}", None, OPEN)]
        else:
            self.kept[name] = self.expand(f"{{{expression}}}", None, OPEN)

    def _number(self, term: str) -> int:
        return int(self.kept.get(term, term))

    def _person(self, key: str) -> Person:
        """A person by first name or letter; a letter is cast when it is first used."""
        if key not in self.people and key not in self.cast:
            self.cast[key] = self._newcomer()
        return self.people.get(key) or self.cast[key]

    def _newcomer(self) -> Person:
        while (person := self.people[self.deal("first_name")]) in self.cast.values():
            pass
        return person

    def _pronoun(self, subject: str | None) -> str:
        if subject is None or subject in self.english.pronouns:
            return subject or "it"
        return self.kept[subject] if subject in self.kept else self._person(subject)["pronoun"]


def tidy(text: str) -> str:
    """The text with "an" before vowels and a capital at the start of each sentence."""
    vowel = r"(?:(?!one|once|uni|use|eu|ewe)[aeiou]|hour|honest|heir)"
    text = re.sub(rf"\b(a) (?={vowel})", r"\1n ", text, flags=re.IGNORECASE).replace("can not ", "cannot ")
    start = r"(?:[.!?]|\.\"|^[A-Z]+:) [\"(]?[a-z]"
    return capital(re.sub(start, lambda match: match[0][:-1] + match[0][-1].upper(), text))


def layout(text: str) -> str:
    """Lines end at `/`, titles follow `#`, and `>>` precedes the right column of a table."""
    lines = []
    for line in re.split(r" */ *", re.sub(r" +", " ", text.strip())):
        if line.startswith("# "):
            lines.append(line[2:].upper())
        elif " >> " in line:
            left, right = line.split(" >> ")
            lines.append(left + right.rjust(TABLE_WIDTH - len(left)))
        else:
            lines.append(textwrap.fill(tidy(line), LINE_WIDTH, break_long_words=False, break_on_hyphens=False))
    return "\n".join(lines)


def corpus(seed: int, size: int) -> str:
    """Whole pieces, until together they are larger than `size` bytes."""
    grammar = "".join(path.read_text("ascii") for path in sorted(GRAMMAR.glob("*.txt")))
    writer = Writer(parse_rules(grammar), seed)
    pieces: list[str] = []
    length = 0
    while length <= size:
        pieces.append(writer.piece())
        length += len(pieces[-1]) + len(BETWEEN_PIECES)
    return BETWEEN_PIECES.join(pieces) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the sample corpus to standard output.")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="which corpus (default: %(default)s)")
    parser.add_argument("--bytes", type=int, default=DEFAULT_BYTES, help="how much (default: %(default)s)")
    options = parser.parse_args()
    sys.stdout.buffer.write(corpus(options.seed, options.bytes).encode("ascii"))


if __name__ == "__main__":
    main()
