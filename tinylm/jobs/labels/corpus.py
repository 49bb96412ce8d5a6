"""Texts with a label each, read from JSON, Parquet, CSV or TSV, and encoded for a classifier.

The codes of a text are those of a conversation: its token ids, of which none is scored, and in place of a further id
the number of its label, which is.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tinylm.config.model import MAX_LABEL, MAX_LABELS, check_labels
from tinylm.config.validation import describe_value, require
from tinylm.errors import BadFilesError, TinyLMError, UsageError
from tinylm.text.corpus import CorpusStats, RecordCorpus, Stream, scan_stream
from tinylm.text.file_selection import is_json
from tinylm.text.files import Progress, first_text, no_progress
from tinylm.text.parallel_encoding import Encoding, record_batches
from tinylm.text.readers import (
    is_json_file,
    is_parquet,
    is_table,
    parquet_columns,
    records,
    require_encodable,
    table_columns,
    text_of_record,
)
from tinylm.text.scored_tokens import CODES_PER_ID, FIRST, SCORED, ScoredTokens, ids_of
from tinylm.text.tokenizer import Tokenizer

LABEL_KEY = "label"
EXAMINED_RECORDS = 16
MAX_LISTED = 20  # labels in a message


class LabelledText(NamedTuple):
    """A text and the number of its label."""

    text: str
    label: int


@dataclass(frozen=True)
class LabelCorpus(RecordCorpus):
    """A corpus of texts with one of `labels` each. Each file is JSONL, a JSON array, Parquet, CSV or TSV."""

    kind: ClassVar[str] = "labels"
    min_split: ClassVar[float] = 50  # a classifier is judged by texts that it has not seen

    def has_records(self, file: Path) -> bool:
        return True

    def labelled_texts(self, progress: Progress = no_progress) -> Iterator[tuple[str, str, str]]:
        """Yield the location, text and label of each record. Those that `drop_unknown` leaves empty are skipped.

        Raises UsageError as `parse_labelled_text` and `_records`.
        """
        for file in self.files:
            for location, record in self._records(file, (self.text_key, LABEL_KEY), progress):
                text, label = parse_labelled_text(record, location, self.text_key)
                if known := text if self.drop_unknown is None else self.drop_unknown(text):
                    yield location, known, label
                else:
                    self._leave_out(location)

    def examples(self, progress: Progress = no_progress) -> Iterator[LabelledText]:
        """Yield the texts with the numbers of their labels. Raises UsageError for one that is not in `labels`."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        for location, text, label in self.labelled_texts(progress):
            if label not in numbers:
                known = ", ".join(self.labels)[:200]
                raise UsageError(f"{location}: the label {label!r} is not one of the model's ({known}); correct it.")
            yield LabelledText(text, numbers[label])

    def _documents(self, progress: Progress) -> Iterator[Iterable[str]]:
        for text, _ in self.examples(progress):
            yield [text]

    def _scan(self, progress: Progress) -> CorpusStats:
        """The fingerprint is a hash of the labels, and of the texts with the numbers of theirs."""
        numbers: list[int] = []

        def stream() -> Stream:
            for text, label in self.examples(progress):
                if numbers:
                    yield None
                numbers.append(label)
                yield text

        stats = scan_stream(stream())
        identity = json.dumps([stats.fingerprint, self.labels, numbers])
        return replace(stats, fingerprint=hashlib.sha256(identity.encode()).hexdigest())


def parse_labelled_text(record: Any, location: str, text_key: str) -> tuple[str, str]:
    """The text and the label of a JSON object; an integer, true and false are labels as well.

    Raises UsageError, with the location, for anything else, and for several labels of one text.
    """
    text = text_of_record(record, location, text_key)
    label = record.get(LABEL_KEY) if isinstance(record, dict) else None
    if isinstance(label, list | dict):
        raise UsageError(
            f"{location}: {LABEL_KEY!r} is {describe_value(label)}, and a text has one label; for several labels of a "
            "text, train one classifier for each of them."
        )
    if not isinstance(label, str | int) or label == "":
        raise UsageError(
            f"{location}: {LABEL_KEY!r} is {describe_value(label)}; it must be a text or an integer. To read the texts "
            'alone, use `format="jsonl"`.'
        )
    name = label if isinstance(label, str) else json.dumps(label)
    if len(name) > MAX_LABEL:
        raise UsageError(f"{location}: the label has {len(name):,} characters; it can have at most {MAX_LABEL}.")
    if not text:
        raise UsageError(f"{location}: the text under {text_key!r} is empty; leave the record out.")
    return text, require_encodable(name, location)


def has_labels(file: Path, encoding: str, text_key: str) -> bool:
    """Whether a file has records, of which one of the first EXAMINED_RECORDS has a text and a label."""
    columns = (text_key, LABEL_KEY)
    if is_parquet(file):
        return set(columns) <= set(parquet_columns(file))
    if is_table(file):
        return set(columns) <= set(table_columns(file, encoding))
    if not is_json_file(file) and not is_json(first_text(file, encoding)):
        return False
    try:
        first = itertools.islice(records(file, encoding, columns, no_progress), EXAMINED_RECORDS)
        return any(isinstance(record, dict) and record.keys() >= set(columns) for _, record in first)
    except UsageError:  # reading the file raises it again, if its format is JSON
        return False


