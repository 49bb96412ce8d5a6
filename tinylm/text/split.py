"""Split a corpus into training and validation text.

The validation text is the end of a continuous text. Of records (lines, JSON, pairs, conversations) it is a sample that
is drawn with a fixed seed: the last records of a file are often about something else than the others. A short text is
trained on as a whole and is its own validation text: a tenth of it shows nothing, and would be missing.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinylm.config.run import MAX_SHORT_TEXT
from tinylm.config.settings import TextSettings
from tinylm.config.validation import check_settings
from tinylm.errors import TinyLMError, UnknownCharactersError, UsageError
from tinylm.text.compression import Progress, no_progress
from tinylm.text.corpus import (
    Corpus,
    CorpusStats,
    RecordCorpus,
    Stream,
    slice_stream,
)
from tinylm.text.readers import require_encodable
from tinylm.text.text_cache import scan_or_recall
from tinylm.text.tokenizer import Tokenizer, describe_characters

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
    def is_drawn(self) -> bool:
        """Whether the validation text is drawn from the records of `corpus`."""
        return self.val_records > 0 and self.val_corpus is None

    @property
    def validates_on_itself(self) -> bool:
        """Whether the training text is the validation text by default."""
        return self.val_corpus is self.corpus

    @property
    def characters(self) -> int:
        """Number of characters of training and validation text; a text that is both counts once."""
        own = None if self.validates_on_itself else self.val_stats
        return self.stats.characters + (own.characters if own is not None else 0)

    @property
    def alphabet(self) -> str:
        """The distinct characters of training and validation text, sorted."""
        return "".join(sorted({*self.stats.alphabet, *(self.val_stats.alphabet if self.val_stats else "")}))

    def train_stream(self) -> Stream:
        """The training text. Raises TinyLMError at its end if its length differs from that in the first pass."""
        if self.is_drawn:
            return self._records(drawn=False)
        return _require_length(self.train_characters, slice_stream(self.corpus.stream(), 0, self.train_characters))

    def train_documents(self) -> Iterator[Any]:
        """The training text as input of its encoding: `train_stream`, or the examples of records."""
        if isinstance(self.corpus, RecordCorpus):
            return self.corpus.selected_examples(self._selection(drawn=False))
        return self.train_stream()

    def val_documents(self) -> Iterator[Any]:
        """The validation text, as `train_documents`."""
        if isinstance(self.val_corpus, RecordCorpus):
            return self.val_corpus.examples()
        if isinstance(self.corpus, RecordCorpus):
            return self.corpus.selected_examples(self._selection(drawn=True))
        return self.val_stream()

    def val_stream(self) -> Stream:
        """The validation text. Raises TinyLMError at its end if its length differs from that in the first pass."""
        if self.val_corpus is not None:
            assert self.val_stats is not None
            return _require_length(self.val_stats.characters, self.val_corpus.stream())
        if self.is_drawn:
            return self._records(drawn=True)
        characters = self.stats.characters
        return _require_length(
            characters - self.train_characters, slice_stream(self.corpus.stream(), self.train_characters, characters)
        )

    def _selection(self, *, drawn: bool) -> Iterator[bool]:
        """Whether each record of `corpus` is in the validation text (`drawn`) or in the training text."""
        if not self.is_drawn:
            return itertools.repeat(not drawn)
        records = self.stats.documents // self.corpus.documents_per_record
        return (chosen == drawn for chosen in draw_records(records, self.val_records))

    def _records(self, *, drawn: bool) -> Stream:
        """The stream of the records in one part."""
        selection, size = self._selection(drawn=drawn), self.corpus.documents_per_record
        selected, document = next(selection), 0
        started = separator_pending = False
        for chunk in _require_length(self.stats.characters, self.corpus.stream()):
            if chunk is None:
                document += 1
                if document % size == 0:
                    selected = next(selection, False)
                separator_pending = started
            elif selected:
                if separator_pending:
                    yield None
                started, separator_pending = True, False
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
    corpus: Corpus, val_corpus: Corpus | None, val_fraction: float | None = None, progress: Progress = no_progress
) -> SplitCorpus:
    """Scan all the text and choose the split. `progress` receives the number of bytes read from the disk.

    Without `val_corpus` and `val_fraction`, a text of at most MAX_SHORT_TEXT characters and of fewer records than the
    corpus's `min_split` is its own validation text; of a longer one, the fraction is DEFAULT_VAL_FRACTION.

    Raises UsageError for a text that is empty or cannot be read, for a single pair or conversation of which a part is
    to be left, and for a `val_fraction` outside of (0, 1).
    """
    check_settings(TextSettings, {"val_fraction": val_fraction})
    stats = scan_corpus(corpus, progress)
    val_stats = scan_corpus(val_corpus, progress) if val_corpus is not None else None
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


def scan_corpus(corpus: Corpus, progress: Progress) -> CorpusStats:
    """The statistics of a corpus. Raises UsageError if it contains no text, or none with ids in the vocabulary."""
    stats = scan_or_recall(corpus, progress)
    require_text(corpus, stats)
    return stats


def require_text(corpus: Corpus, stats: CorpusStats) -> None:
    """Raise UsageError if the corpus with these statistics contains no text, or none with ids in the vocabulary."""
    if not stats.characters and corpus.drop_unknown is not None:
        raise UsageError(f"None of the characters of {corpus.name} has an id in the vocabulary; give another text.")
    if not stats.characters:
        raise UsageError(f"{corpus.name} contains no text; give a file that does.")


def require_known_characters(
    corpus: Corpus,
    alphabet: str,
    tokenizer: Tokenizer,
    vocabulary_owner: str,
    model: Path | None = None,
    *,
    unknown: str = "error",
) -> None:
    """Raise UnknownCharactersError with a list of the characters of `alphabet` that have no id.

    If `unknown` is "skip", only those are an error that the chat template writes, since they cannot be skipped.

    alphabet: the characters of the corpus and of its validation text. vocabulary_owner: the subject of the message,
    such as "The model checkpoints/a". model: path of the model that the tokenizer belongs to; it is an attribute of the
    error if the vocabulary can be extended.
    """
    missing = tokenizer.unknown_characters(alphabet)
    if not missing:
        return
    whose, advice = "text's characters", 'skip such characters with `unknown="skip"`'
    if written := corpus.written_by_template(alphabet, missing):
        whose, missing = "characters that the chat template writes", written
        advice = "choose a `chat_template` without them, since they cannot be skipped"
    if written or unknown != "skip":
        raise UnknownCharactersError(
            f"{vocabulary_owner} has no id for {len(missing)} of the {whose}, {describe_characters(missing)}; "
            f"{advice}.",
            model if tokenizer.kind == "char" else None,
            corpus.paths,
        )


def corpus_without_unknown(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """Return a copy of the corpus that also drops the characters without an id in the tokenizer.

    Pairs with a side that becomes empty, and conversations with a message that becomes empty, are skipped.
    """
    drop_others = corpus.drop_unknown or str

    def drop_unknown(text: str) -> str:
        text = drop_others(text)
        unknown = tokenizer.unknown_characters(text)
        return text.translate(dict.fromkeys(map(ord, unknown))) if unknown else text

    return replace(corpus, drop_unknown=drop_unknown)


def drop_unknown_characters(split: SplitCorpus, tokenizer: Tokenizer, progress: Progress) -> SplitCorpus:
    """Return the text without the characters that have no id, split again; `progress` as for `split_corpus`.

    Raises UsageError if no text is left.
    """
    corpus = corpus_without_unknown(split.corpus, tokenizer)
    val_corpus = None
    if split.val_corpus is not None and not split.validates_on_itself:
        val_corpus = corpus_without_unknown(split.val_corpus, tokenizer)
    return split_corpus(corpus, val_corpus, split.val_fraction, progress)


def without_unknown(text: str, tokenizer: Tokenizer, unknown: str, name: str) -> str:
    """The text without characters that are not in the vocabulary; may be empty. name: of the text, for messages.

    Raises UsageError for such characters if `unknown` is "error", and for text that UTF-8 cannot encode.
    """
    require_encodable(text, name)
    found = tokenizer.unknown_characters(text)
    if found and unknown == "error":
        raise UsageError(
            f"{name} has characters that are not in the vocabulary: {describe_characters(found)}; leave them out, or "
            'skip them with `unknown="skip"`.'
        )
    return text.translate(dict.fromkeys(map(ord, found))) if found else text
