"""Pairs of source and target text: read from files, encoded, and in batches for an encoder-decoder.

They are read from TSV, or from JSON or Parquet with the keys `source` and `target`. In a stream of text, a pair is two
consecutive documents, so that pairs are encoded like other text.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinylm.errors import TinyLMError, UsageError
from tinylm.text.batches import Batch, ShuffledBatches
from tinylm.text.corpus import Corpus
from tinylm.text.file_selection import is_json
from tinylm.text.files import Progress, display_name, no_progress
from tinylm.text.readers import decoded_chunks, is_table, json_records, numbered_lines, records, require_encodable
from tinylm.text.token_files import Tokens


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
    languages: ClassVar[int] = 2  # sources and targets are often in two (decision 009)

    def has_records(self, file: Path) -> bool:
        """Whether the file is read as JSONL, a JSON array or Parquet."""
        return not is_table(file) and super().has_records(file)

    def pairs(self, progress: Progress = no_progress) -> Iterator[Pair]:
        """Yield the pairs of all files. `progress` receives the number of bytes read from the disk.

        Pairs with a side that `drop_unknown` leaves empty are skipped. Raises UsageError, with the location, for a line
        or record that is not a pair, and for a file that cannot be read.
        """
        for file in self.files:
            for location, pair in self._pairs_of(file, progress):
                if self.drop_unknown is not None:
                    pair = Pair(*(self.drop_unknown(side).strip() for side in pair))
                if all(pair):
                    yield pair
                else:
                    self._leave_out(location)

    def _pairs_of(self, file: Path, progress: Progress) -> Iterator[tuple[str, Pair]]:
        if self.has_records(file):
            for location, record in records(file, self.encoding, Pair._fields, progress):
                yield location, _from_record(record, location)
            return
        chunks: Iterator[str] = decoded_chunks(file, self.encoding, progress)
        first = next(chunks, "")
        chunks = itertools.chain([first], chunks)
        if is_json(first):
            for location, record in json_records(chunks, display_name(file)):
                yield location, _from_record(record, location)
        else:
            for number, line in numbered_lines(chunks, display_name(file)):
                location = f"{display_name(file)}, line {number}"
                sides = [side.strip() for side in line.removesuffix("\r").split("\t")]
                if len(sides) != 2 or not all(sides):
                    tabs = f"{len(sides) - 1} tabs" if len(sides) != 1 else "no tab"
                    raise UsageError(
                        f"{location}: expected a source, a tab and a target, but found "
                        f"{'an empty side' if len(sides) == 2 else tabs}; correct the line."
                    )
                yield location, Pair(*sides)

    def _documents(self, progress: Progress) -> Iterator[Iterable[str]]:
        for pair in self.pairs(progress):
            yield [pair.source]
            yield [pair.target]


def _from_record(record: Any, location: str) -> Pair:
    sides = [record.get(name) if isinstance(record, dict) else None for name in ("source", "target")]
    if not all(isinstance(side, str) and side.strip() for side in sides):
        raise UsageError(f"{location}: expected an object with texts under 'source' and 'target'; correct it.")
    return Pair(*(require_encodable(str(side).strip(), location) for side in sides))


class PairTokens:
    """Pairs in a non-empty array of token ids, in which the end-of-text id separates all sources and targets.

    In batches, a source is followed by the end-of-text id, and a target is preceded and followed by it. `lengths`,
    (N, 2), are the numbers of tokens of source and target without end-of-text ids. Raises TinyLMError if there are not
    as many targets as sources.
    """

    def __init__(self, tokens: Tokens, end_of_text_id: int) -> None:
        tokens = np.asarray(tokens)
        ends = np.flatnonzero(tokens == end_of_text_id)
        if len(tokens) and (not len(ends) or ends[-1] != len(tokens) - 1):
            ends = np.append(ends, len(tokens))  # there is no end-of-text id after the last target
        starts = np.append(0, ends[:-1] + 1)
        if len(ends) % 2:
            raise TinyLMError(f"The encoded text is damaged: its {len(ends)} documents are not pairs.")
        self._tokens = tokens
        self._end_of_text_id = end_of_text_id
        self._starts = starts.reshape(-1, 2)
        self.lengths = (ends - starts).reshape(-1, 2)

    @property
    def contexts(self) -> np.ndarray:
        """The context length that each pair needs, (N,): its longer side and an end-of-text id."""
        return (self.lengths + 1).max(axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def source(self, index: int) -> np.ndarray:
        """The token ids of a source, (S,)."""
        return self._side(index, 0)

    def target(self, index: int) -> np.ndarray:
        """The token ids of a target, (T,)."""
        return self._side(index, 1)

    def _side(self, index: int, side: int) -> np.ndarray:
        start = self._starts[index, side]
        return self._tokens[start : start + self.lengths[index, side]].astype(np.int64)

    def fitting(self, context: int) -> np.ndarray:
        """The indices, (M,), of the pairs that fit into a context of `context` tokens."""
        return np.flatnonzero(self.contexts <= context)

    def training_batches(self, context: int, batch_size: int, seed: int) -> ShuffledBatches:
        """Batches of at most `batch_size` pairs that fit into the context, with similar target and source lengths."""
        return ShuffledBatches(self.fitting(context), self.batch, batch_size, seed, sort_keys=self.lengths.T)

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """A batch of the pairs with the given indices, (B,), padded with end-of-text ids, which the mask excludes."""
        end = [self._end_of_text_id]
        sources = [np.append(self.source(i), end) for i in indices]
        targets = [np.concatenate((end, self.target(i), end)) for i in indices]
        source, source_lengths = pad_rows(sources, self._end_of_text_id)  # (B, S), (B,)
        ids, lengths = pad_rows(targets, self._end_of_text_id)  # (B, T + 1), (B,)
        mask = torch.arange(ids.shape[1] - 1) < (lengths - 1).unsqueeze(1)  # (B, T)
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask, source, source_lengths)


def pad_rows(rows: Sequence[np.ndarray], padding: int) -> tuple[Tensor, Tensor]:
    """Pad at least one row of token ids on the right: (B, T) of int64, and the lengths of the rows, (B,)."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), padding)
    for row, values in zip(ids, rows, strict=True):
        row[: len(values)] = torch.from_numpy(values)
    return ids, lengths


def pair_evaluation_batches(
    pairs: PairTokens, context: int, batch_size: int, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield batches of the pairs that fit into the context, sorted by target length.

    With `max_tokens`, yields a fixed selection of evenly spaced pairs with about that many target tokens in total,
    end-of-text ids included.
    """
    indices = pairs.fitting(context)
    total = int((pairs.lengths[indices, 1] + 1).sum())
    if max_tokens is not None and max_tokens < total:
        indices = indices[np.linspace(0, len(indices) - 1, max(1, len(indices) * max_tokens // total)).astype(int)]
    indices = indices[np.argsort(pairs.lengths[indices, 1], kind="stable")]
    for first in range(0, len(indices), batch_size):
        yield pairs.batch(indices[first : first + batch_size])
