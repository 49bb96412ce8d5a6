"""Split a corpus into training and validation text.

The validation text is the end of a continuous text. Of records (lines, JSON, pairs, conversations) it is a sample that
is drawn with a fixed seed: the last records of a file are often about something else than the others. A short text is
trained on as a whole and is its own validation text: a tenth of it shows nothing, and would be missing.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinylm.config.run import MAX_SHORT_TEXT
from tinylm.config.settings import TextSettings
from tinylm.config.validation import check_settings
from tinylm.errors import TinyLMError, UsageError
from tinylm.text.compression import Progress, no_progress
from tinylm.text.corpus import Corpus, CorpusStats, RecordCorpus, Stream, joined, slice_stream
from tinylm.text.text_cache import scan_or_recall

DEFAULT_VAL_FRACTION = 0.1
DRAW_SEED = 0  # of validation records; the same in all runs, whose validation losses can then be compared


@dataclass(frozen=True)
class SplitCorpus:
    """A corpus split into training and validation text, with statistics from one pass over its files.

    The validation text is `val_corpus` if there is one. Otherwise it is `val_records` records of `corpus` (see
    `draw_records`) or, if that is 0, the characters after the first `train_characters`. `val_fraction` is its requested
    share of the records or characters; `None` leaves it to `split_corpus`. With `val_corpus`, `val_records` is the
    number of its records, 0 if it has none.
    """

    corpus: Corpus
    stats: CorpusStats
    val_corpus: Corpus | None
    val_stats: CorpusStats | None
    train_characters: int
    val_fraction: float | None = None
    val_records: int = 0

    @property
    def validates_on_itself(self) -> bool:
        """Whether the training text is the validation text by default."""
        return self.val_corpus is self.corpus

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """The corpus, and that for validation if it is another one."""
        return (self.corpus,) if self.val_corpus is None or self.validates_on_itself else (self.corpus, self.val_corpus)

    @property
    def all_stats(self) -> tuple[CorpusStats, ...]:
        """The statistics of `corpora`."""
        return (self.stats,) if self.val_stats is None or self.validates_on_itself else (self.stats, self.val_stats)

    @property
    def characters(self) -> int:
        """Number of characters of training and validation text; a text that is both counts once."""
        return sum(stats.characters for stats in self.all_stats)

    @property
    def alphabet(self) -> str:
        """The distinct characters of training and validation text, sorted."""
        return "".join(sorted(set().union(*(stats.alphabet for stats in self.all_stats))))

    def train_stream(self) -> Stream:
        """The training text. Raises TinyLMError at its end if its length differs from that in the first pass."""
        if self._draws:
            return self._drawn_records(for_validation=False)
        return _require_length(self.train_characters, slice_stream(self.corpus.stream(), 0, self.train_characters))

    def val_stream(self) -> Stream:
        """The validation text; errors as for `train_stream`."""
        if self.val_corpus is not None:
            assert self.val_stats is not None
            return _require_length(self.val_stats.characters, self.val_corpus.stream())
        if self._draws:
            return self._drawn_records(for_validation=True)
        start, stop = self.train_characters, self.stats.characters
        return _require_length(stop - start, slice_stream(self.corpus.stream(), start, stop))

    def documents(self, part: str) -> Iterator[Any]:
        """The part "train" or "val" as the input of its encoding: its stream, or the examples of its records."""
        is_val = part == "val"
        corpus = self.val_corpus if is_val and self.val_corpus is not None else self.corpus
        if not isinstance(corpus, RecordCorpus):
            return self.val_stream() if is_val else self.train_stream()
        return corpus.examples() if not self._draws else corpus.selected_examples(self._selection(is_val))

    @property
    def _draws(self) -> bool:
        """Whether the validation text is drawn from the records of `corpus`."""
        return self.val_records > 0 and self.val_corpus is None

    def _selection(self, for_validation: bool) -> Iterator[bool]:
        """Whether each document of `corpus` is in the validation text, or else in the training text."""
        size = self.corpus.documents_per_record
        for drawn in draw_records(self.stats.documents // size, self.val_records):
            yield from itertools.repeat(drawn == for_validation, size)

    def _drawn_records(self, for_validation: bool) -> Stream:
        def selected() -> Stream:
            selection = self._selection(for_validation)
            is_selected = next(selection)
            for chunk in _require_length(self.stats.characters, self.corpus.stream()):
                if chunk is None:
                    is_selected = next(selection, False)
                    yield None
                elif is_selected:
                    yield chunk

        return joined(selected())


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
    corpus: Corpus, val_corpus: Corpus | None, val_fraction: float | None = None, progress: Progress = no_progress
) -> SplitCorpus:
    """Scan all the text and choose the split. `progress` receives the number of bytes read from the disk.

    Without `val_corpus` and `val_fraction`, a text of at most MAX_SHORT_TEXT characters and of fewer records than the
    corpus's `min_split` is its own validation text; of a longer one, the fraction is DEFAULT_VAL_FRACTION.

    Raises UsageError for a text that is empty or cannot be read, for a single pair or conversation of which a part is
    to be left, and for a `val_fraction` outside of (0, 1).
    """
    check_settings(TextSettings, {"val_fraction": val_fraction})
    stats = scan_or_recall(corpus, progress)
    val_stats = scan_or_recall(val_corpus, progress) if val_corpus is not None else None
    if (
        val_corpus is None
        and val_fraction is None
        and stats.characters <= MAX_SHORT_TEXT
        and stats.documents // corpus.documents_per_record < corpus.min_split
    ):
        val_corpus, val_stats = corpus, stats
    if val_corpus is not None and val_stats is not None:
        val_records = val_stats.documents // val_corpus.documents_per_record if val_corpus.is_records else 0
        return SplitCorpus(corpus, stats, val_corpus, val_stats, stats.characters, val_fraction, val_records)
    fraction = DEFAULT_VAL_FRACTION if val_fraction is None else val_fraction
    records = stats.documents // corpus.documents_per_record if corpus.is_records else 0
    if corpus.kind != Corpus.kind and records < 2:
        raise UsageError(f"{corpus.name} has one record, and none is left for validation; give more, or `val_data`.")
    val_records = min(int(records * fraction), records - 1) if records else 0
    if corpus.kind != Corpus.kind:
        val_records = max(1, val_records)
    if val_records:
        train_characters = stats.characters * (records - val_records) // records
    else:  # also where a tenth of a few long documents is less than one of them
        train_characters = stats.characters - max(1, int(stats.characters * fraction))
    return SplitCorpus(corpus, stats, None, None, train_characters, val_fraction, val_records)
