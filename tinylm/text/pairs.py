"""Pairs of a source and a target: lines of a TSV file, or of JSONL with `source` and `target`, and batches of them.

As a stream, a pair is two documents, one after the other, so that everything that reads text reads pairs.
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
from tinylm.text.compression import Advance, ignore, shown
from tinylm.text.corpus import Corpus
from tinylm.text.dataset import Batch, TokenFolder
from tinylm.text.detection import is_json
from tinylm.text.readers import json_records, numbered_lines, read_text, require_characters


class Pair(NamedTuple):
    source: str
    target: str


@dataclass(frozen=True)
class PairCorpus(Corpus):
    """Files of pairs, in a fixed order."""

    finds_json: ClassVar[bool] = True

    def pairs(self, advance: Advance = ignore) -> Iterator[Pair]:
        """Raises UsageError for a malformed line, saying which and what was expected.

        A pair of which `known_part` leaves one side empty is left out.
        """
        for file in self.files:
            for pair in self._pairs_of(file, advance):
                if self.known_part is not None:
                    pair = Pair(*(self.known_part(side).strip() for side in pair))
                if all(pair):
                    yield pair

    def _pairs_of(self, file: Path, advance: Advance) -> Iterator[Pair]:
        pieces = read_text(file, self.encoding, advance)
        first = next(pieces, "")
        pieces = itertools.chain([first], pieces)
        if self.is_json(file) or is_json(first):
            for place, record in json_records(pieces, shown(file)):
                yield _from_record(record, place)
        else:
            for number, line in numbered_lines(pieces, shown(file)):
                yield _from_tsv(line, f"{shown(file)}, line {number}")

    def _documents(self, advance: Advance) -> Iterator[Iterable[str]]:
        for pair in self.pairs(advance):
            yield [pair.source]
            yield [pair.target]

    def whole(self, characters: int) -> int:
        """So many characters, or a few fewer, that no pair is cut in two."""
        total = 0
        for source, target in self.pairs():
            if total + len(source) + len(target) > characters:
                break
            total += len(source) + len(target)
        return total


def _from_tsv(line: str, place: str) -> Pair:
    parts = [part.strip() for part in line.removesuffix("\r").split("\t")]
    if len(parts) != 2 or not all(parts):
        found = "an empty one" if len(parts) == 2 else f"{len(parts) - 1} tabs" if len(parts) != 1 else "no tab"
        raise UsageError(f"{place}: expected a source, a tab and a target, and found {found}; mend the line.")
    return Pair(*parts)


def _from_record(record: Any, place: str) -> Pair:
    sides = [record.get(name) if isinstance(record, dict) else None for name in ("source", "target")]
    if not all(isinstance(side, str) and side.strip() for side in sides):
        raise UsageError(f"{place}: expected an object with texts under 'source' and 'target'; mend the line.")
    return Pair(*(require_characters(str(side).strip(), place) for side in sides))


class PairTokens:
    """Encoded pairs: ids in which each source and each target stands by itself, with the end of text between them.

    A source is shown to the encoder with the end of text after it; a target is learned with the end of text before and
    after it. `lengths` (N, 2) counts the tokens of the two without either.
    """

    def __init__(self, tokens: np.ndarray, end_of_text: int) -> None:
        ends = np.flatnonzero(tokens == end_of_text)
        if len(tokens) and (not len(ends) or ends[-1] != len(tokens) - 1):
            ends = np.append(ends, len(tokens))  # nothing stands after the last one
        starts = np.append(0, ends[:-1] + 1)
        if len(ends) % 2:
            raise TinyLMError(f"The encoded text is damaged: its {len(ends)} sides are not pairs.")
        self._tokens = tokens
        self._end_of_text = end_of_text
        self._starts = starts.reshape(-1, 2)
        self.lengths = (ends - starts).reshape(-1, 2)

    @property
    def contexts(self) -> np.ndarray:
        """The shortest context that each pair fits, (N,): its longer side, with the end of text."""
        return (self.lengths + 1).max(axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def source(self, index: int) -> np.ndarray:
        return self._side(index, 0)

    def target(self, index: int) -> np.ndarray:
        return self._side(index, 1)

    def _side(self, index: int, side: int) -> np.ndarray:
        start = self._starts[index, side]
        return self._tokens[start : start + self.lengths[index, side]].astype(np.int64)

    def fitting(self, context: int) -> np.ndarray:
        """The numbers of the pairs whose sides both fit a context, with the end of text."""
        return np.flatnonzero(self.contexts <= context)

    def batch(self, indices: Iterable[int]) -> Batch:
        """Some pairs side by side, with the end of text for padding."""
        end = [self._end_of_text]
        sources = [np.append(self.source(i), end) for i in indices]
        targets = [np.concatenate((end, self.target(i), end)) for i in indices]
        source, source_lengths = padded(sources, self._end_of_text)
        both, lengths = padded(targets, self._end_of_text)
        mask = torch.arange(both.shape[1] - 1) < (lengths - 1).unsqueeze(1)  # (B, T)
        return Batch(both[:, :-1].contiguous(), both[:, 1:].contiguous(), mask, source, source_lengths)


def padded(rows: Sequence[np.ndarray], padding: int) -> tuple[Tensor, Tensor]:
    """Rows of ids as one (B, T), and their lengths (B,)."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), padding)
    for row, values in zip(ids, rows, strict=True):
        row[: len(values)] = torch.from_numpy(values)
    return ids, lengths


