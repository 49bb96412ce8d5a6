"""Character and byte-level BPE tokenizers, stored as tokenizer.json in the format of the `tokenizers` library.

Character tokenizers encode text with a numpy table, and byte-level BPE tokenizers with gigatoken if it is usable. Both
are faster than the library and give the same ids. Other tokenizers encode with the library.
"""

import functools
import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tinylm.config.run import SpecialTokens
from tinylm.errors import TinyLMError, UsageError
from tinylm.system.files import read_text
from tinylm.system.process_signals import interruptible
from tinylm.text.files import code_points
from tinylm.text.tokenizer_file import TokenizerSpec, token_ids, validate_tokenizer
from tinylm.text.tokenizer_libraries import (
    GigatokenBPE,
    TokenizerLibraryError,
    added_tokens_are_special,
    byte_alphabet,
    is_byte_level_bpe,
    wrap_library_errors,
)

END_OF_TEXT = "<|endoftext|>"
MASK = "<mask>"
LITERAL = "\ufdd2"  # a Unicode noncharacter; with it after its first character, a special token is encoded as text

COUNT_CHUNK = 1 << 20  # ids counted at a time, since np.bincount converts them to int64
MAX_LISTED = 10  # characters listed in a message
MIN_BPE_VOCAB_SIZE = 257  # the 256 bytes and the end-of-text token
# Bytes of a longer word are separate words for the trainer, which takes quadratic time in the length of a word. Longer
# tokens are useless; 128 bytes are 42 Chinese characters.
MAX_TRAINED_WORD = 128
# Characters of a word that are encoded together: gigatoken takes 0.4 s for them, and holds the interpreter lock.
MAX_ENCODED_WORD = 1 << 19
SPLIT_SEARCH = 1 << 12  # characters at the end of a text in which a safe split point is searched
PROBED_TOKENS = 64  # per text that two tokenizers are compared on
# Contractions, runs of digits, of blanks and of line breaks, underscores, ligatures, marks and several scripts.
PROBE = (
    "It's IT'S we'll 1 12 123 1234567 1,234.5 a1b2\t\tx  y   z \n\n  \n\r\n(a)[b]... !?-- snake_case HTTPServer "
    "\u00a0\u3000\u00c0 e\u0301 \ufb01 \uff21 \u01c5 \u6771\u4eac \u0e2a\u0e27\u0e31 \u0928\u092e\u0938\u094d\u0924 "
    "\u00bd \u0663 \U0001f469\u200d\U0001f4bb"
)
LONG_TEXT = 1 << 16  # characters; the library encodes longer texts without the interpreter lock


