"""Find the files of a corpus and read them as one stream of text.

A stream yields chunks of text, so that files larger than memory can be read, and `None` between two documents. A
document is a line of JSONL, an element of a JSON array, a row of Parquet or of CSV with the column of the text, a line
of a file with the format "lines", or else a whole file. Empty documents are skipped. Lines of documents end with a line
feed, whatever ends them in the files.
"""

import contextlib
import hashlib
import io
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tinylm.config.settings import FORMATS
from tinylm.config.validation import check_choice, require
from tinylm.errors import BadFilesError, UsageError
from tinylm.text.chat_format import ChatFormat
from tinylm.text.file_selection import BAD, FileRules, SkippedFile, describe_problems, find_files
from tinylm.text.files import STANDARD_INPUT, Progress, code_points, display_name, no_progress
from tinylm.text.readers import (
    decoded_chunks,
    is_json_file,
    is_parquet,
    is_table,
    numbered_lines,
    parquet_columns,
    records,
    refuse_keys,
    refused_in_texts,
    table_columns,
    text_of_record,
)

EXCERPT_CHARACTERS = 1 << 10  # length of an excerpt in `CorpusStats.sample`
MAX_EXCERPTS = 1 << 7
MAX_NAMED_RECORDS = 3
MAX_CHECKED_BYTES = 1 << 30  # of files that are read to their ends after an error, to list all that cannot be read

Stream = Iterator[str | None]  # chunks of text, and `None` between two documents


