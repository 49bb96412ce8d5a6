"""Mark the names of special tokens where users wrote them, so that they are encoded as ordinary text."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from tinylm.errors import UsageError
from tinylm.text.tokenizer import LITERAL


class LiteralTokens:
    """Marks occurrences of `tokens` in texts, except of tokens of a single character."""

    def __init__(self, tokens: Collection[str]) -> None:
        rests: dict[str, list[str]] = {}
        for token in tokens:
            if len(token) > 1:
                rests.setdefault(token[0], []).append(re.escape(token[1:]))
        # Matches only the first character of a token, so that overlapping occurrences are all found.
        firsts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
        self._first = re.compile("|".join(firsts)) if firsts else None

    def mark(self, value: Any) -> Any:
        """Return a copy of a JSON value with LITERAL after the first character of each occurrence, also in keys.

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
    """Return a marked text without its marks."""
    return text.replace(LITERAL, "")
