"""Errors and panics of the Rust libraries that tokenize, as one Python exception."""

import contextlib
import reprlib
from collections.abc import Iterator
from typing import Any

from tinylm.errors import TinyLMError

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring = 3, 100


class TokenizerLibraryError(Exception):
    """The `tokenizers` library or gigatoken raised an exception or panicked."""


@contextlib.contextmanager
def wrap_library_errors() -> Iterator[None]:
    """Raise TokenizerLibraryError for exceptions and panics of a Rust library in the body.

    A panic arrives as `pyo3_runtime.PanicException`, which is not a subclass of Exception and cannot be imported.
    MemoryError, TinyLMError and exceptions such as KeyboardInterrupt and SystemExit pass through unchanged.
    """
    try:
        yield
    except (MemoryError, TinyLMError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise TokenizerLibraryError(short_repr(str(error))) from error


def short_repr(value: Any) -> str:
    """`repr(value)` for an error message: bounded in length and depth, without control characters."""
    return _REPR.repr(value)