@dataclass(frozen=True)
class Corpus:
    """Text files in a fixed order, and how they are read.

    `paths` are the files, folders and patterns that the user named, and `files` the files found there that are read.
    `skipped` lists the files and subfolders that are not read, those that match a pattern of `exclude` and, with
    `skip_bad`, those that cannot be read included. `text_key` is the key of the text in a JSON object, or its column in
    Parquet, CSV and TSV. `encoding` is that of the files that have no byte-order mark and are not UTF-8. `format` is
    one of FORMATS. `drop_unknown` removes the unknown characters from a chunk of text; `None` keeps all. `labels` are
    those of the texts, in the order of their numbers, if they have any.
    """

    paths: tuple[str, ...]
    files: tuple[Path, ...]
    text_key: str = "text"
    encoding: str = "utf-8"
    format: str = "auto"
    skipped: tuple[SkippedFile, ...] = ()
    exclude: tuple[str, ...] = ()
    skip_bad: bool = False
    drop_unknown: Callable[[str], str] | None = None
    labels: tuple[str, ...] = ()
    # The number of carriage returns in the files, under this key; set by `stream`.
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)
    # The places of the first records that `drop_unknown` leaves without a text that they need.
    _left_out: dict[str, None] = field(default_factory=dict, init=False, repr=False, compare=False)

    kind: ClassVar[str] = "text"
    documents_per_record: ClassVar[int] = 1
    detects_json: ClassVar[bool] = False  # whether JSON is read as such in a file without a JSON suffix
    min_split: ClassVar[float] = math.inf  # records of which a part is for validation, however short the text is
    languages: ClassVar[int] = 1  # that each record has, so that a vocabulary needs room for all

    def stream(self, progress: Progress = no_progress) -> Stream:
        """Yield the text of all files in order.

        `progress` receives the number of bytes read from the disk.

        Raises UsageError for a file that cannot be read, for bytes that are not valid in the encoding, for damaged
        compressed data, for invalid JSON, for records without a text and, unless the `format` is jsonl, for those with
        a key that is refused.
        """
        self._counts.clear()

        def chunks() -> Stream:
            for document in self._documents(progress):
                yield None
                yield from document if self.drop_unknown is None else map(self.drop_unknown, document)

        return joined(chunks())

    def _documents(self, progress: Progress) -> Iterator[Iterable[str]]:
        """The text of each document, in chunks."""
        for file in self.files:
            name = display_name(file)
            if self.has_records(file):
                for location, record in self._records(file, [self.text_key], progress):
                    yield self._with_line_feeds([text_of_record(record, location, self.text_key)])
                continue
            chunks = self._with_line_feeds(decoded_chunks(file, self.encoding, progress))
            if self.format == "lines":
                for _, line in numbered_lines(chunks, name):
                    yield [line]
            else:
                yield chunks

    def _with_line_feeds(self, chunks: Iterable[str]) -> Iterator[str]:
        r"""Yield a text with \n in place of \r\n and of \r, which may be in two chunks, and count these."""
        decoder = io.IncrementalNewlineDecoder(None, translate=True)
        for chunk in chunks:
            self._counts["\r"] += chunk.count("\r")
            yield decoder.decode(chunk)
        yield decoder.decode("", final=True)

    def _records(self, file: Path, columns: Sequence[str], progress: Progress) -> Iterator[tuple[str, Any]]:
        """The `records` of a file. Unless the `format` is jsonl, raises UsageError for keys refused beside texts."""
        refused = {} if self.format == "jsonl" else refused_in_texts(self.text_key)
        for location, record in records(file, self.encoding, columns, progress, tuple(refused)):
            if isinstance(record, dict):
                refuse_keys(record, refused, location)
            yield location, record

    def scan(self, progress: Progress = no_progress) -> "CorpusStats":
        """The statistics of the stream. `progress` and errors as for `stream`; a BadFilesError is about all files that
        cannot be read. Raises UsageError if there is no text, or none with ids in the vocabulary.
        """
        try:
            stats = self._scan(progress)
        except BadFilesError as error:
            raise self.bad_files_error(str(error)) from None
        if not stats.characters and self.drop_unknown is not None:
            raise UsageError(f"None of the characters of {self.name} has an id in the vocabulary; give another text.")
        if not stats.characters:
            raise UsageError(f"{self.name} contains no text; give a file that does.")
        return stats

    def _scan(self, progress: Progress) -> "CorpusStats":
        return replace(scan_stream(self.stream(progress)), carriage_returns=self._counts["\r"])

    def bad_files_error(self, first: str = "") -> BadFilesError:
        """The error about all files that cannot be read, those found before included; `first` if no others are found.

        Files after the first MAX_CHECKED_BYTES are not checked.
        """
        bad = [file for file in self.skipped if file.reason == BAD]
        total = len(bad) + len(self.files)
        if self.skip_bad:  # all files have been checked
            checked, bad = total, [] if self.files else bad
        else:
            files, remaining = [], MAX_CHECKED_BYTES
            for file in self.files:
                with contextlib.suppress(OSError):  # of a file that has vanished, or cannot be read
                    remaining -= file.stat().st_size
                files += [file] if remaining >= 0 else []
            checked = len(bad) + len(files)
            bad = sorted([*bad, *self._bad_files(files)], key=lambda file: file.path)
        is_skippable = not self.skip_bad and total > max(1, len(bad))
        if len(bad) < 2:
            return BadFilesError(bad[0].problem if bad else first, is_skippable)
        encoding = any("`encoding`" in file.problem for file in bad)
        advice = "Name the encoding of texts that are not UTF-8 with `encoding`, correct" if encoding else "Correct"
        return BadFilesError(
            f"{len(bad):,} of {checked:,} files cannot be read: {describe_problems(bad)}. {advice} the files, or leave "
            "them out.",
            is_skippable,
        )

    def without_bad_files(self) -> "Corpus":
        """The corpus without the files that cannot be read to their ends, which are skipped."""
        bad = self._bad_files(self.files)
        paths = {file.path for file in bad}
        files = tuple(file for file in self.files if file not in paths)
        return replace(self, files=files, skipped=(*self.skipped, *bad))

    def _bad_files(self, files: Iterable[Path]) -> list[SkippedFile]:
        """Those of the files that cannot be read to their ends: damaged, in another encoding, or no valid JSON."""
        bad = []
        for file in files:
            try:
                if self.has_records(file):
                    columns = parquet_columns(file) if is_parquet(file) else ()
                    content: Iterable[Any] = records(file, self.encoding, columns, no_progress)
                else:
                    content = decoded_chunks(file, self.encoding, no_progress)
                for _ in content:
                    pass
            except UsageError as error:
                bad.append(SkippedFile(str(file.parent), file, BAD, problem=str(error)))
        return bad

    def _leave_out(self, location: str) -> None:
        if len(self._left_out) < MAX_NAMED_RECORDS:
            self._left_out[location] = None

    @property
    def left_out(self) -> list[str]:
        """The places of the first records that have been left out for unknown characters, at most MAX_NAMED_RECORDS."""
        return list(self._left_out)

    def has_records(self, file: Path) -> bool:
        """Whether the file is read as JSONL, a JSON array, Parquet, or CSV or TSV with the column `text_key`."""
        if self.format == "jsonl" or is_parquet(file):
            return True
        return self.format == "auto" and (
            is_json_file(file) or (is_table(file) and self.text_key in table_columns(file, self.encoding))
        )

    @property
    def is_records(self) -> bool:
        """Whether the corpus consists of records and not of continuous text: lines, JSON, Parquet, pairs, chats."""
        return self.kind != Corpus.kind or self.format == "lines" or all(map(self.has_records, self.files))

    @property
    def rendering(self) -> ChatFormat | None:
        """The format in which conversations are rendered; `None` for other texts."""
        return None

    def written_by_template(self, alphabet: str, unknown: str) -> str:
        """The characters of `unknown` that a template writes, and not the texts; `alphabet` as in CorpusStats."""
        return ""

    @property
    def name(self) -> str:
        """The paths, for a message."""
        return ", ".join("standard input" if path == STANDARD_INPUT else path for path in self.paths)

    @property
    def size(self) -> int:
        """Size of all files on the disk in bytes, before any decompression."""
        return sum(file.stat().st_size for file in self.files)