class Tokenizer:
    """A tokenizer of the `tokenizers` library.

    kind: "char", "bpe" (byte-level BPE with GPT-2's pre-tokenizer), or "other" for any other tokenizer.json.
    vocab_size: the largest id plus one. decoder_steps: the steps of the decoder in tokenizer.json; none if it joins the
    tokens with spaces. special: the special tokens; all but the padding token must be in the vocabulary, except that
    <|endoftext|> is added if it is missing. end_of_text_id: separates documents. stop_ids: end generated text.
    start_id: the BOS token; `None` for none. bos_id: the same if it begins each document, else `None`.
    sha256: hash of `to_str()`, and of `special` unless it is the default, in hexadecimal.

    `encode` encodes the name of a special token as ordinary text. Raises TinyLMError if two tokens have the same id,
    and for a special token other than the padding token without an id.
    """

    def __init__(self, library: tokenizers.Tokenizer, special: SpecialTokens = SpecialTokens()) -> None:  # noqa: B008, frozen
        if library.token_to_id(END_OF_TEXT) is None and special.end_of_text == END_OF_TEXT:
            library.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        library.encode_special_tokens = True
        library.no_truncation()
        library.no_padding()
        self._library = library
        vocabulary = library.get_vocab()
        if len(set(vocabulary.values())) < len(vocabulary):
            raise TinyLMError("two of its tokens have the same id; give each token an id of its own")
        self.special = special
        self.end_of_text_id = _special_id(vocabulary, special.end_of_text)
        self.stop_ids = frozenset(_special_id(vocabulary, token) for token in special.stops)
        self.start_id = None if special.bos is None else _special_id(vocabulary, special.bos)
        self.bos_id = self.start_id if special.add_bos else None
        self.vocab_size = 1 + max(vocabulary.values())  # not the number of tokens: ids may have gaps
        file = self.to_str()
        identity = file + (json.dumps(asdict(special)) if special != SpecialTokens() else "")
        self.sha256 = hashlib.sha256(identity.encode()).hexdigest()
        spec = json.loads(file)
        self.decoder_steps = _flat_steps(spec["decoder"])
        self._table = _character_table(spec)
        self._gigatoken = GigatokenBPE(spec) if self._table is None and is_byte_level_bpe(spec) else None
        self.kind = "char" if self._table is not None else "bpe" if self._gigatoken is not None else "other"
        pre_tokenizer = spec["pre_tokenizer"] or {"use_regex": False}
        self._splits_at_spaces = bool(pre_tokenizer.get("use_regex", True)) and added_tokens_are_special(spec)

    def has_ids_of(self, other: "Tokenizer") -> bool:
        """Whether another tokenizer gives the same ids to a text and to the ends and the beginnings of documents.

        Their files may differ, as those of a run and of its exports do: in steps without effect, in the notation of
        merges, and in the tokens that end generated text. So the vocabularies and the special tokens are compared, and
        the ids of texts of all tokens in random order and of PROBE, on which the usual pre-tokenizers differ.
        """
        if self.sha256 == other.sha256:
            return True
        one, two = (
            (
                *(tokenizer._library.get_vocab(), tokenizer.end_of_text_id, tokenizer.bos_id),
                *(set(tokenizer.added_tokens), set(tokenizer.control_tokens)),
            )
            for tokenizer in (self, other)
        )
        if one != two:
            return False
        # Each token next to random other ones, with and without spaces
        tokens = [self.decode([i]) for i in random.Random(0).sample(range(self.vocab_size), self.vocab_size)]
        starts = range(0, len(tokens), PROBED_TOKENS)
        probes = [separator.join(tokens[i : i + PROBED_TOKENS]) for separator in ("", " ") for i in starts]
        for text in [*probes, PROBE]:
            if self.kind == "char":
                text = text.translate(dict.fromkeys(map(ord, self.unknown_characters(text))))
            ids = self.encode(text)
            try:
                if not np.array_equal(ids, other.encode(text)) or self.decode(ids) != other.decode(ids):
                    return False
            except UsageError:  # characters without an id
                return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: the copy in another process uses the same encoder."""
        return _unpickle, (self.to_str(), self.special, self._gigatoken is None or self._gigatoken.usable)

    @classmethod
    def load(cls, path: Path, special: SpecialTokens = SpecialTokens()) -> "Tokenizer":  # noqa: B008, frozen
        """Load a tokenizer.json. Raises TinyLMError for a file that cannot be read, and as `parse` does."""
        try:
            text = read_text(path)
        except OSError as error:
            raise TinyLMError(f"Cannot read the tokenizer {path}: {error.strerror}.") from error
        except ValueError as error:
            raise _unusable(path, error) from error
        return cls.parse(text, special, path)

    @classmethod
    def parse(cls, text: str, special: SpecialTokens, source: Path) -> "Tokenizer":
        """Parse the content of a tokenizer.json. `source` is its path, for messages.

        Raises TinyLMError for text that is not a tokenizer, or that uses an unsupported feature (decision 021).
        """
        try:
            spec = validate_tokenizer(text)
            with wrap_library_errors():
                tokenizer = cls(tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False)), special)
            vocabulary = tokenizer._library.get_vocab()
            for token, i in token_ids(spec).items():  # the library numbers added tokens itself
                if (loaded := vocabulary.get(token)) != i:
                    raise ValueError(
                        f"its token {token[:60]!r} has the id {i} in the file, but {loaded} once it is loaded"
                    )
        except (ValueError, TinyLMError, TokenizerLibraryError) as error:
            raise _unusable(source, error) from error
        return tokenizer

    def merges(self) -> np.ndarray:
        """(V, 2): the ids of the two tokens that BPE merges into each token, -1 for a token that is not merged.

        All are -1 unless the kind is bpe.
        """
        parts = np.full((self.vocab_size, 2), -1)
        if self.kind != "bpe":
            return parts
        model = json.loads(self.to_str())["model"]
        ids = model["vocab"]
        for merge in model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            parts[ids[left + right]] = ids[left], ids[right]
        return parts

    def to_str(self) -> str:
        """The content of the tokenizer.json."""
        return str(self._library.to_str())

    def with_characters(self, characters: str) -> "Tokenizer":
        """Return a copy with ids for new characters, which follow the existing ids.

        Raises ValueError unless this is a character tokenizer.
        """
        if self._table is None:
            raise ValueError("characters can only be added to a character tokenizer")
        spec = json.loads(self.to_str())
        vocabulary: dict[str, int] = spec["model"]["vocab"]
        # Special tokens outside the vocabulary are added to it; the library would give them the ids of new characters.
        vocabulary |= {token["content"]: token["id"] for token in spec["added_tokens"]}
        vocabulary |= {character: i for i, character in enumerate(characters, start=self.vocab_size)}
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), self.special)

    def with_special_tokens(self, tokens: Sequence[str], eos: Sequence[str] | None = None) -> "Tokenizer":
        """Return a copy with `tokens` as special tokens, existing ones kept, and with `eos` as EOS tokens, if given."""
        library = tokenizers.Tokenizer.from_str(self.to_str())
        library.add_special_tokens([AddedToken(token, special=True) for token in tokens])
        return Tokenizer(library, self.special if eos is None else replace(self.special, eos=tuple(eos)))

    @property
    def mask_id(self) -> int:
        """The id of the mask token. Raises ValueError if there is no such token."""
        i = self._library.token_to_id(MASK)
        if i is None:
            raise ValueError("the tokenizer has no mask token")
        return int(i)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, (T,) of uint32.

        Raises UsageError for characters without an id in a character tokenizer, and TinyLMError if the `tokenizers`
        library fails.
        """
        if self._table is not None:
            codes = code_points(text)
            known = codes < len(self._table)
            character_ids = self._table[np.where(known, codes, 0)]
            if not known.all() or (character_ids < 0).any():
                characters = describe_characters(self.unknown_characters(text))
                raise UsageError(f"Unknown characters: {characters}. The model knows those of its training text only.")
            return character_ids.astype(np.uint32)
        if self._gigatoken is None:
            return self._encode_by_library(text)
        encoded, start = [np.zeros(0, dtype=np.uint32)], 0
        while start < len(text):
            part = text[start : start + MAX_ENCODED_WORD]
            if start + len(part) < len(text):  # cut at a safe split point, or else in a long word
                part = part[: self.safe_split_point(part) or len(part)]
            ids = self._gigatoken.encode(part)
            encoded.append(self._encode_by_library(part) if ids is None else ids)
            start += len(part)
        return np.concatenate(encoded)

    def _encode_by_library(self, text: str) -> np.ndarray:
        return np.array(self._encoding(self._library, text).ids, dtype=np.uint32)

    def _encoding(self, library: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        try:
            with wrap_library_errors():
                if len(text) <= LONG_TEXT:
                    return library.encode(text, add_special_tokens=False)
                # `encode` holds the interpreter lock, `encode_batch` does not.
                return interruptible(lambda: library.encode_batch([text], add_special_tokens=False)[0])
        except TokenizerLibraryError as error:
            raise TinyLMError(
                f"The tokenizer cannot encode the text ({error}). Use another tokenizer or another text."
            ) from error

    @functools.cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The special tokens, and other added tokens that are recognised before the text is split."""
        return tuple(token.content for token in self._library.get_added_tokens_decoder().values())

    @functools.cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """The added tokens that are special."""
        return tuple(self._special_tokens.values())

    def encode_with_special(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text in which special tokens are recognised, such as one that a chat template rendered.

        LITERAL is removed; a special token with LITERAL after its first character is encoded as ordinary text. Returns
        the ids, (N,) of uint32, and the index in `text` of the first character of each token, (N,) of int64. Raises
        UsageError and TinyLMError as `encode` does.
        """
        if self._table is None:
            encoding = self._encoding(self._literal_library if LITERAL in text else self._recognising_library, text)
            offsets = [start for start, _ in encoding.offsets]
            return np.array(encoding.ids, dtype=np.uint32), np.array(offsets, dtype=np.int64)
        ids, starts = [np.zeros(0, dtype=np.uint32)], [np.zeros(0, dtype=np.int64)]
        position = 0
        for part in re.split(f"({'|'.join(map(re.escape, sorted(self.added_tokens, key=len, reverse=True)))})", text):
            special = part in self.added_tokens
            kept = np.zeros(1, dtype=np.int64) if special else np.flatnonzero(code_points(part) != ord(LITERAL))
            ids.append(
                np.array([self._library.token_to_id(part)]) if special else self.encode(part.replace(LITERAL, ""))
            )
            starts.append(position + kept)
            position += len(part)
        return np.concatenate(ids).astype(np.uint32), np.concatenate(starts)

    @functools.cached_property
    def _recognising_library(self) -> tokenizers.Tokenizer:
        """A copy of the library's tokenizer that recognises special tokens in texts.

        It has no post-processor, which may exclude a token's leading spaces from its offsets.
        """
        spec = json.loads(self.to_str())
        return tokenizers.Tokenizer.from_str(json.dumps({**spec, "post_processor": None}, ensure_ascii=False))

    @functools.cached_property
    def _literal_library(self) -> tokenizers.Tokenizer:
        """A copy that recognises special tokens, and then removes LITERAL from the text."""
        spec = json.loads(self._recognising_library.to_str())
        remove = {"type": "Replace", "pattern": {"String": LITERAL}, "content": ""}
        spec["normalizer"] = {"type": "Sequence", "normalizers": [remove, *filter(None, [spec["normalizer"]])]}
        for token in spec["added_tokens"]:  # match special tokens before the normalizer removes LITERAL
            token["normalized"] &= not token["special"]
        return tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))

    def encode_with_starts(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of a text, and the offset in UTF-8 bytes of each token: (T,) of uint32 and (T,) of int64.

        With a tokenizer of the kind "other", tokens inside a character begin where the character does.
        """
        if self.kind != "other":
            ids = self.encode(text)
            ends = np.cumsum(self._token_sizes[1][ids], dtype=np.int64)
            return ids, np.concatenate(([0], ends[:-1])) if len(ids) else ends
        encoding = self._encoding(self._plain_library, text)
        codes = code_points(text)
        sizes = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)  # in UTF-8
        first_bytes = np.concatenate(([0], np.cumsum(sizes)))
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        return np.array(encoding.ids, dtype=np.uint32), first_bytes[starts]

    @functools.cached_property
    def _plain_library(self) -> tokenizers.Tokenizer:
        """A copy without a post-processor, which encodes the names of special tokens as ordinary text."""
        library = tokenizers.Tokenizer.from_str(self._recognising_library.to_str())
        library.encode_special_tokens = True
        return library

    @property
    def encoder(self) -> str:
        """The name of the encoder: "table", or a package with its version. Part of the key of token folders."""
        if self._table is not None:
            return "table"
        gigatoken = self._gigatoken.encoder if self._gigatoken is not None else None
        return gigatoken or f"tokenizers {tokenizers.__version__}"

    @property
    def encoder_with_special(self) -> str:
        """The name of the encoder of `encode_with_special`."""
        return "table" if self._table is not None else f"tokenizers {tokenizers.__version__}"

    def check_encoder(self, sample: Iterable[str]) -> bool:
        """Whether the encoder returns the same ids as the `tokenizers` library for each text of the sample.

        From the first difference on, this tokenizer encodes with the library, which is slower. Raises TinyLMError if
        the library fails.
        """
        return self._gigatoken is None or self._gigatoken.matches(sample, self._encode_by_library)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises TinyLMError if the library fails."""
        try:
            with wrap_library_errors():
                return str(self._library.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))
        except TokenizerLibraryError as error:
            raise TinyLMError(f"The tokenizer cannot decode the tokens ({error}). Use another tokenizer.") from error

    @functools.cached_property
    def token_bytes(self) -> "TokenBytes | None":
        """The bytes of each id, for a decoder that joins the bytes of all tokens; `None` for other decoders."""
        kinds = [step["type"] for step in self.decoder_steps]
        return TokenBytes(self, byte_level=kinds == ["ByteLevel"]) if kinds in (["ByteLevel"], ["Fuse"]) else None

    def decoded_token(self, i: int) -> str | None:
        """The token of an id, as the decoder receives it; `None` for a special token and for an id without a token."""
        return None if i in self._special_tokens else self._library.id_to_token(i)

    @functools.cached_property
    def _special_tokens(self) -> dict[int, str]:
        """The special tokens by their ids."""
        added = self._library.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special}

    def decoded_size(self, ids: Sequence[int] | np.ndarray, document_end: str = "") -> tuple[int, int]:
        """The number of characters and of UTF-8 bytes that the ids, (N,), decode to, where each end-of-text id stands
        for `document_end`.

        An incomplete character at either end of the ids counts if the ids contain its first byte. With a tokenizer of
        the kind "other", the ids are decoded, as by `decode`. Raises TinyLMError if the library fails.
        """
        if document_end:
            ends = int(np.count_nonzero(np.asarray(ids) == self.end_of_text_id))
            characters, size = self.decoded_size(ids)
            return characters + ends * len(document_end), size + ends * len(document_end.encode())
        if self.kind == "other":
            ids = np.asarray(ids)  # by document, since the decoder may drop the space that each begins with
            parts = np.split(ids, np.flatnonzero(ids == self.end_of_text_id))
            texts = [self.decode(part) for part in parts if len(part)]
            return sum(map(len, texts)), sum(len(text.encode()) for text in texts)
        ids = np.asarray(ids, dtype=None if len(ids) else np.int64)
        if len(ids) < self.vocab_size:
            return int(self._token_sizes[0][ids].sum()), int(self._token_sizes[1][ids].sum())
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for start in range(0, len(ids), COUNT_CHUNK):
            counts += np.bincount(ids[start : start + COUNT_CHUNK], minlength=self.vocab_size)
        characters, size = (int(counts @ sizes) for sizes in self._token_sizes)
        return characters, size

    @functools.cached_property
    def _token_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Characters and bytes per id: two arrays of (V,). A character counts for the id with its first byte."""
        token_bytes = TokenBytes(self, byte_level=True) if self._gigatoken is not None else self.token_bytes
        tokens = [self.decode([i]).encode() if token_bytes is None else token_bytes[i] for i in range(self.vocab_size)]
        characters = [sum(byte & 0xC0 != 0x80 for byte in token) for token in tokens]
        return np.array(characters), np.array([len(token) for token in tokens])

    def unknown_characters(self, text: str) -> str:
        """The distinct characters of the text that have no id, in order of appearance.

        With a tokenizer of the kind "other", a character is unknown if it encodes to no id, unless it is white space,
        which such tokenizers may drop by design.
        """
        characters = "".join(dict.fromkeys(text))
        if self._gigatoken is not None:
            return ""
        if self._table is None:
            return "".join(c for c in characters if not c.isspace() and not len(self.encode(c)))
        table = self._table
        return "".join(c for c in characters if ord(c) >= len(table) or table[ord(c)] < 0)

    def safe_split_point(self, text: str) -> int:
        """The length of a prefix that can be encoded separately without changing any id, or 0 if there may be none.

        Only the last SPLIT_SEARCH characters are searched, so that a text of one long word takes no quadratic time.
        This holds for any continuation of `text`. With a tokenizer of the kind "other", it holds if its pre-tokenizer
        splits before each space that follows another character, as those of most such tokenizers do.
        """
        if self._table is not None:
            return len(text)
        if not self._splits_at_spaces:
            return 0
        for end in range(len(text) - 1, max(0, len(text) - SPLIT_SEARCH), -1):
            if self._gigatoken is not None:
                splits = _always_splits(text[end - 1], text[end])
            else:  # not checked: Digits, Punctuation or Split, for example, need not split here
                splits = text[end] == " " and not text[end - 1].isspace()
            if splits:
                return end
        return 0


class TokenBytes(dict[int, bytes]):
    """The bytes that each id adds to a text, computed at first use; none for special tokens."""

    def __init__(self, tokenizer: Tokenizer, *, byte_level: bool) -> None:
        """byte_level: whether the characters of a token stand for bytes, as in byte-level BPE."""
        self._tokenizer = tokenizer
        self._byte_of = dict(byte_alphabet()) if byte_level else {}

    def __missing__(self, i: int) -> bytes:
        token = self._tokenizer.decoded_token(i) or ""
        try:
            self[i] = bytes(self._byte_of[character] for character in token)
        except KeyError:  # as the library does with a token that has another character
            self[i] = token.encode()
        return self[i]


def _unusable(source: Path, error: Exception) -> TinyLMError:
    return TinyLMError(f"Cannot use {source} as a tokenizer: {error}. Restore the file, or use another tokenizer.")


def _special_id(vocabulary: dict[str, int], token: str) -> int:
    if token not in vocabulary:
        raise TinyLMError(f"its special token {token[:60]!r} is not in the vocabulary")
    return vocabulary[token]


def _flat_steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [step] if step["type"] != "Sequence" else [flat for part in step["decoders"] for flat in _flat_steps(part)]


def train_char(alphabet: str, special: Sequence[str] = ()) -> Tokenizer:
    """Return a character tokenizer: id 0 is the end-of-text token, and id n the n-th character of `alphabet`.

    The ids of the other special tokens, `special`, follow. The tokenizer is stored as a BPE model without merges, with
    which the library encodes faster than with a WordLevel model.
    """
    vocabulary = {END_OF_TEXT: 0, **{character: i for i, character in enumerate(alphabet, start=1)}}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken(token, special=True) for token in (END_OF_TEXT, *special)])
    return Tokenizer(library)


def train_bpe(
    chunks: Iterable[str],
    vocab_size: int,
    special: Sequence[str] = (),
    waiting: Callable[[int], object] = lambda seconds: None,
) -> Tokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016; Radford et al. 2019) on chunks of text.

    The tokenizer has `vocab_size` ids, or fewer if the text has too few distinct pairs to merge, and no token of more
    than MAX_TRAINED_WORD bytes. `special` are special tokens besides the end-of-text token. `waiting` is called as by
    `interruptible`. Memory grows with the number of distinct words in `chunks`.

    Raises UsageError for a `vocab_size` below MIN_BPE_VOCAB_SIZE plus the number of `special` tokens.
    """
    if vocab_size < MIN_BPE_VOCAB_SIZE + len(special):
        raise UsageError(
            f"`vocab_size` is {vocab_size}; a BPE tokenizer needs {MIN_BPE_VOCAB_SIZE + len(special)} or more: 256 "
            f"bytes and {', '.join(('the end-of-text token', *special))}."
        )
    library = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(length=MAX_TRAINED_WORD)])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    interruptible(lambda: library.train_from_iterator(chunks, trainer), waiting)
    library.pre_tokenizer = words
    return Tokenizer(library)


