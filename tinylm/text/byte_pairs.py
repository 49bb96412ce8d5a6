"""Byte-level BPE by gigatoken, with the ids of the `tokenizers` library (decision 002).

gigatoken is optional: where it cannot be imported, fails or gives other ids, the library encodes (decision 021).
"""

import importlib.metadata
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tinylm.text.tokenizer_file import LibraryError, library_errors

FORGET_AFTER = 1 << 24  # characters


class BytePairs:
    """A byte-level BPE, encoded by gigatoken while `usable`.

    gigatoken remembers every word that it has seen, so it is made anew after `FORGET_AFTER` characters; and it serves
    one thread at a time.
    """

    def __init__(self, layout: dict[str, Any]) -> None:
        self._vocabulary = _without_special(layout)
        # Text that looks like a special token stays text.
        model = {**layout["model"], "vocab": self._vocabulary}
        self._file = json.dumps({**layout, "model": model, "added_tokens": []})
        self._encoder: Any = None  # of type gigatoken.Tokenizer
        self._seen = 0
        self._one_thread = threading.Lock()
        self.usable = True

    def encode(self, text: str) -> np.ndarray | None:
        """(number of tokens,) of uint32; None once gigatoken is not usable."""
        with self._one_thread:
            if not self.usable:
                return None
            try:
                with library_errors():
                    if self._encoder is None or self._seen > FORGET_AFTER:
                        import gigatoken

                        self._encoder, self._seen = gigatoken.Tokenizer.from_json(self._file), 0
                    self._seen += len(text)
                    return np.asarray(self._encoder.encode(text), dtype=np.uint32)
            except LibraryError:
                self.usable, self._encoder = False, None
                return None

    @property
    def encoder(self) -> str | None:
        """The package that encodes and its version; None once gigatoken is not usable."""
        self.encode("")  # which imports it and gives it the vocabulary
        return f"gigatoken {importlib.metadata.version('gigatoken')}" if self.usable else None

    def agrees(self, sample: Iterable[str], reference: Callable[[str], np.ndarray]) -> bool:
        """Whether gigatoken gives each text of the sample the ids of `reference`; if not, it is not used again."""
        for text in sample:
            ids = self.encode(text)
            if ids is not None and not np.array_equal(ids, reference(text)):
                self.usable = False
                return False
        return True

    def texts(self, vocab_size: int) -> list[bytes]:
        """The bytes of each id, none for what stands for no text."""
        byte_of = dict(_byte_alphabet())
        texts = [b""] * vocab_size
        for token, i in self._vocabulary.items():
            texts[i] = bytes(byte_of[character] for character in token)
        return texts


def is_byte_level(layout: dict[str, Any]) -> bool:
    """Whether it is a BPE of bytes, in words as GPT-2 has them, and nothing besides."""
    model, pre_tokenizer = layout["model"], layout["pre_tokenizer"] or {}
    if model["type"] != "BPE" or layout["normalizer"] or model.get("ignore_merges") or model.get("byte_fallback"):
        return False
    if pre_tokenizer.get("type") != "ByteLevel" or pre_tokenizer.get("add_prefix_space"):
        return False
    if not pre_tokenizer.get("use_regex", True) or not all_special(layout):
        return False
    if any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        return False
    vocabulary = _without_special(layout)
    made = {"".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]}
    alphabet = {character for character, _ in _byte_alphabet()}
    written = {character for token in vocabulary for character in token}
    return written <= alphabet and made | alphabet <= vocabulary.keys()


def _without_special(layout: dict[str, Any]) -> dict[str, int]:
    """The tokens of a BPE's vocabulary that are no added ones, and their ids."""
    added = {token["content"] for token in layout["added_tokens"]}
    return {token: i for token, i in layout["model"]["vocab"].items() if token not in added}


def all_special(layout: dict[str, Any]) -> bool:
    """Whether no added token is found in text."""
    return all(token["special"] for token in layout["added_tokens"])


def _byte_alphabet() -> Iterator[tuple[str, int]]:
    """The printable character by which GPT-2's vocabulary writes each byte."""
    substitutes = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            yield chr(byte), byte
        else:
            yield chr(256 + substitutes), byte
            substitutes += 1
