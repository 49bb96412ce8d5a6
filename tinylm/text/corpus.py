"""From files, folders and standard input to one stream of text.

A stream is pieces of text, so that a file larger than memory can be read, with `None` between two documents. A file is
one document; of JSONL, of a JSON array and of the format `lines`, each element or line is one. Documents without text
are left out.
"""

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from tinylm.errors import TinyLMError, UsageError
from tinylm.text.compression import PIECE_BYTES, SPOOL_FILE, Advance, ignore, shown
from tinylm.text.readers import FORMATS, is_json_file, json_records, numbered_lines, read_text, text_of_record
from tinylm.text.selection import LeftOut, Rules, check_named, expand_patterns, text_files_below

STANDARD_INPUT = "-"
SAMPLE_PIECE = 1 << 10  # characters
SAMPLE_PIECES = 1 << 7

Stream = Iterator[str | None]


@dataclass(frozen=True)
class Corpus:
    """Text files in a fixed order. `paths` are what the user named; `text_key` is the field of a JSONL line to read.

    `left_out` is what the folders among the paths hold besides. `known_part(text)` is what is read of a piece of text;
    without it, everything is.
    """

    paths: tuple[str, ...]
    files: tuple[Path, ...]
    text_key: str = "text"
    encoding: str = "utf-8"
    format: str = "auto"
    left_out: tuple[LeftOut, ...] = ()
    known_part: Callable[[str], str] | None = None

    finds_json: ClassVar[bool] = False  # whether JSON is found by the content, whatever the file's name

    def stream(self, advance: Advance = ignore) -> Stream:
        """All the text, in order. `advance` is called with the bytes read from the disk.

        Raises UsageError for a byte that is not valid in the encoding, for damaged compressed data and for a malformed
        line of JSONL.
        """
        begun = False
        for document in self._documents(advance):
            separated = False
            for piece in document:
                if self.known_part is not None:
                    piece = self.known_part(piece)
                if not piece:
                    continue
                if begun and not separated:
                    yield None
                begun = separated = True
                yield piece

    def _documents(self, advance: Advance) -> Iterator[Iterable[str]]:
        for file in self.files:
            pieces = read_text(file, self.encoding, advance)
            if self.is_json(file):
                for place, record in json_records(pieces, shown(file)):
                    yield [text_of_record(record, place, self.text_key)]
            elif self.format == "lines":
                yield from ([line.removesuffix("\r")] for _, line in numbered_lines(pieces, shown(file)))
            else:
                yield pieces

    def is_json(self, file: Path) -> bool:
        """Whether the file is read as JSONL or as an array of JSON."""
        return self.format == "jsonl" or (self.format == "auto" and is_json_file(file))

    @property
    def has_json(self) -> bool:
        """Whether there is a file for `text_key` to have a meaning in."""
        return any(map(self.is_json, self.files))

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
    format: str = "auto",
) -> Corpus:
    """The text files among and below the paths. Standard input (-) is first copied into the folder `spool`.

    A path may be a pattern such as texts/*.txt. Of a folder, what is hidden, empty or binary is left out and recorded.
    Raises UsageError for a missing path, a folder without text, a file that is binary or text in another encoding, JSON
    that would be read as plain text, and for an encoding or a format that does not exist.
    """
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        raise UsageError(f"--encoding {encoding!r} is not known; try utf-8, utf-16, latin-1 or cp1252.") from None
    if format not in FORMATS:
        raise UsageError(f"--format is {format!r}; it must be one of: {', '.join(FORMATS)}.")
    paths = tuple(paths)
    if paths.count(STANDARD_INPUT) > 1:
        raise UsageError("Standard input (-) is named twice, and can be read once; leave one out.")
    rules = Rules(encoding, format, evident_json=not kind.finds_json)
    files: list[Path] = []
    left_out: list[LeftOut] = []
    for name in expand_patterns(paths):
        path = Path(name)
        if name == STANDARD_INPUT and spool is not None:
            path = _spool_standard_input(spool)
        if path.is_dir():
            found, others = text_files_below(path, rules)
            files += found
            left_out += others
        elif path.is_file():
            check_named(path, rules)
            files.append(path)
        elif path.exists():
            raise UsageError(f"{name} is a pipe or a device, which cannot be read twice; send it to - instead.")
        else:
            raise UsageError(f"There is no file or folder {name!r}; check the path, or use - for standard input.")
    return kind(paths, tuple(files), text_key, encoding, format, tuple(left_out))


def _spool_standard_input(folder: Path) -> Path:
    """A file of what comes, so that it can be read more than once."""
    file = folder / SPOOL_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as target:  # follows no link
            shutil.copyfileobj(sys.stdin.buffer, target, PIECE_BYTES)
    except OSError as error:
        raise TinyLMError(f"Cannot keep standard input in {folder}: {error.strerror}; free some space.") from error
    return file


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
