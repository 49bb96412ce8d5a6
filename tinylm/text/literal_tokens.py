"""Texts of special tokens in what users wrote, marked so that they are encoded as text and not as those tokens."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from tinylm.errors import UsageError
from tinylm.text.tokenizer import LITERAL


class LiteralTokens:
    """Marks the texts of `tokens`. One of a single character cannot be marked."""

    def __init__(self, tokens: Collection[str]) -> None:
        rests: dict[str, list[str]] = {}
        for token in tokens:
            if len(token) > 1:
                rests.setdefault(token[0], []).append(re.escape(token[1:]))
        # Also where two of them overlap: each character at which one begins.
        firsts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
        self._first = re.compile("|".join(firsts)) if firsts else None

    def mark(self, value: Any) -> Any:
        """A copy of a JSON value in whose texts, keys included, each of the tokens has LITERAL after its first
        character.

        Raises UsageError for a text that contains LITERAL.
        """
        if isinstance(value, str):
            if LITERAL in value:
                raise UsageError("The conversation contains U+FDD2, which is not a character; remove it.")
            return value if self._first is None else self._first.sub(lambda first: first[0] + LITERAL, value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value


def without_marks(text: str) -> str:
    """A text as it was before it was marked."""
    return text.replace(LITERAL, "")
