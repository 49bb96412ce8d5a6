"""The libraries that tokenize: gigatoken for byte-level BPE, and the errors of all of them as one exception.

gigatoken is optional, and gives the same ids as the `tokenizers` library (decision 002). If it cannot be imported,
raises an error or gives other ids, the caller uses the library (decision 021).
"""

import contextlib
import importlib.metadata
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tinylm.errors import TinyLMError
from tinylm.text.tokenizer_file import TokenizerSpec, short_repr


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


RESET_AFTER = 1 << 24  # characters encoded before the word cache of gigatoken is emptied


class GigatokenBPE:
    """Encoder for a byte-level BPE tokenizer. Thread-safe; `usable` becomes False at the first error or difference.

    gigatoken caches every distinct word without a limit, so its tokenizer is created anew after RESET_AFTER characters.
    It does not support concurrent calls, so calls are serialized by a lock.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        # Without added tokens, text that looks like a special token is encoded as text.
        model = {**spec["model"], "vocab": _vocabulary_without_added(spec)}
        self._file = json.dumps({**spec, "model": model, "added_tokens": []})
        self._tokenizer: Any = None  # gigatoken.Tokenizer
        self._characters_since_reset = 0
        self._lock = threading.Lock()
        self.usable = True

    def encode(self, text: str) -> np.ndarray | None:
        """Return the token ids, (T,) of uint32, or `None` if gigatoken is not usable."""
        with self._lock:
            if not self.usable:
                return None
            try:
                with wrap_library_errors():
                    if self._tokenizer is None or self._characters_since_reset > RESET_AFTER:
                        import gigatoken

                        self._tokenizer, self._characters_since_reset = gigatoken.Tokenizer.from_json(self._file), 0
                    self._characters_since_reset += len(text)
                    return np.asarray(self._tokenizer.encode(text), dtype=np.uint32)
            except TokenizerLibraryError:
                self.usable, self._tokenizer = False, None
                return None

    @property
    def encoder(self) -> str | None:
        """The name "gigatoken" and its version, or `None` if it is not usable."""
        self.encode("")  # sets `usable`: imports gigatoken and loads the vocabulary
        return f"gigatoken {importlib.metadata.version('gigatoken')}" if self.usable else None

    def matches(self, sample: Iterable[str], reference: Callable[[str], np.ndarray]) -> bool:
        """Whether `encode` and `reference` return the same ids for each text; otherwise `usable` becomes False.

        Texts are not compared while gigatoken is not usable.
        """
        for text in sample:
            ids = self.encode(text)
            if ids is not None and not np.array_equal(ids, reference(text)):
                self.usable = False
                return False
        return True


def is_byte_level_bpe(spec: TokenizerSpec) -> bool:
    """Whether the tokenizer is byte-level BPE with GPT-2's pre-tokenizer and no normalizer or option that changes ids.

    All added tokens must be special.
    """
    model, pre_tokenizer = spec["model"], spec["pre_tokenizer"] or {}
    if model["type"] != "BPE" or spec["normalizer"] or model.get("ignore_merges") or model.get("byte_fallback"):
        return False
    if pre_tokenizer.get("type") != "ByteLevel" or pre_tokenizer.get("add_prefix_space"):
        return False
    if not pre_tokenizer.get("use_regex", True) or not added_tokens_are_special(spec):
        return False
    if any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        return False
    vocabulary = _vocabulary_without_added(spec)
    merged = {"".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]}
    alphabet = {character for character, _ in byte_alphabet()}
    used = {character for token in vocabulary for character in token}
    return used <= alphabet and merged | alphabet <= vocabulary.keys()


def added_tokens_are_special(spec: TokenizerSpec) -> bool:
    """Whether all added tokens are special, so that text is never encoded as one of them."""
    return all(token["special"] for token in spec["added_tokens"])


def _vocabulary_without_added(spec: TokenizerSpec) -> dict[str, int]:
    """The vocabulary of a BPE model without the added tokens."""
    added = {token["content"] for token in spec["added_tokens"]}
    return {token: i for token, i in spec["model"]["vocab"].items() if token not in added}


def byte_alphabet() -> Iterator[tuple[str, int]]:
    """Yield (character, byte) for each byte: the mapping of GPT-2's `bytes_to_unicode` (Radford et al. 2019)."""
    substitutes = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            yield chr(byte), byte
        else:
            yield chr(256 + substitutes), byte
            substitutes += 1