def _unpickle(file: str, special: SpecialTokens, fast: bool) -> Tokenizer:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(file), special)
    if not fast and tokenizer._gigatoken is not None:
        tokenizer._gigatoken.usable = False
    return tokenizer


def describe_characters(characters: str) -> str:
    """The first MAX_LISTED characters with their code points: 'é' (U+00E9), 'ü' (U+00FC) and 3 more."""
    listed = [f"{c!r} (U+{ord(c):04X})" for c in characters[:MAX_LISTED]]
    more = len(characters) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "")


def _character_table(spec: TokenizerSpec) -> np.ndarray | None:
    """The id of each code point, or -1: (largest code point + 1,) of int32; `None` if it has other tokens."""
    model = spec["model"]
    if model["type"] != "BPE" or model["merges"] or spec["pre_tokenizer"] or spec["normalizer"]:
        return None
    if model.get("byte_fallback") or model.get("unk_token") or not added_tokens_are_special(spec):
        return None
    special = {token["content"] for token in spec["added_tokens"]}
    characters = {token: i for token, i in model["vocab"].items() if token not in special}
    if not all(len(token) == 1 for token in characters):
        return None
    table = np.full(max(map(ord, characters), default=0) + 1, -1, dtype=np.int32)
    for character, i in characters.items():
        table[ord(character)] = i
    return table


def _always_splits(before: str, after: str) -> bool:
    """Whether GPT-2's pre-tokenizer splits between two adjacent characters, whatever is around them.

    It splits between a character that is not white space and following white space, and between a letter or number and
    a following letter, number, punctuation mark or symbol of another category. Returns False for all other pairs: the
    category of an unassigned character, for example, depends on the Unicode version.
    """
    if after in " \n\t\r":
        return not before.isspace()
    one, other = (unicodedata.category(character)[0] for character in (before, after))
    return one in "LN" and other in "LNPS" and one != other
