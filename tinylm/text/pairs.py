"""Pairs of source and target text, read from TSV, or from JSON or Parquet with the keys `source` and `target`.

In a stream of text, a pair is two consecutive documents, so that pairs are encoded like other text.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tinylm.errors import UsageError
from tinylm.text.compression import Progress, display_name, no_progress
from tinylm.text.corpus import Corpus
from tinylm.text.format_detection import is_json
from tinylm.text.readers import decoded_chunks, is_table, json_records, numbered_lines, records, require_encodable


class Pair(NamedTuple):
    """A source text and its target text."""

    source: str
    target: str


@dataclass(frozen=True)
class PairCorpus(Corpus):
    """A corpus of pairs. Each file is TSV, JSONL, a JSON array or Parquet."""

    kind: ClassVar[str] = "pairs"
    detects_json: ClassVar[bool] = True
    documents_per_record: ClassVar[int] = 2

    def has_records(self, file: Path) -> bool:
        """Whether the file is read as JSONL, a JSON array or Parquet."""
        return not is_table(file) and super().has_records(file)

    def pairs(self, progress: Progress = no_progress) -> Iterator[Pair]:
        """Yield the pairs of all files. `progress` receives the number of bytes read from the disk.

        Pairs with a side that `drop_unknown` leaves empty are skipped. Raises UsageError, with the location, for a line
        or record that is not a pair, and for a file that cannot be read.
        """
        for file in self.files:
            for pair in self._pairs_of(file, progress):
                if self.drop_unknown is not None:
                    pair = Pair(*(self.drop_unknown(side).strip() for side in pair))
                if all(pair):
                    yield pair

    def _pairs_of(self, file: Path, progress: Progress) -> Iterator[Pair]:
        if self.has_records(file):
            for location, record in records(file, self.encoding, Pair._fields, progress):
                yield _from_record(record, location)
            return
        chunks = decoded_chunks(file, self.encoding, progress)
        first = next(chunks, "")
        chunks = itertools.chain([first], chunks)
        if is_json(first):
            for location, record in json_records(chunks, display_name(file)):
                yield _from_record(record, location)
        else:
            for number, line in numbered_lines(chunks, display_name(file)):
                yield _from_tsv(line, f"{display_name(file)}, line {number}")

    def _documents(self, progress: Progress) -> Iterator[tuple[str, Iterable[str]]]:
        for pair in self.pairs(progress):
            yield "", [pair.source]
            yield "", [pair.target]


def _from_tsv(line: str, location: str) -> Pair:
    parts = [part.strip() for part in line.removesuffix("\r").split("\t")]
    if len(parts) != 2 or not all(parts):
        problem = "an empty side" if len(parts) == 2 else f"{len(parts) - 1} tabs" if len(parts) != 1 else "no tab"
        raise UsageError(f"{location}: expected a source, a tab and a target, but found {problem}; correct the line.")
    return Pair(*parts)


def _from_record(record: Any, location: str) -> Pair:
    sides = [record.get(name) if isinstance(record, dict) else None for name in ("source", "target")]
    if not all(isinstance(side, str) and side.strip() for side in sides):
        raise UsageError(f"{location}: expected an object with texts under 'source' and 'target'; correct it.")
    return Pair(*(require_encodable(str(side).strip(), location) for side in sides))