def with_labels(corpora: Sequence[LabelCorpus], given: Sequence[str]) -> list[LabelCorpus]:
    """The corpora with the given labels, those of a model, or without these with all that occur in them.

    Raises UsageError for a single label and for more than MAX_LABELS.
    """
    found: set[str] = set()
    for corpus in () if given else corpora:
        try:
            for _, _, label in corpus.labelled_texts():
                found.add(label)
                if len(found) > MAX_LABELS:
                    raise UsageError(
                        f"{corpora[0].name} has more than {MAX_LABELS:,} labels, which is too many for a classifier; "
                        'read the texts alone with `format="jsonl"`.'
                    )
        except BadFilesError as error:
            raise corpus.bad_files_error(str(error)) from None
    # Numbers by their values, before other texts
    in_order = sorted(found, key=lambda label: (0, len(label), label) if label.isdecimal() else (1, 0, label))
    labels = tuple(given or in_order)
    require(len(labels) != 1, "There is a single label; a classifier needs two or more.")
    check_labels(labels)
    return [replace(corpus, labels=labels) for corpus in corpora]


def encode_labelled_text(text: str, label: int, tokenizer: Tokenizer) -> np.ndarray:
    """The codes of a text and of the number of its label: (N,) of uint32.

    Raises UsageError for characters without an id, and TinyLMError if the `tokenizers` library fails.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = np.concatenate([np.array(begin, np.uint32), tokenizer.encode(text), np.array([label], np.uint32)])
    codes = CODES_PER_ID * ids
    codes[0] |= FIRST
    codes[-1] |= SCORED
    return codes


def _encode_batch(examples: list[LabelledText], tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([encode_labelled_text(*example, tokenizer) for example in examples])


LABEL_ENCODING = Encoding(record_batches, _encode_batch, CODES_PER_ID, MAX_LABELS)


class LabelTokens(ScoredTokens):
    """The texts in an array of codes, each with the number of its label as the last token.

    A text that is longer than a context is cut at its end, and keeps its label.
    """

    packs = False

    def tokens(self, index: int, inputs: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        ids, scored = super().tokens(index)
        kept = len(ids) - 1 if inputs is None else inputs
        return np.append(ids[:kept], ids[-1:]), np.append(scored[:kept], scored[-1:])

    def has_target(self, context: int) -> np.ndarray:
        return self.lengths > 1

    def numbers(self) -> np.ndarray:
        """The number of the label of each text, (N,)."""
        return np.asarray(self._codes[self._starts + self.lengths - 1], dtype=np.int64) // CODES_PER_ID

    def require_ids(self, vocab_size: int, labels: int) -> None:
        """Raise TinyLMError for a token id from `vocab_size` on or a label number from `labels` on."""
        numbers, largest = self.numbers(), ids_of(np.asarray(self._codes))
        largest[self._starts + self.lengths - 1] = 0
        if numbers.max(initial=0) >= labels or largest.max(initial=0) >= vocab_size:
            raise TinyLMError("The encoded text is damaged: it has an id or a label that the model does not have.")

    def describe_left_out(self, context: int, name: str) -> list[str]:
        cut = int((self.lengths - 1 > context).sum())
        if not cut:
            return []
        return [
            f"{cut:,} of {len(self):,} {name} texts are cut to the context of {context} tokens (the longest has "
            f"{self.lengths.max() - 1})."
        ]


def describe_labels(labels: Sequence[str], train: LabelTokens, val: LabelTokens | None) -> tuple[str, list[str]]:
    """A phrase with the labels and their numbers of texts, and warnings of labels without training texts and of labels
    that are equal but for case and blanks. val: `None` if the training texts are those for validation, too
    """
    trained = np.bincount(train.numbers(), minlength=len(labels))
    validated = 0 if val is None else np.bincount(val.numbers(), minlength=len(labels))
    counts = dict(zip(labels, (trained + validated).tolist(), strict=True))

    def listed(some: Sequence[str]) -> str:
        named = ", ".join(f"{label!r} ({counts[label]:,})" for label in some[:MAX_LISTED])
        return named + (f" and {len(some) - MAX_LISTED:,} others" if len(some) > MAX_LISTED else "")

    warnings = []
    if absent := [label for label, count in zip(labels, trained, strict=True) if not count]:
        warnings.append(
            f"The model cannot learn labels without a training text: {listed(absent)}. Give them some, or leave out "
            "their texts for validation."
        )
    alike: dict[str, list[str]] = {}
    for label in labels:
        alike.setdefault("".join(label.split()).casefold(), []).append(label)
    if groups := [some for some in alike.values() if len(some) > 1]:
        warnings.append(
            f"Labels that are equal but for case and blanks count as different ones: "
            f"{'; '.join(map(listed, groups[:MAX_LISTED]))}. Write alike what means the same."
        )
    return f"{len(labels):,} labels, with their numbers of texts: {listed(labels)}", warnings
