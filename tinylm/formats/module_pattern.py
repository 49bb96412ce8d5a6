"""Regular expressions over module names, from untrusted files, matched in bounded time.

Python's `re` backtracks: a pattern such as `(a+)+b` takes exponential time. Here each part of a pattern maps a set of
start positions to the set of end positions of its matches, and the number of positions is limited. Supported, with the
same meaning as in `re` for names without line breaks, are literals, classes, `.`, `\\d \\w \\s \\b`, `^`, `$`, groups,
alternatives and repetitions (counts up to 100). Everything else, such as lookaheads and backreferences, is an error
that names the pattern.
"""

import re
from collections.abc import Callable

MAX_PATTERN = 1000  # characters
MAX_DEPTH = 20  # of groups
MAX_REPETITIONS = 100
MAX_POSITIONS = 3_000_000  # visited by all patterns of one ModulePatterns; about two seconds

Positions = frozenset[int]
_Node = Callable[[str, Positions], Positions]

_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\\[]|\\.)*\]")
_COUNT = re.compile(r"\{(\d{1,3})(?:(,)(\d{0,3}))?\}")
_PLAIN = re.compile(r"(?:[A-Za-z0-9_.^$-]|\\\.)*")  # no repetitions or alternatives: safe in `re`


class ModulePatterns:
    """Patterns of module names, in order.

    Raises ValueError for a pattern that is too long or not supported. Matching raises ValueError when all matches of
    this object together take too long.
    """

    def __init__(self, patterns: list[str]) -> None:
        self._budget = MAX_POSITIONS
        self._matchers = [(pattern, self._compile(pattern)) for pattern in patterns]

    def first_match(self, name: str) -> str | None:
        """The first pattern that matches the whole name or, as in PEFT, all of it after a dot; `None` if none does."""
        for pattern, matches in self._matchers:
            self._spend(1)
            if matches(name):
                return pattern
        return None

    def _compile(self, pattern: str) -> Callable[[str], bool]:
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"a pattern of module names has {len(pattern)} characters; at most {MAX_PATTERN} are read")
        if _PLAIN.fullmatch(pattern):
            plain = re.compile(rf"(?:.*\.)?(?:{pattern})$")
            return lambda name: plain.match(name) is not None
        node = _Parser(pattern, self._spend).parse()

        def matches(name: str) -> bool:
            starts = frozenset({0, *(i + 1 for i, character in enumerate(name) if character == ".")})
            return len(name) in node(name, starts)

        return matches

    def _spend(self, positions: int) -> None:
        self._budget -= positions
        if self._budget < 0:
            raise ValueError("its patterns of module names take too long to match")


class _Parser:
    """A recursive-descent parser of one pattern: alternatives -> sequences -> repeated atoms.

    Its methods return nodes, which map start positions to end positions. spend: counts visited positions.
    """

    def __init__(self, pattern: str, spend: Callable[[int], None]) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        self._spend = spend

    def parse(self) -> _Node:
        node = self._alternatives()
        if self._at < len(self._pattern):
            raise self._unsupported()
        return node

    def _unsupported(self) -> ValueError:
        return ValueError(
            f"its pattern of module names {self._pattern[:100]!r} is not supported (at character {self._at + 1})"
        )

    def _accept(self, text: str) -> bool:
        if self._pattern.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _alternatives(self) -> _Node:
        branches = [self._sequence()]
        while self._accept("|"):
            branches.append(self._sequence())
        return lambda text, starts: frozenset().union(*(branch(text, starts) for branch in branches))

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            nodes.append(self._repetition(self._atom()))

        def run(text: str, positions: Positions) -> Positions:
            for node in nodes:
                if not positions:
                    break
                self._spend(len(positions))
                positions = node(text, positions)
            return positions

        return run

    def _atom(self) -> _Node:
        pattern = self._pattern
        if self._accept("("):
            if self._accept("?") and not self._accept(":"):
                raise self._unsupported()
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise self._unsupported()
            node = self._alternatives()
            self._depth -= 1
            if not self._accept(")"):
                raise self._unsupported()
            return node
        if self._accept("^"):
            return lambda text, starts: starts & {0}
        if self._accept("$"):
            return lambda text, starts: starts & {len(text)}
        if self._accept(r"\b"):
            return _word_boundary
        if match := _CLASS.match(pattern, self._at):
            return self._character(match.group())
        if re.compile(r"\\[dDwWsS]|\\[^A-Za-z0-9]").match(pattern, self._at):
            return self._character(pattern[self._at : self._at + 2])
        character = pattern[self._at]
        if character in r"\[]{}*+?)":
            raise self._unsupported()
        return self._character(character if character == "." else re.escape(character), len(character))

    def _character(self, expression: str, length: int | None = None) -> _Node:
        """A node for one character that matches `expression`.

        length: number of characters of the pattern to consume; default: the length of `expression`.
        """
        try:
            compiled = re.compile(expression)
        except re.error as error:
            raise self._unsupported() from error
        self._at += length or len(expression)
        return lambda text, starts: frozenset(i + 1 for i in starts if compiled.match(text, i))

    def _repetition(self, node: _Node) -> _Node:
        if self._accept("*"):
            low, high = 0, None
        elif self._accept("+"):
            low, high = 1, None
        elif self._accept("?"):
            low, high = 0, 1
        elif match := _COUNT.match(self._pattern, self._at):
            low = int(match[1])
            high = None if match[2] and not match[3] else int(match[3] or match[1])
            if max(low, high or 0) > MAX_REPETITIONS or (high is not None and high < low):
                raise self._unsupported()
            self._at += len(match[0])
        else:
            return node
        self._accept("?")  # a lazy repetition matches the same texts
        if self._at < len(self._pattern) and self._pattern[self._at] in "*+?{":
            raise self._unsupported()
        return lambda text, starts: self._repeat(node, text, starts, low, high)

    def _repeat(self, node: _Node, text: str, starts: Positions, low: int, high: int | None) -> Positions:
        for _ in range(low if starts else 0):
            self._spend(1)
            starts = node(text, starts)
        found = new = starts
        count = low
        while new and (high is None or count < high):
            self._spend(len(new))
            new = node(text, new) - found
            found |= new
            count += 1
        return found


def _word_boundary(text: str, starts: Positions) -> Positions:
    def is_word(i: int) -> bool:
        return 0 <= i < len(text) and (text[i].isalnum() or text[i] == "_")

    return frozenset(i for i in starts if is_word(i - 1) != is_word(i))
