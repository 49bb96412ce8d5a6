"""Tables of what is refused: inputs with the messages of their errors."""

from collections.abc import Callable, Iterable
from typing import Any

from tests.text.corpora import require_errors
from tinylm.errors import TinyLMError


def assert_refused(
    rows: Iterable[tuple[Any, str]],
    attempt: Callable[[Any], object],
    errors: type[Exception] | tuple[type[Exception], ...] = TinyLMError,
) -> None:
    """For each row (input, regular expression), the attempt raises one of the errors with a message that matches."""
    require_errors(attempt, rows, errors)
