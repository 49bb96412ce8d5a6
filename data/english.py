"""The rules of English spelling the corpus needs: verb forms, plurals, articles, number words, layout."""

import re
import textwrap

LINE_WIDTH = 72


def listed(text: str) -> tuple[str, ...]:
    """The items of a comma-separated list."""
    return tuple(" ".join(item.split()) for item in text.split(","))


_IRREGULAR_VERBS = listed("""be was been, have had had, do did done, go went gone, say said said,
    come came come, see saw seen, take took taken, give gave given, find found found, tell told told,
    leave left left, bring brought brought, buy bought bought, sell sold sold, keep kept kept, hold held
    held, stand stood stood, sit sat sat, lose lost lost, send sent sent, lend lent lent, spend spent
    spent, build built built, make made made, write wrote written, read read read, run ran run, sing
    sang sung, ring rang rung, drink drank drunk, eat ate eaten, begin began begun, swim swam swum, sink
    sank sunk, drive drove driven, ride rode ridden, rise rose risen, speak spoke spoken, break broke
    broken, steal stole stolen, wake woke woken, wear wore worn, tear tore torn, swear swore sworn, know
    knew known, grow grew grown, throw threw thrown, blow blew blown, fly flew flown, draw drew drawn,
    show showed shown, fall fell fallen, feel felt felt, sleep slept slept, sweep swept swept, creep
    crept crept, weep wept wept, meet met met, feed fed fed, lead led led, hang hung hung, swing swung
    swung, dig dug dug, stick stuck stuck, win won won, spin spun spun, catch caught caught, teach
    taught taught, think thought thought, fight fought fought, seek sought sought, hear heard heard, lay
    laid laid, lie lay lain, pay paid paid, light lit lit, hide hid hidden, bite bit bitten, shake shook
    shaken, forget forgot forgotten, get got got, let let let, put put put, set set set, cut cut cut,
    shut shut shut, cost cost cost, hurt hurt hurt, split split split, bend bent bent, mean meant meant,
    dream dreamed dreamed, shine shone shone, shoot shot shot, choose chose chosen, freeze froze frozen,
    become became become, understand understood understood, bind bound bound, wind wound wound, grind
    ground ground, can could could, will would would, must had had, lean leaned leaned, burn burned
    burned, learn learned learned, sew sewed sewn, mow mowed mown, strike struck struck, sling slung
    slung, cling clung clung, spread spread spread, bid bid bid, bet bet bet, swell swelled swollen,
    forgive forgave forgiven, upset upset upset, beat beat beaten, may might might""")  # fmt: skip

_DOUBLING_VERBS = frozenset(
    listed("""stop, step, slip, grip, drop, nod, hop, hum, grin, beg, chat, clap, drag, drip, dip,
    flap, fit, hug, knit, knot, mop, pat, plan, plot, rub, scrub, shrug, sip, skip, slam, snap,
    stir, tap, tip, trim, trip, trot, tug, wrap, whip, wag, spot, sob, slap, admit, regret, prefer,
    pin, jot, rap, chop, sag, strum, bob, plod, thud, get, let, put, set, cut, shut, hit, sit, run,
    swim, begin, dig, win, spin, forget, upset, split, bid, gut, pop, pet, stab, nag, prod, swap,
    drum, quarrel, travel, marvel""")
)  # fmt: skip

_SAME_IN_PLURAL = frozenset(
    listed("""lavender, thrift, herring, cod, sheep, mackerel, trout, salmon, ling, sole, bream, mullet, bass,
    pollock, halibut, skate, turbot, plaice, haddock, whiting, squid""")
)  # fmt: skip

_IRREGULAR_PLURALS = {
    "loaf": "loaves", "knife": "knives", "wife": "wives", "leaf": "leaves", "shelf": "shelves",
    "calf": "calves", "wolf": "wolves", "thief": "thieves", "half": "halves", "goose": "geese",
    "mouse": "mice", "child": "children", "man": "men", "woman": "women", "foot": "feet", "tooth": "teeth",
    "potato": "potatoes", "tomato": "tomatoes", "echo": "echoes", "ox": "oxen", "penny": "pence",
    "scarf": "scarves", "fisherman": "fishermen", "ferryman": "ferrymen",
}  # fmt: skip

