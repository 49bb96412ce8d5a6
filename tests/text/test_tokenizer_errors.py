"""Errors and panics of a Rust library become one exception; interrupts pass through."""

import json

import pytest
import tokenizers

from tests.published import published
from tinylm.process_signals import Interrupted
from tinylm.text.tokenizer_errors import TokenizerLibraryError, wrap_library_errors

PUBLISHED = published()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, Interrupted])
def test_interrupts_and_memory_errors_pass_through(error: type[BaseException]) -> None:
    with pytest.raises(error), wrap_library_errors():
        raise error


def test_a_panic_of_the_library_is_caught(capfd: pytest.CaptureFixture[str]) -> None:
    spec = {**PUBLISHED["words"], "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    with pytest.raises(TokenizerLibraryError, match="Precompiled"), wrap_library_errors():
        tokenizers.Tokenizer.from_str(json.dumps(spec))
    capfd.readouterr()  # discard the message that the panic printed