class PairContexts(NamedTuple):
    """The shortest context that each pair fits, (N,) for those to train on, and for those to validate with."""

    train: np.ndarray
    val: np.ndarray

    @classmethod
    def of(cls, tokens: TokenFolder, end_of_text: int) -> "PairContexts":
        return cls(*(PairTokens(part, end_of_text).contexts for part in (tokens.train, tokens.val)))


POOL = 50  # batches whose pairs are put in the order of their lengths


class PairBatches:
    """Training batches of pairs of about equal length, so that there is little padding.

    Each epoch shuffles the pairs, puts a pool of some batches' pairs at a time in order, cuts it into batches, and
    shuffles those. What batch number n holds depends on the seed and n alone.
    """

    def __init__(self, pairs: PairTokens, context: int, batch_size: int, seed: int) -> None:
        self._pairs = pairs
        self._fitting = pairs.fitting(context)
        self._batch_size = batch_size
        self._seed = seed
        self.per_epoch = -(-len(self._fitting) // batch_size)
        self._epoch = -1
        self._batches: list[np.ndarray] = []

    def batch(self, number: int) -> Batch:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return self._pairs.batch(self._batches[place])

    def _shuffled(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        order = rng.permutation(self._fitting)
        size, batches = self._batch_size, []
        for start in range(0, len(order), POOL * size):
            pool = order[start : start + POOL * size]
            pool = pool[np.lexsort(self._pairs.lengths[pool].T)]  # by target, and by source where targets are as long
            batches += [pool[first : first + size] for first in range(0, len(pool), size)]
        return [batches[i] for i in rng.permutation(len(batches))]


def evaluation_pairs(pairs: PairTokens, context: int, batch_size: int, most: int | None = None) -> Iterator[Batch]:
    """Every pair that fits the context, the longest last; with `most`, evenly spread ones of about so many tokens."""
    indices = pairs.fitting(context)
    total = int((pairs.lengths[indices, 1] + 1).sum())
    if most is not None and most < total:
        indices = indices[np.linspace(0, len(indices) - 1, max(1, len(indices) * most // total)).astype(int)]
    indices = indices[np.argsort(pairs.lengths[indices, 1], kind="stable")]
    for first in range(0, len(indices), batch_size):
        yield pairs.batch(indices[first : first + batch_size])
