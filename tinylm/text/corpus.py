"""From files, folders and JSONL to one stream of text.

A stream is pieces of text, so that a file larger than memory can be read, with `None` between two documents. A file is
one document, a line of JSONL is one. Documents without text are left out.
"""

import codecs
import hashlib
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tinylm.errors import TinyLMError, UsageError

PIECE_BYTES = 1 << 20
STANDARD_INPUT = "-"
SPOOL_FILE = "standard input"
SAMPLE_PIECE = 1 << 10  # characters
SAMPLE_PIECES = 1 << 7
JSONL_SUFFIXES = (".jsonl", ".ndjson")

Stream = Iterator[str | None]


@dataclass(frozen=True)
class Corpus:
    """Text files in a fixed order. `paths` are what the user named; `text_key` is the field of a JSONL line to read."""

    paths: tuple[str, ...]
    files: tuple[Path, ...]
    text_key: str = "text"
    encoding: str = "utf-8"

    def stream(self) -> Stream:
        """All the text, in order.

        Raises UsageError for a byte that is not valid in the encoding and for a malformed line of JSONL.
        """
        begun = False
        for document in self._documents():
            separated = False
            for piece in document:
                if begun and not separated:
                    yield None
                begun = separated = True
                yield piece

    def _documents(self) -> Iterator[Iterable[str]]:
        for file in self.files:
            if file.suffix.lower() in JSONL_SUFFIXES:
                yield from ([text] for text in _read_jsonl(file, self.text_key, self.encoding) if text)
            else:
                yield _read_text(file, self.encoding)

    def whole(self, characters: int) -> int:
        """How many characters, of so many, may be cut off the front: text may be cut anywhere."""
        return characters

    @property
    def name(self) -> str:
        """For messages."""
        return ", ".join("standard input" if path == STANDARD_INPUT else path for path in self.paths)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)


def find_corpus(
    paths: Iterable[str],
    text_key: str = "text",
    encoding: str = "utf-8",
    spool: Path | None = None,
    kind: "type[Corpus]" = Corpus,
) -> Corpus:
    """The text files among and below the paths. Standard input (-) is first copied into the folder `spool`.

    In a folder, hidden files and files that are not text (a zero byte, or invalid in the encoding, near their
    beginning) are passed over. Raises UsageError for a missing path, a folder without text and an encoding that Python
    does not know.
    """
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        raise UsageError(f"--encoding {encoding!r} is not known; try utf-8, utf-16, latin-1 or cp1252.") from None
    paths = tuple(paths)
    if paths.count(STANDARD_INPUT) > 1:
        raise UsageError("Standard input (-) is named twice, and can be read once; leave one out.")
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if name == STANDARD_INPUT and spool is not None:
            files.append(_spool_standard_input(spool))
        elif path.is_dir():
            found = [file for file in _files_below(path) if _looks_like_text(file, encoding)]
            if not found:
                raise UsageError(f"The folder {path} has no text files in it; name one that has, or a file.")
            files += found
        elif path.is_file():
            files.append(path)
        elif path.exists():
            raise UsageError(f"{name} is a pipe or a device, which cannot be read twice; send it to - instead.")
        else:
            raise UsageError(f"There is no file or folder {name!r}; check the path, or use - for standard input.")
    return kind(paths, tuple(files), text_key, encoding)


def _spool_standard_input(folder: Path) -> Path:
    """A file of what comes, so that it can be read more than once."""
    file = folder / SPOOL_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as target:
            shutil.copyfileobj(sys.stdin.buffer, target, PIECE_BYTES)
    except OSError as error:
        raise TinyLMError(f"Cannot keep standard input in {folder}: {error.strerror}; free some space.") from error
    return file


def _files_below(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _looks_like_text(file: Path, encoding: str) -> bool:
    try:
        with file.open("rb") as stream:
            head = stream.read(8192)
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {error.strerror}.") from error
    if not head or (b"\0" in head and not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))):
        return False
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeError:
        return False
    return True


def _read_text(file: Path, encoding: str) -> Iterator[str]:
    """Pieces of a file's text. Line ends are kept as they are; a byte-order mark is dropped."""
    decoder = codecs.getincrementaldecoder(encoding)()
    offset = 0
    begun = False
    try:
        with file.open("rb") as stream:
            while data := stream.read(PIECE_BYTES):
                pending = len(decoder.getstate()[0])
                text = _decode(decoder, data, False, file, offset - pending, encoding)
                offset += len(data)
                if not begun and text:
                    text, begun = text.removeprefix("\ufeff"), True
                if text:
                    yield text
            pending = len(decoder.getstate()[0])
            _decode(decoder, b"", True, file, offset - pending, encoding)
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {error.strerror}.") from error


