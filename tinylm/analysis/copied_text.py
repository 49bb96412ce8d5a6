"""Verbatim matches of short texts, such as samples of a model, with a long text, such as its training text.

The long text is read once and not indexed: the hash of each of its k-grams is looked up among those of the short texts,
so that memory does not depend on the length of the long text. Hits are verified character by character.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tinylm.text.compression import Progress, no_progress
from tinylm.text.corpus import Stream
from tinylm.text.encodings import code_points

SEPARATOR = "\U0010ffff"  # between documents; a noncharacter, replaced by NO_CHARACTER in the short texts
NO_CHARACTER = 0x110000  # between the short texts; not a code point
PIECE = 1 << 20  # minimum number of characters of the long text that are searched at a time
BLOCK = 1 << 16  # k-grams hashed at a time, which fit into the processor's cache
FILTER_BITS = 22  # leading bits of a hash, looked up in a table before the whole hash
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
MAX_COMPARISONS = 1000  # per k-gram of the short texts; the lengths of its later matches are not measured


class Documents(NamedTuple):
    """A long text.

    open: returns the text as a stream, and calls its argument with the progress of reading, in `unit`s
    name: returns the name of the document with an index, which must have been read
    size: number of units; `None` if unknown
    unit: plural noun, such as bytes
    """

    open: Callable[[Progress], Stream]
    name: Callable[[int], str]
    size: int | None
    unit: str


@dataclass(frozen=True)
class Match:
    """A verbatim match: `text` is a part of the short text with index `sample`, and of a document of the long text.

    characters: length of the match. name: of the document. line, character: its position in the document, as the number
        of a line from 1, and as an offset in characters from 0.
    """

    sample: int
    characters: int
    text: str
    name: str
    line: int
    character: int


@dataclass(frozen=True)
class Matches:
    """copied: (N,), number of characters of each short text that are in matches of at least k characters.

    longest: the longest match of each short text that has a match, in descending order of length.
    """

    copied: np.ndarray
    longest: tuple[Match, ...]


def find_matches(texts: Sequence[str], documents: Documents, k: int, progress: Progress = no_progress) -> Matches:
    """Find the verbatim matches of at least k characters between short texts and documents, each within a document.

    The number of copied characters is exact. After about MAX_COMPARISONS comparisons, further matches that begin with
    the same k-gram are not measured, so the longest one of a very repetitive text may be missed. progress: as for
    `documents.open`.
    """
    search = _Search(texts, k)
    for piece in _pieces(documents.open(progress), search.longest_text):
        search.search(piece, documents.name)
    longest = sorted(search.best.values(), key=lambda match: (-match.characters, match.sample))
    return Matches(search.copied(), tuple(longest))


class _Piece(NamedTuple):
    """A part of the long text. Matches begin from `start` up to `stop`; the rest is context.

    codes: (N,), code points, with SEPARATOR between documents. document: index of the document that codes[0] is in.
    characters, lines: number of characters and of line breaks of this document before codes[0].
    """

    codes: np.ndarray
    start: int
    stop: int
    document: int
    characters: int
    lines: int

    def place(self, at: int) -> tuple[int, int, int]:
        """The index of the document of codes[at], and its line (from 1) and offset in characters in the document."""
        ends = np.flatnonzero(self.codes[:at] == ord(SEPARATOR))
        begin = int(ends[-1]) + 1 if len(ends) else 0
        lines = int(np.count_nonzero(self.codes[begin:at] == ord("\n")))
        if not len(ends):
            return self.document, self.lines + lines + 1, self.characters + at
        return self.document + len(ends), lines + 1, at - begin


def _pieces(stream: Stream, context: int) -> Iterator[_Piece]:
    """Cut a stream into pieces that overlap: `context` characters after `stop`, and one before `start`."""
    piece = _Piece(np.zeros(0, dtype=np.uint32), 0, 0, 0, 0, 0)
    buffered: list[str] = []
    length = 0
    for chunk in stream:
        buffered.append(SEPARATOR if chunk is None else chunk)
        length += len(buffered[-1])
        if length >= PIECE:
            piece = _next_piece(piece, "".join(buffered), context)
            yield piece
            buffered, length = [], 0
    yield _next_piece(piece, "".join(buffered), 0)


def _next_piece(last: _Piece, text: str, context: int) -> _Piece:
    kept = max(last.stop - 1, 0)
    document, line, character = last.place(kept)
    codes = np.concatenate((last.codes[kept:], code_points(text)))
    start = last.stop - kept
    return _Piece(codes, start, max(start, len(codes) - context), document, character, line - 1)


class _Search:
    """The short texts, the hashes of their k-grams, and the matches found so far."""

    def __init__(self, texts: Sequence[str], k: int) -> None:
        self._texts, self._k = texts, k
        self.longest_text = max(map(len, texts), default=0)
        self.best: dict[int, Match] = {}
        codes = [np.append(code_points(text), NO_CHARACTER) for text in texts]
        self._codes = np.concatenate([np.zeros(0, dtype=np.uint32), *codes]).astype(np.uint32)
        self._codes[self._codes == ord(SEPARATOR)] = NO_CHARACTER
        self._ends = np.cumsum([len(part) for part in codes], dtype=np.int64) - 1  # of the texts
        self._powers, self._inverse_powers = _powers(MULTIPLIER), _powers(pow(MULTIPLIER, -1, 1 << 64))
        barriers = np.concatenate(([0], np.cumsum(self._codes == NO_CHARACTER)))
        positions = np.flatnonzero(barriers[k:] == barriers[:-k]) if len(self._codes) >= k else np.zeros(0, np.int64)
        hashes = np.concatenate([np.zeros(0, np.uint64), *(part for _, part in self._hashes(self._codes))])
        self._hash, gram = np.unique(hashes[positions], return_inverse=True)  # sorted
        order = np.argsort(gram, kind="stable")
        self._positions, self._gram = positions, gram
        self._occurrences = np.split(positions[order], np.searchsorted(gram[order], np.arange(1, len(self._hash))))
        self._single = np.array([len(queries) == 1 for queries in self._occurrences], dtype=bool)
        self._first = np.array([queries[0] for queries in self._occurrences if len(queries)], dtype=np.int64)
        self._filter = np.zeros(1 << FILTER_BITS, dtype=bool)
        self._filter[self._hash >> np.uint64(64 - FILTER_BITS)] = True
        self._found = np.zeros(len(self._hash), dtype=bool)
        self._compared = np.zeros(len(self._hash), dtype=np.int64)

    def _hashes(self, codes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The hash of each k-gram, sum_j codes[i + j] MULTIPLIER^-j modulo 2^64, from differences of a cumulative sum
        (Karp and Rabin 1987). Yields blocks of hashes, each with the index i of its first k-gram.
        """
        k, count = self._k, len(codes) - self._k + 1
        for start in range(0, count, BLOCK):
            part = codes[start : min(start + BLOCK, count) + k - 1].astype(np.uint64)
            sums = np.zeros(len(part) + 1, dtype=np.uint64)
            for at in range(0, len(part), BLOCK):  # a k-gram may be longer than the table of powers
                width = min(BLOCK, len(part) - at)
                part[at : at + width] *= self._inverse_powers[:width]
                part[at : at + width] *= np.uint64(pow(MULTIPLIER, -at, 1 << 64))
            np.cumsum(part, out=sums[1:])
            n = len(part) - k + 1
            yield start, (sums[k:] - sums[:-k]) * self._powers[:n]

    def _hits(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The indices in `codes` at which a hash of the short texts begins, and the indices of the hashes, (H,) each.

        The k-grams of equal hashes may differ.
        """
        places, grams = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for start, hashes in self._hashes(codes):
            at = np.flatnonzero(self._filter[hashes >> np.uint64(64 - FILTER_BITS)])
            gram = np.minimum(np.searchsorted(self._hash, hashes[at]), len(self._hash) - 1)
            equal = self._hash[gram] == hashes[at]
            places.append(start + at[equal])
            grams.append(gram[equal])
        return np.concatenate(places), np.concatenate(grams)

    def search(self, piece: _Piece, name: Callable[[int], str]) -> None:
        """Record all matches that begin in the piece."""
        if not len(self._hash):
            return
        places, grams = self._hits(piece.codes[: piece.stop + self._k - 1])
        inside = places >= piece.start
        places, grams = places[inside], grams[inside]
        new, first = np.unique(grams, return_index=True)
        for gram, at in zip(new[~self._found[new]], places[first[~self._found[new]]], strict=True):
            self._found[gram] = self._length(piece.codes, int(at), int(self._occurrences[gram][0])) >= self._k
        for at, gram in zip(*self._starts(places, grams), strict=True):
            if self._compared[gram] < MAX_COMPARISONS:
                self._compared[gram] += len(self._occurrences[gram])
                for query in self._occurrences[gram].tolist():
                    self._record(piece, int(at), query, name)

    def _starts(self, places: np.ndarray, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The hits at which a match may begin, and whose k-gram has fewer than MAX_COMPARISONS comparisons.

        A match began earlier if the hit one character before is the preceding k-gram of the short texts, and both
        k-grams occur only once in them.
        """
        single, query = self._single[grams], self._first[grams]
        continues = np.zeros(len(places), dtype=bool)
        continues[1:] = (places[1:] == places[:-1] + 1) & (query[1:] == query[:-1] + 1) & single[1:] & single[:-1]
        kept = ~continues & (self._compared[grams] < MAX_COMPARISONS)
        return places[kept], grams[kept]

    def _length(self, codes: np.ndarray, at: int, query: int) -> int:
        """The length of the match of codes[at:] with the short texts from `query` on."""
        width = min(int(self._ends[np.searchsorted(self._ends, query)]) - query, len(codes) - at)
        differing = np.flatnonzero(codes[at : at + width] != self._codes[query : query + width])
        return int(differing[0]) if len(differing) else width

    def _record(self, piece: _Piece, at: int, query: int, name: Callable[[int], str]) -> None:
        """Record the match of codes[at:] with the short texts from `query` on, unless its short text has a match that
        is at least as long, or the match began earlier.
        """
        if at and query and piece.codes[at - 1] == self._codes[query - 1]:
            return  # it began earlier
        length = self._length(piece.codes, at, query)
        sample = int(np.searchsorted(self._ends, query))
        if length < self._k or (sample in self.best and self.best[sample].characters >= length):
            return
        begin = query - (int(self._ends[sample - 1]) + 1 if sample else 0)
        document, line, character = piece.place(at)
        text = self._texts[sample][begin : begin + length]
        self.best[sample] = Match(sample, length, text, name(document), line, character)

    def copied(self) -> np.ndarray:
        """Number of characters of each short text that are in matches, (N,)."""
        begins = self._positions[self._found[self._gram]]
        change = np.zeros(len(self._codes) + 1, dtype=np.int64)
        np.add.at(change, begins, 1)
        np.add.at(change, begins + self._k, -1)
        covered = np.concatenate(([0], np.cumsum(np.cumsum(change[:-1]) > 0)))
        starts = np.concatenate(([0], self._ends[:-1] + 1)) if len(self._ends) else self._ends
        return covered[self._ends] - covered[starts]


def _powers(base: int) -> np.ndarray:
    """base^0, ..., base^(BLOCK - 1) modulo 2^64."""
    powers = np.full(BLOCK, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)
