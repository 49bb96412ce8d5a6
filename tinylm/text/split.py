"""Split a corpus into training and validation text.

The validation text is the end of a continuous text. Of records (lines, JSON, pairs, conversations) it is a sample that
is drawn with a fixed seed: the last records of a file are often about something else than the others. A short text is
trained on as a whole and is its own validation text: a tenth of it shows nothing, and would be missing.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinylm.config.run import MAX_SHORT_TEXT
from tinylm.config.settings import TextSettings
from tinylm.config.validation import check_settings
from tinylm.errors import TinyLMError, UsageError
from tinylm.text.corpus import Corpus, CorpusStats, RecordCorpus, Stream, joined, slice_stream
from tinylm.text.files import Progress, no_progress
from tinylm.text.text_cache import scan_or_recall

DEFAULT_VAL_FRACTION = 0.1
DRAW_SEED = 0  # of validation records; the same in all runs, whose validation losses can then be compared


@dataclass(frozen=True)
class SplitCorpus:
    """A corpus split into training and validation text, with statistics from one pass over its files.

    `corpora` are the corpus and, if there is another one for validation, that; `all_stats` are their statistics. With
    `validates_on_itself`, the corpus is its own validation text. Otherwise, without another corpus, the validation text
    is `val_records` records (see `draw_records`) or, if that is 0, the characters after the first `train_characters`.
    `val_fraction` is its requested share of the records or characters; `None` leaves it to `split_corpus`. With
    `val_corpus`, `val_records` is the number of its records, 0 if it has none.
    """

    corpora: tuple[Corpus, ...]
    all_stats: tuple[CorpusStats, ...]
    train_characters: int
    val_fraction: float | None = None
    val_records: int = 0
    validates_on_itself: bool = False

    @property
    def corpus(self) -> Corpus:
        """The corpus that is trained on, as a whole or in part."""
        return self.corpora[0]

    @property
    def stats(self) -> CorpusStats:
        """The statistics of `corpus`."""
        return self.all_stats[0]

    @property
    def val_corpus(self) -> Corpus | None:
        """The corpus that is for validation as a whole; `None` if a part of `corpus` is."""
        return None if self._is_divided else self.corpora[-1]

    @property
    def val_stats(self) -> CorpusStats | None:
        """The statistics of `val_corpus`."""
        return None if self._is_divided else self.all_stats[-1]

    @property
    def _is_divided(self) -> bool:
        return len(self.corpora) == 1 and not self.validates_on_itself

    @property
    def characters(self) -> int:
        """Number of characters of training and validation text; a text that is both counts once."""
        return sum(stats.characters for stats in self.all_stats)

    @property
    def alphabet(self) -> str:
        """The distinct characters of training and validation text, sorted."""
        return "".join(sorted(set().union(*(stats.alphabet for stats in self.all_stats))))

    def stream(self, part: str) -> Stream:
        """The text of the part "train" or "val". Raises TinyLMError at its end if its length differs from that in the
        first pass.
        """
        is_val = part == "val"
        if self._draws:
            return joined(self._drawn_chunks(is_val))
        corpus, stats = (self.corpora[-1], self.all_stats[-1]) if is_val else (self.corpus, self.stats)
        if not self._is_divided:
            return _require_length(stats.characters, corpus.stream())
        start, stop = (self.train_characters, stats.characters) if is_val else (0, self.train_characters)
        return _require_length(stop - start, slice_stream(corpus.stream(), start, stop))

    def documents(self, part: str) -> Iterator[Any]:
        """The part "train" or "val" as the input of its encoding: its stream, or the examples of its records."""
        is_val = part == "val"
        corpus = self.corpora[-1] if is_val else self.corpus
        if not isinstance(corpus, RecordCorpus):
            return self.stream(part)
        return corpus.selected_examples(self._selection(is_val)) if self._draws else corpus.examples()

    @property
    def _draws(self) -> bool:
        """Whether the validation text is drawn from the records of `corpus`."""
        return self.val_records > 0 and self._is_divided

    def _selection(self, is_val: bool) -> Iterator[bool]:
        """Whether each document of `corpus` is in the validation text, or else in the training text."""
        size = self.corpus.documents_per_record
        for drawn in draw_records(self.stats.documents // size, self.val_records):
            yield from itertools.repeat(drawn == is_val, size)

    def _drawn_chunks(self, is_val: bool) -> Stream:
        selection = self._selection(is_val)
        is_selected = next(selection)
        for chunk in _require_length(self.stats.characters, self.corpus.stream()):
            if chunk is None:
                is_selected = next(selection, False)
                yield None
            elif is_selected:
                yield chunk


def draw_records(records: int, drawn: int) -> Iterator[bool]:
    """Yield for each of `records` records whether it is one of the `drawn` records for validation.

    One record is drawn from each of `drawn` runs of consecutive records of nearly equal length, so that a file that is
    sorted by subject is drawn from evenly. The draw depends on the two numbers only.
    """
    random_fraction = random.Random(DRAW_SEED).random  # Python promises the same sequence in all versions
    for index in range(drawn):
        start, stop = (records * edge // drawn for edge in (index, index + 1))
        chosen = start + int((stop - start) * random_fraction())
        yield from (record == chosen for record in range(start, stop))


def _require_length(characters: int, stream: Stream) -> Stream:
    """Yield the stream; raise TinyLMError at its end unless it has the given number of characters."""
    for chunk in stream:
        characters -= len(chunk or "")
        yield chunk
    if characters:
        raise TinyLMError("A file of the text changed while it was being read; run the command again.")


def split_corpus(
    corpora: Sequence[Corpus], val_fraction: float | None = None, progress: Progress = no_progress
) -> SplitCorpus:
    """Scan all the text and choose the split. `progress` receives the number of bytes read from the disk.

    corpora: the corpus and, if there is another one for validation, that. Without it and without `val_fraction`, a text
    of at most MAX_SHORT_TEXT characters and of fewer records than the corpus's `min_split` is its own validation text;
    of a longer one, the fraction is DEFAULT_VAL_FRACTION.

    Raises UsageError for a text that is empty or cannot be read, for a single pair or conversation of which a part is
    to be left, and for a `val_fraction` outside of (0, 1).
    """
    check_settings(TextSettings, {"val_fraction": val_fraction})
    all_stats = tuple(scan_or_recall(corpus, progress) for corpus in corpora)
    counts = [
        stats.documents // corpus.documents_per_record if corpus.is_records else 0
        for corpus, stats in zip(corpora, all_stats, strict=True)
    ]
    corpus, stats, records = corpora[0], all_stats[0], counts[0]
    is_short = stats.characters <= MAX_SHORT_TEXT and stats.documents // corpus.documents_per_record < corpus.min_split
    on_itself = len(corpora) == 1 and val_fraction is None and is_short
    if len(corpora) > 1 or on_itself:
        return SplitCorpus(tuple(corpora), all_stats, stats.characters, val_fraction, counts[-1], on_itself)
    fraction = DEFAULT_VAL_FRACTION if val_fraction is None else val_fraction
    if corpus.kind != Corpus.kind and records < 2:
        raise UsageError(f"{corpus.name} has one record, and none is left for validation; give more, or `val_data`.")
    val_records = min(int(records * fraction), records - 1) if records else 0
    if corpus.kind != Corpus.kind:
        val_records = max(1, val_records)
    if val_records:
        train_characters = stats.characters * (records - val_records) // records
    else:  # also where a tenth of a few long documents is less than one of them
        train_characters = stats.characters - max(1, int(stats.characters * fraction))
    return SplitCorpus((corpus,), all_stats, train_characters, val_fraction, val_records)
