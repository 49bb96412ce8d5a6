"""Text to token ids and back: a character or a byte-level BPE tokenizer, in the `tokenizers` library's file format.

Text is encoded by faster ways than the library's own (a numpy table, gigatoken), with the same ids.
"""

import functools
import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tinylm.errors import TinyLMError, UsageError
from tinylm.files import read_text
from tinylm.text.byte_pairs import BytePairs, all_special, is_byte_level
from tinylm.text.corpus import code_points
from tinylm.text.tokenizer_file import LibraryError, expected_ids, library_errors, validate

END_OF_TEXT = "<|endoftext|>"
MASK = "<mask>"

MEASURED_AT_ONCE = 1 << 20  # ids, which need eight bytes each while they are counted

SMALLEST_BPE_VOCABULARY = 257  # every byte, and the end of text


class Tokenizer:
    """A tokenizer of the `tokenizers` library. `kind` is char, bpe (byte-level), or other for a file of foreign make.

    Text that looks like a special token stays text. `end_of_text` is the id that stands between documents.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        if library.token_to_id(END_OF_TEXT) is None:
            library.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        library.encode_special_tokens = True
        library.no_truncation()
        library.no_padding()
        self._library = library
        vocabulary = library.get_vocab()
        if len(set(vocabulary.values())) < len(vocabulary):
            raise TinyLMError(f"it gives one id to two tokens; give {END_OF_TEXT} an id of its own")
        self.end_of_text = int(library.token_to_id(END_OF_TEXT) or 0)
        self.vocab_size = 1 + max(vocabulary.values())  # a foreign vocabulary may have gaps
        file = self.to_str()
        self.sha256 = hashlib.sha256(file.encode()).hexdigest()
        layout = json.loads(file)
        self._table = _character_table(layout)
        self._byte_pairs = BytePairs(layout) if self._table is None and is_byte_level(layout) else None
        self.kind = "char" if self._table is not None else "bpe" if self._byte_pairs is not None else "other"
        pre_tokenizer = layout["pre_tokenizer"] or {"use_regex": False}
        self._splits_at_spaces = bool(pre_tokenizer.get("use_regex", True)) and all_special(layout)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Raises TinyLMError when the file is not a tokenizer, or of a kind that is not supported (decision 021)."""
        try:
            layout = validate(read_text(path))
            with library_errors():
                tokenizer = cls(tokenizers.Tokenizer.from_str(json.dumps(layout, ensure_ascii=False)))
            tokenizer._require_ids(expected_ids(layout))
        except OSError as error:
            raise TinyLMError(f"Cannot read the tokenizer {path}: {error.strerror}.") from error
        except TinyLMError as error:
            raise TinyLMError(f"{path} cannot be used: {error}.") from error
        except (ValueError, LibraryError) as error:
            raise TinyLMError(
                f"{path} is not a tokenizer that can be used: {error}. Restore the file, or use another tokenizer."
            ) from error
        return tokenizer

    def _require_ids(self, expected: dict[str, int]) -> None:
        """Raises ValueError where the library, which numbers added tokens itself, gives another id than the file."""
        vocabulary = self._library.get_vocab()
        for token, i in expected.items():
            if (given := vocabulary.get(token)) != i:
                raise ValueError(f"the token {token[:60]!r} has the id {i} in the file, and {given} once it is loaded")

    def to_str(self) -> str:
        return str(self._library.to_str())

    def extended(self, characters: str) -> "Tokenizer":
        """The same with an id for each of more characters; ids that were there stay what they are.

        Raises ValueError for a tokenizer that is not of characters.
        """
        if self._table is None:
            raise ValueError("only a tokenizer of characters can learn more of them")
        layout = json.loads(self.to_str())
        vocabulary: dict[str, int] = layout["model"]["vocab"]
        # A special token that is not in the vocabulary would get the id of the first new character when it is read.
        vocabulary |= {token["content"]: token["id"] for token in layout["added_tokens"]}
        vocabulary |= {character: i for i, character in enumerate(characters, start=self.vocab_size)}
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(layout)))

    def with_mask(self) -> "Tokenizer":
        """The same with an id for what is to be guessed, if it has none."""
        library = tokenizers.Tokenizer.from_str(self.to_str())
        library.add_special_tokens([AddedToken(MASK, special=True)])
        return Tokenizer(library)

    @property
    def mask(self) -> int:
        """Raises ValueError for a tokenizer without a mask."""
        found = self._library.token_to_id(MASK)
        if found is None:
            raise ValueError("the tokenizer has no mask")
        return int(found)

    def encode(self, text: str) -> np.ndarray:
        """(number of tokens,) of uint32. Raises UsageError for characters that have no id."""
        if self._table is not None:
            codes = code_points(text)
            known = codes < len(self._table)
            ids = self._table[np.where(known, codes, 0)]
            if not known.all() or (ids < 0).any():
                raise UsageError(f"Unknown characters: {describe_characters(self.unknown(text))}.")
            return ids.astype(np.uint32)
        if self._byte_pairs is not None and (encoded := self._byte_pairs.encode(text)) is not None:
            return encoded
        return self._encode_by_library(text)

    def _encode_by_library(self, text: str) -> np.ndarray:
        """(number of tokens,) of uint32. Raises TinyLMError when the library fails."""
        try:
            with library_errors():
                return np.array(self._library.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        except LibraryError as error:
            raise TinyLMError(
                f"The tokenizer cannot encode the text ({error}). Use another tokenizer, or other text."
            ) from error

    @property
    def encoder(self) -> str:
        """What encodes, with its version: token files of different encoders are kept apart."""
        if self._table is not None:
            return "table"
        fast = self._byte_pairs.encoder if self._byte_pairs is not None else None
        return fast or f"tokenizers {tokenizers.__version__}"

    def check_encoder(self, sample: Iterable[str]) -> bool:
        """Whether the encoder gives each text of the sample the ids of the `tokenizers` library.

        If not, the slower library encodes everything from then on. Raises TinyLMError when the
        library fails.
        """
        return self._byte_pairs is None or self._byte_pairs.agrees(sample, self._encode_by_library)

    def decode(self, ids: Iterable[int]) -> str:
        """Raises TinyLMError when the library fails."""
        return _decode(self._library, [int(i) for i in ids])

    def measure(self, ids: Sequence[int] | np.ndarray) -> tuple[int, int]:
        """How many characters and bytes of text the ids stand for, without writing it out; a character cut by an end
        counts where its first byte is.
        """
        if self.kind == "other":
            text = self.decode(ids)
            return len(text), len(text.encode())
        ids = np.asarray(ids, dtype=None if len(ids) else np.int64)
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for start in range(0, len(ids), MEASURED_AT_ONCE):
            counts += np.bincount(ids[start : start + MEASURED_AT_ONCE], minlength=self.vocab_size)
        characters, size = (int(counts @ lengths) for lengths in self._lengths)
        return characters, size

    @functools.cached_property
    def _lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The characters and the bytes of each id: two of (V,). A character is counted where it begins."""
        if self._byte_pairs is not None:
            texts = self._byte_pairs.texts(self.vocab_size)
        else:
            texts = [self.decode([token]).encode() for token in range(self.vocab_size)]
        characters = [sum(byte & 0xC0 != 0x80 for byte in text) for text in texts]
        return np.array(characters), np.array([len(text) for text in texts])

    def unknown(self, text: str) -> str:
        """The distinct characters of the text that have no id, in order of appearance.

        A foreign tokenizer is asked for each; white space it may leave out by design.
        """
        characters = "".join(dict.fromkeys(text))
        if self._byte_pairs is not None:
            return ""
        if self._table is None:
            return "".join(c for c in characters if not c.isspace() and not len(self.encode(c)))
        table = self._table
        return "".join(c for c in characters if ord(c) >= len(table) or table[ord(c)] < 0)

    def split_point(self, text: str) -> int:
        """How much of the front of a longer text can be encoded by itself without changing an id; 0 for none."""
        if self._table is not None:
            return len(text)
        if not self._splits_at_spaces:
            return 0
        for end in range(len(text) - 1, 0, -1):
            if self._byte_pairs is not None:
                splits = _always_splits(text[end - 1], text[end])
            else:  # of a foreign pre-tokenizer only this much is sure
                splits = text[end] == " " and not text[end - 1].isspace()
            if splits:
                return end
        return 0

    def stream_decoder(self) -> "StreamDecoder":
        return StreamDecoder(self._library)


class StreamDecoder:
    """Turns ids into text as they come; what it has given so far never changes when more ids come.

    Some foreign decoders rewrite earlier text, which the library refuses to stream; the rest is then held back.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._stream = decoders.DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._given = 0
        self._held_back = False

    def push(self, token: int) -> str:
        """The text that became certain with this token: empty in the middle of a character's bytes."""
        self._ids.append(token)
        text: str | None = None
        if not self._held_back:
            try:
                with library_errors():
                    text = self._stream.step(self._library, token)
            except LibraryError:
                self._held_back = True
        if text is None:
            return ""
        self._given += len(text)
        return text

    def finish(self) -> str:
        """What was held back: an unfinished character at the very end. Raises TinyLMError when the library fails."""
        return _decode(self._library, self._ids)[self._given :]


def _decode(library: tokenizers.Tokenizer, ids: list[int]) -> str:
    try:
        with library_errors():
            return str(library.decode(ids, skip_special_tokens=True))
    except LibraryError as error:
        raise TinyLMError(f"The tokenizer cannot decode the tokens ({error}). Use another tokenizer.") from error


def train_char(alphabet: str) -> Tokenizer:
    """One id a character, in the order given, after the end of text.

    The library calls this shape a BPE without merges; it is faster than its word-level models.
    """
    vocabulary = {END_OF_TEXT: 0, **{character: i for i, character in enumerate(alphabet, start=1)}}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return Tokenizer(library)


def train_bpe(pieces: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019): at most `vocab_size` ids, fewer if the text is small.

    Memory grows with the number of distinct words in `pieces`. Raises UsageError for a vocabulary below the bytes' own.
    """
    if vocab_size < SMALLEST_BPE_VOCABULARY:
        raise UsageError(
            f"--vocab-size is {vocab_size}; a BPE tokenizer needs {SMALLEST_BPE_VOCABULARY} or more: every byte, and "
            "the end of text."
        )
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(pieces, trainer)
    return Tokenizer(library)


def describe_characters(characters: str, most: int = 10) -> str:
    """For an error message: each with its code point."""
    named = [f"{c!r} (U+{ord(c):04X})" for c in characters[:most]]
    more = len(characters) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _character_table(layout: dict[str, Any]) -> np.ndarray | None:
    """From code point to id, -1 where there is none; `None` if the tokenizer is not one id a character."""
    model = layout["model"]
    if model["type"] != "BPE" or model["merges"] or layout["pre_tokenizer"] or layout["normalizer"]:
        return None
    if model.get("byte_fallback") or model.get("unk_token") or not all_special(layout):
        return None
    special = {token["content"] for token in layout["added_tokens"]}
    characters = {token: i for token, i in model["vocab"].items() if token not in special}
    if not all(len(token) == 1 for token in characters):
        return None
    table = np.full(max(map(ord, characters), default=0) + 1, -1, dtype=np.int32)
    for character, i in characters.items():
        table[ord(character)] = i
    return table


def _always_splits(before: str, after: str) -> bool:
    """Whether the byte-level pattern splits between two characters whatever stands around them.

    It does before white space that follows something else, and after a letter or a digit that something of another kind
    follows. Characters that some Unicode versions do not know are left alone.
    """
    if after in " \n\t\r":
        return not before.isspace()
    return _kind(before) in ("L", "N") and _kind(after) in ("L", "N", "P", "S") and _kind(before) != _kind(after)


def _kind(character: str) -> str:
    return unicodedata.category(character)[0]
