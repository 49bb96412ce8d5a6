"""Tables of what is refused: inputs with the messages of their errors."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from tinylm.errors import TinyLMError


def assert_refused(
    rows: Iterable[tuple[Any, str]],
    attempt: Callable[[Any], object],
    errors: type[Exception] | tuple[type[Exception], ...] = TinyLMError,
) -> None:
    """For each row (input, regular expression), the attempt raises one of the errors with a message that matches.

    All rows for which it does not are reported together.
    """
    wrong, count = [], 0
    for value, message in rows:
        count += 1
        try:
            attempt(value)
        except errors as error:
            if not re.search(message, str(error)):
                wrong.append(f"{value!r:.200}: {error} (expected: {message})")
        else:
            wrong.append(f"{value!r:.200}: accepted (expected: {message})")
    assert count
    assert not wrong, "\n".join(wrong)