def _decode(
    decoder: codecs.IncrementalDecoder, data: bytes, final: bool, file: Path, offset: int, encoding: str
) -> str:
    try:
        return decoder.decode(data, final)
    except UnicodeError as error:  # utf-16 without a byte-order mark is not even a UnicodeDecodeError
        raise _invalid_bytes(file, offset + getattr(error, "start", 0), encoding) from None


def _invalid_bytes(file: Path, offset: int, encoding: str) -> UsageError:
    return UsageError(
        f"{shown(file)} is not valid {encoding} at byte {offset}; mend that byte, or name the file's encoding with "
        "--encoding."
    )


def shown(file: Path) -> str:
    return file.name if file.name == SPOOL_FILE else str(file)


def _read_jsonl(file: Path, text_key: str, encoding: str) -> Iterator[str]:
    for number, line in numbered_lines(file, encoding):
        yield _text_of_line(line, f"{shown(file)}, line {number}", text_key)


def numbered_lines(file: Path, encoding: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank. A line ends at a line feed, in whatever encoding, and nowhere else."""
    number, held = 0, ""
    for piece in itertools.chain(_read_text(file, encoding), ["\n"]):
        *lines, held = (held + piece).split("\n")
        for line in lines:
            number += 1
            if line.strip():
                yield number, line


def parse_json_line(line: str, place: str) -> Any:
    """Raises UsageError, naming the place, for what is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, and nesting as deep
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise UsageError(f"{place}: not JSON ({reason}); each line must be one JSON object.") from None


def _text_of_line(line: str, place: str, text_key: str) -> str:
    record = parse_json_line(line, place)
    if not isinstance(record, dict) or text_key not in record:
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise UsageError(f"{place}: no text under {text_key!r} (found: {keys}); name the field with --text-key.")
    text = record[text_key]
    if not isinstance(text, str):
        raise UsageError(
            f"{place}: under {text_key!r} is {json.dumps(text)[:40]}, which is not a text; mend it, or name another "
            "field with --text-key."
        )
    return require_characters(text, place)


def require_characters(text: str, place: str) -> str:
    """The text; raises UsageError when it has half a surrogate pair, which JSON can spell, in it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place}: half a surrogate pair at character {error.start} of the text; mend it.") from None
    return text


@dataclass(frozen=True)
class Scan:
    """What one pass over a stream found. `alphabet` is its characters, sorted; bytes are of UTF-8.

    `sample` is up to 128 parts of the text of at most 1,024 characters, evenly spread from its beginning on.
    """

    characters: int
    bytes: int
    documents: int
    alphabet: str
    fingerprint: str
    sample: tuple[str, ...] = field(default=(), compare=False)  # depends on where the stream's pieces end


def scan(stream: Stream) -> Scan:
    """Count the text, gather its characters and hash it. The hash sees where documents end."""
    seen = np.zeros(0x110000, dtype=bool)
    digest = hashlib.sha256()
    characters = size = separators = 0
    sample: list[str] = []
    stride = SAMPLE_PIECE  # characters from the beginning of one piece of the sample to that of the next
    for piece in stream:
        if piece is None:
            separators += 1
            digest.update(b"\xff")  # in no UTF-8 text, so that no text can imitate it
            continue
        data = piece.encode()
        digest.update(data)
        size += len(data)
        for start in range(-characters % stride, len(piece), stride):
            sample.append(piece[start : start + SAMPLE_PIECE])
        while len(sample) > SAMPLE_PIECES:
            del sample[1::2]
            stride *= 2
        characters += len(piece)
        seen[code_points(piece)] = True
    alphabet = "".join(map(chr, np.flatnonzero(seen)))
    documents = separators + 1 if characters else 0
    return Scan(characters, size, documents, alphabet, digest.hexdigest(), tuple(sample))


def code_points(text: str) -> np.ndarray:
    """The text's characters as numbers: (len(text),) of uint32."""
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def cut(stream: Stream, start: int, stop: int) -> Stream:
    """The part of a stream from character `start` up to `stop`, separators not counted."""
    position = 0
    begun = owes_separator = False
    for piece in stream:
        if piece is None:
            owes_separator = begun
            continue
        part = piece[max(start - position, 0) : max(stop - position, 0)]
        position += len(piece)
        if part:
            if owes_separator:
                yield None
            begun, owes_separator = True, False
            yield part
        if position >= stop:
            return


def rechunk(stream: Stream, split_point: Callable[[str], int], limit: int) -> Stream:
    """The same stream in pieces that end only at the end of a document or where `split_point` allows.

    `split_point(text)` is how much of the text may be cut off its front, 0 for nothing yet. Text in which it finds no
    place is cut anyway once it is longer than `limit` characters, to bound memory.
    """
    held = ""
    for piece in stream:
        if piece is None:
            if held:
                yield held
                held = ""
            yield None
            continue
        held += piece
        while end := split_point(held) or (len(held) if len(held) > limit else 0):
            yield held[:end]
            held = held[end:]
    if held:
        yield held