def as_corpus(corpus: Corpus, corpus_type: type[Corpus], **fields: Any) -> Corpus:
    """The files of a corpus, read as one of another type with further fields."""
    kept = {field.name: getattr(corpus, field.name) for field in dataclass_fields(Corpus) if field.init}
    return corpus_type(**{**kept, **fields})


@dataclass(frozen=True)
class RecordCorpus(Corpus):
    """A corpus whose records are encoded one by one, with what is scored in each of them."""

    detects_json: ClassVar[bool] = True

    def examples(self, progress: Progress = no_progress) -> Iterator[Any]:
        """Yield the documents as the input of their encoding; `documents_per_record` for each record."""
        raise NotImplementedError  # not abstract: `Corpus`, which is no ABC, makes its own instances

    def selected_examples(self, selected: Iterable[bool]) -> Iterator[Any]:
        """Yield the examples of the documents for which `selected` has True."""
        return itertools.compress(self.examples(), selected)


def find_corpus(
    paths: Iterable[str],
    text_key: str = "text",
    encoding: str = "utf-8",
    spool: Path | None = None,
    corpus_type: "type[Corpus]" = Corpus,
    format: str = "auto",
    accepted_keys: Iterable[frozenset[str]] = (),
    exclude: Iterable[str] = (),
    skip_bad: bool = False,
    **fields: Any,
) -> Corpus:
    """Find the text files at `paths`: files, folders with their subfolders, glob patterns, or - for standard input.

    Standard input is copied to the folder `spool`; without one it cannot be read. Hidden, empty and binary files in
    folders, among others, are skipped and listed in the result, which is a `corpus_type` with these further `fields`.
    exclude: patterns of names and paths of files and folders that are skipped. skip_bad: skip files that cannot be
    used; all are read to their ends to find them. accepted_keys: see FileRules.

    A file that has been found by another of the paths is skipped.

    Raises UsageError for a missing path, a folder without text, and an unknown encoding or format, BadFilesError for
    files that cannot be read, are binary or in another encoding, or contain JSON that would be read as plain text, and
    TinyLMError if standard input cannot be copied.
    """
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        raise UsageError(
            f"`encoding` is {encoding!r}, which is unknown; try utf-8, utf-16, latin-1 or cp1252."
        ) from None
    check_choice("format", format, FORMATS)
    paths, exclude = tuple(paths), tuple(exclude)
    require(bool(paths), "There is no text; name files or folders, or - for standard input.")
    if paths.count(STANDARD_INPUT) > 1:
        raise UsageError("Standard input (-) is named twice but can be read only once; leave one out.")
    rules = FileRules(encoding, format, not corpus_type.detects_json, tuple(accepted_keys), exclude)
    files, skipped = find_files(paths, rules, spool)
    corpus = corpus_type(paths, files, text_key, encoding, format, skipped, exclude, skip_bad, **fields)
    if skip_bad:
        corpus = corpus.without_bad_files()
    if any(file.reason == BAD for file in corpus.skipped) and not (skip_bad and corpus.files):
        raise corpus.bad_files_error()
    require(bool(corpus.files), f"`exclude` leaves no file of {corpus.name}; correct its patterns.")
    return corpus