_ONES = listed("""nought, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen,
    fourteen, fifteen, sixteen, seventeen, eighteen, nineteen""")
_TENS = listed("nought, ten, twenty, thirty, forty, fifty, sixty, seventy, eighty, ninety")


def _irregular_verbs() -> dict[str, tuple[str, str]]:
    rows = (row.split() for row in _IRREGULAR_VERBS)
    return {base: (past, done) for base, past, done in rows}


_IRREGULAR = _irregular_verbs()
_MODALS = frozenset({"can", "will", "must", "may"})


def _with_ending(base: str, ending: str) -> str:
    """Join -ed or -ing to a regular verb, dropping or doubling the letter before it."""
    if base.endswith("ie") and ending == "ing":
        return base[:-2] + "ying"
    if base.endswith("ee"):
        return base + ending.removeprefix("e")
    if base.endswith("e"):
        return base[:-1] + ending
    if ending == "ed" and re.search(r"[^aeiou]y$", base):
        return base[:-1] + "ied"
    if base in _DOUBLING_VERBS:
        return base + base[-1] + ending
    return base + ending


def past_tense(base: str, is_plural: bool = False) -> str:
    if base == "be":
        return "were" if is_plural else "was"
    if base in _IRREGULAR:
        return _IRREGULAR[base][0]
    return _with_ending(base, "ed")


def past_participle(base: str) -> str:
    return _IRREGULAR[base][1] if base in _IRREGULAR else _with_ending(base, "ed")


def present_participle(base: str) -> str:
    return "being" if base == "be" else _with_ending(base, "ing")


def third_person(base: str) -> str:
    """The verb as it follows he, she or it in the present."""
    if base in ("be", "have"):
        return {"be": "is", "have": "has"}[base]
    return base if base in _MODALS else plural(base)


def plural(noun: str) -> str:
    """The plural of a noun, or of the noun before "of" in a phrase like "cup of tea"."""
    head, of, rest = noun.partition(" of ")
    before, space, last = head.rpartition(" ")
    return before + space + _plural_word(last) + of + rest


def _plural_word(word: str) -> str:
    if word in _SAME_IN_PLURAL:
        return word
    if word in _IRREGULAR_PLURALS:
        return _IRREGULAR_PLURALS[word]
    if re.search(r"(s|x|z|ch|sh)$", word) or word in ("go", "do"):
        return word + "es"
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + "s"


def number_word(number: int) -> str:
    """A number under a thousand in words."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_ONES[hundreds]} hundred" + (f" and {number_word(rest)}" if rest else "")


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th and so on."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def counted(number: int, noun: str) -> str:
    """A count in figures with its noun: 1 egg, 2 eggs."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def joined(items: list[str]) -> str:
    """a, b and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def capital(text: str) -> str:
    """The text with its first letter made a capital, past any opening quotation mark or bracket."""
    return re.sub(r"^[\"(]*[a-z]", lambda start: start.group().upper(), text)


def _article(match: re.Match[str]) -> str:
    article, word = match.group(1), match.group(2)
    takes_an = re.match(r"(?!one|once|uni|use|eu|ewe)[aeiou]|hour|honest|heir", word.lower()) is not None
    return f"{article}n {word}" if takes_an else f"{article} {word}"


def tidy(text: str) -> str:
    """Finished sentences: "an" before vowels, and a capital wherever a sentence starts."""
    text = re.sub(r"\b([Aa]) (\w+)", _article, text).replace("can not ", "cannot ")
    return capital(re.sub(r"([.!?]|[.]\") ([\"(]?)([a-z])", lambda m: m[0][:-1] + m[3].upper(), text))


def wrapped(text: str) -> str:
    """A paragraph broken into lines of even width."""
    return textwrap.fill(text, LINE_WIDTH, break_long_words=False, break_on_hyphens=False)