@dataclass(frozen=True)
class CorpusStats:
    """Statistics of a stream of text.

    `bytes` is its size in UTF-8, `line_breaks` the number of its line breaks, `alphabet` its distinct characters,
    sorted, and `fingerprint` a SHA-256 of the text and of the document boundaries. `sample` contains up to MAX_EXCERPTS
    evenly spaced excerpts of at most EXCERPT_CHARACTERS characters. `carriage_returns` is the number of them in the
    files; the stream has line feeds in place of them.
    """

    characters: int
    bytes: int
    documents: int
    line_breaks: int
    alphabet: str
    fingerprint: str
    carriage_returns: int = 0
    sample: tuple[str, ...] = field(default=(), compare=False)  # depends on the chunks: excerpts end at their ends


def scan_stream(stream: Stream) -> CorpusStats:
    """The statistics of a stream, computed in one pass."""
    seen = np.zeros(0x110000, dtype=bool)
    digest = hashlib.sha256()
    characters = size = separators = line_breaks = 0
    sample: list[str] = []
    stride = EXCERPT_CHARACTERS  # characters between the starts of two excerpts
    for chunk in stream:
        if chunk is None:
            separators += 1
            digest.update(b"\xff")  # a byte that UTF-8 text does not contain
            continue
        data = chunk.encode()
        digest.update(data)
        size += len(data)
        for start in range(-characters % stride, len(chunk), stride):
            sample.append(chunk[start : start + EXCERPT_CHARACTERS])
        while len(sample) > MAX_EXCERPTS:
            del sample[1::2]
            stride *= 2
        characters += len(chunk)
        line_breaks += chunk.count("\n")
        seen[code_points(chunk)] = True
    alphabet = "".join(map(chr, np.flatnonzero(seen)))
    documents = separators + 1 if characters else 0
    return CorpusStats(characters, size, documents, line_breaks, alphabet, digest.hexdigest(), sample=tuple(sample))


def document_end(format: str) -> str:
    """What ends a document in a file of this format, and counts as text that is scored: a line break, or nothing."""
    return "\n" if format == "lines" else ""


def joined(stream: Stream) -> Stream:
    """Yield a stream without empty chunks, and with one `None` between two documents that are not empty."""
    started = is_separated = False
    for chunk in stream:
        if chunk is None:
            is_separated = started
        elif chunk:
            if is_separated:
                yield None
            started, is_separated = True, False
            yield chunk


def slice_stream(stream: Stream, start: int, stop: int) -> Stream:
    """Yield the characters of a stream from `start` up to `stop`. Document separators do not count as characters."""

    def parts() -> Stream:
        position = 0
        for chunk in stream:
            yield None if chunk is None else chunk[max(start - position, 0) : max(stop - position, 0)]
            position += len(chunk or "")
            if position >= stop:
                return

    return joined(parts())


def rechunk(stream: Stream, safe_split_point: Callable[[str], int], limit: int) -> Stream:
    """Yield the same stream in chunks that end at safe split points and at the ends of documents.

    `safe_split_point(text)` returns the length of a prefix that can be processed separately, or 0 if more text is
    needed. Text without a safe split point is cut after `limit` characters, to bound memory.
    """
    buffer = ""
    for chunk in stream:
        if chunk is None:
            if buffer:
                yield buffer
                buffer = ""
            yield None
            continue
        buffer += chunk
        while end := safe_split_point(buffer) or (limit if len(buffer) > limit else 0):
            yield buffer[:end]
            buffer = buffer[end:]
    if buffer:
        yield buffer
