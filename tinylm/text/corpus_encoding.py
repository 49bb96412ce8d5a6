"""Split a corpus into training and validation text, and encode both parts into token files.

The validation text is the end of a continuous text. Of records (lines, JSON, pairs, conversations) it is a sample that
is drawn with a fixed seed: the last records of a file are often about something else than the others. A short text is
trained on as a whole and is its own validation text: a tenth of it shows nothing, and would be missing.
"""

import glob
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinylm.config.run import MAX_SHORT_TEXT, DataConfig
from tinylm.config.settings import TextSettings
from tinylm.config.validation import check_settings
from tinylm.errors import TinyLMError, UnknownCharactersError, UsageError
from tinylm.reporter import counted
from tinylm.system.cache_directory import private_folder
from tinylm.text.answer_spans import ChatFormat
from tinylm.text.chat_corpus import CHAT_ENCODING, ChatCorpus
from tinylm.text.compression import Progress, no_progress
from tinylm.text.corpus import (
    STANDARD_INPUT,
    Corpus,
    CorpusStats,
    RecordCorpus,
    Stream,
    document_end,
    slice_stream,
)
from tinylm.text.labels import LABEL_ENCODING, LabelCorpus
from tinylm.text.pairs import PairCorpus, PairTokens
from tinylm.text.preferences import PreferenceCorpus
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.text_cache import scan_or_recall
from tinylm.text.token_files import (
    SHARD_TOKENS,
    TEXT_ENCODING,
    Encoding,
    SplitDocuments,
    TokenFolder,
    encode_to_folder,
    token_key,
)
from tinylm.text.tokenizer import Tokenizer, describe_characters

MIN_TOKENS = {"train": 3, "val": 2}  # per part
DEFAULT_VAL_FRACTION = 0.1
MIN_SPLIT_LABELS = 50  # texts with labels: a classifier is judged by texts that it has not seen
DRAW_SEED = 0  # of validation records; the same in all runs, whose validation losses can then be compared
COUNTED_TOKENS = 1 << 20  # tokens that are decoded at a time, to count their bytes
EXAMINED_CONVERSATIONS = 256  # in which characters of the chat template are looked for

CORPUS_TYPES: dict[str, type[Corpus]] = {
    corpus.kind: corpus for corpus in (Corpus, PairCorpus, ChatCorpus, PreferenceCorpus, LabelCorpus)
}
CHAT_TYPES = {kind: corpus for kind, corpus in CORPUS_TYPES.items() if issubclass(corpus, ChatCorpus)}
ENCODINGS: dict[str, Encoding] = {
    **dict.fromkeys(CORPUS_TYPES, TEXT_ENCODING),
    **dict.fromkeys(CHAT_TYPES, CHAT_ENCODING),
    LabelCorpus.kind: LABEL_ENCODING,
}

Warn = Callable[[str], None]


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
    def chat(self) -> ChatFormat | None:
        """The format of conversations; `None` for other texts."""
        return self.corpus.chat if isinstance(self.corpus, ChatCorpus) else None

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the texts, in the order of their numbers; empty for other texts."""
        return self.corpus.labels if isinstance(self.corpus, LabelCorpus) else ()

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
        """The training text as input of its encoding in ENCODINGS: `train_stream`, or the examples of records."""
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

    Without `val_corpus` and `val_fraction`, a text of at most MAX_SHORT_TEXT characters (and of fewer than
    MIN_SPLIT_LABELS texts with labels) is its own validation text; of a longer one, the fraction is
    DEFAULT_VAL_FRACTION.

    Raises UsageError for a text that is empty or cannot be read, for a single pair or conversation of which a part is
    to be left, and for a `val_fraction` outside of (0, 1).
    """
    check_settings(TextSettings, {"val_fraction": val_fraction})
    stats = scan_corpus(corpus, progress)
    val_stats = scan_corpus(val_corpus, progress) if val_corpus is not None else None
    if val_corpus is None and val_fraction is None and _is_short(corpus, stats):
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


def _is_short(corpus: Corpus, stats: CorpusStats) -> bool:
    few_labels = not isinstance(corpus, LabelCorpus) or stats.documents < MIN_SPLIT_LABELS
    return stats.characters <= MAX_SHORT_TEXT and few_labels


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
    if written := _written_by_template(corpus, alphabet, missing):
        whose, missing = "characters that the chat template writes", written
        advice = "choose a `chat_template` without them, since they cannot be skipped"
    if written or unknown != "skip":
        raise UnknownCharactersError(
            f"{vocabulary_owner} has no id for {len(missing)} of the {whose}, {describe_characters(missing)}; "
            f"{advice}.",
            model if tokenizer.kind == "char" else None,
            corpus.paths,
        )


def _written_by_template(corpus: Corpus, alphabet: str, unknown: str) -> str:
    """The characters of `unknown` that the first conversations have outside of the contents of messages."""
    if not isinstance(corpus, ChatCorpus):
        return ""
    known = next((character for character in alphabet if character not in unknown and not character.isspace()), "")
    table = str.maketrans(dict.fromkeys(unknown, known))
    replaced = replace(corpus, drop_unknown=lambda text: text.translate(table))
    examples = itertools.islice(replaced.examples(), EXAMINED_CONVERSATIONS)
    written = {character for example in examples for character in "".join(corpus.chat.ordinary_text(example.text))}
    return "".join(character for character in unknown if character in written)


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


def check_encoder(tokenizer: Tokenizer, sample: Sequence[str], warn: Warn) -> None:
    """Compare the encoder with the `tokenizers` library on a sample; if any id differs, use the library, and warn."""
    encoder = tokenizer.encoder
    if not tokenizer.check_encoder(sample):
        warn(
            f"The ids of {encoder} for this text differ from those of the tokenizers library. The text is encoded with "
            "the library, which is slower. Install the version of gigatoken that tinylm requires, or report a bug."
        )


def is_resumable(split: SplitCorpus, folder: Path | None) -> bool:
    """Whether `encode_split`, if it is interrupted, continues when it is called again with the same arguments."""
    return folder is None and split.characters >= SHARD_TOKENS


def encode_split(
    split: SplitCorpus,
    tokenizer: Tokenizer,
    folder: Path | None = None,
    progress: Progress = no_progress,
    warn: Warn = lambda message: None,
    encoder: str | None = None,
) -> tuple[TokenFolder, DataConfig]:
    """Encode both parts into the token folder `folder`, by default one in the cache.

    `progress` receives the number of characters encoded, and `warn` a message if the ids of the encoder differ from
    those of the `tokenizers` library on a sample of the text. `encoder` replaces the name of the tokenizer's encoder in
    the key, to encode the text of a run again. Returns the token folder and the description of the text. Raises
    UsageError if either part is too short, and the errors of `encode_to_folder`.
    """
    kind = split.corpus.kind
    is_chat = isinstance(split.corpus, ChatCorpus)
    if not is_chat:  # gigatoken does not encode conversations
        val_sample = split.val_stats.sample if split.val_stats else ()
        check_encoder(tokenizer, [*split.stats.sample, *val_sample], warn)
    encoder = encoder or (tokenizer.encoder_with_special if is_chat else tokenizer.encoder)
    val_fingerprint = split.val_stats.fingerprint if split.val_stats else None
    key = token_key(
        split.stats.fingerprint, val_fingerprint, split.train_characters, tokenizer, encoder, split.val_records
    )
    path = folder or private_folder("tokens") / key
    # Windows cannot rename a folder that contains a mapped file, and a new run directory is renamed when complete.
    mapped = folder is None or os.name != "nt"
    documents = SplitDocuments(split.train_documents, split.val_documents, ENCODINGS[kind])
    resumable = is_resumable(split, folder)
    tokens = encode_to_folder(path, key, documents, tokenizer, progress, mapped=mapped, resumable=resumable)
    if split.val_corpus is not None and len(tokens.val) < MIN_TOKENS["val"]:
        raise UsageError(
            f"{split.val_corpus.name} has {len(tokens.val)} token, which is not scored; give more `val_data`."
        )
    for part, minimum, n_tokens in (
        ("training", MIN_TOKENS["train"], len(tokens.train)),
        ("validation", MIN_TOKENS["val"], len(tokens.val)),
    ):
        if n_tokens < minimum:
            raise UsageError(
                f"{split.corpus.name} leaves {counted(n_tokens, 'token')} for {part}, and at least {minimum} are "
                "needed; give more text, or another `val_fraction`."
            )
    data = DataConfig(
        kind=kind,
        corpus=_absolute(split.corpus),
        val_corpus=_absolute(split.val_corpus) if split.val_corpus else (),
        text_key=split.corpus.text_key,
        encoding=split.corpus.encoding,
        format=split.corpus.format,
        exclude=split.corpus.exclude,
        skip_bad=split.corpus.skip_bad,
        unknown="error" if split.corpus.drop_unknown is None else "skip",
        train_characters=split.train_characters,
        val_records=split.val_records,
        fingerprint=split.stats.fingerprint,
        val_fingerprint=val_fingerprint,
        encoder=encoder,
        tokens_in_run=folder is not None,
        characters=split.stats.characters,
        bytes=split.stats.bytes,
        documents=split.stats.documents,
        line_breaks=split.stats.line_breaks,
        train_tokens=len(tokens.train),
        val_tokens=len(tokens.val),
        val_bytes=_scored_bytes(tokens.val, tokenizer, split.corpus.format) if kind == Corpus.kind else None,
        train_pairs=len(PairTokens(tokens.train, tokenizer.end_of_text_id)) if kind == PairCorpus.kind else 0,
        train_on=split.corpus.train_on,
    )
    return tokens, data


def _scored_bytes(tokens: Tokens, tokenizer: Tokenizer, format: str) -> int:
    """The number of UTF-8 bytes of the tokens, (N,), of a corpus of this format, without the first."""
    return sum(
        tokenizer.decoded_size(tokens[start : start + COUNTED_TOKENS], document_end(format))[1]
        for start in range(1, len(tokens), COUNTED_TOKENS)
    )


def _absolute(corpus: Corpus) -> tuple[str, ...]:
    """The paths of a corpus as absolute paths; `-` is unchanged."""
    return tuple(path if path == STANDARD_INPUT else _absolute_path(path) for path in corpus.paths)


def _absolute_path(path: str) -> str:
    """Make a path or glob pattern absolute; a pattern is prefixed with the escaped path of the current folder."""
    if glob.has_magic(path) and not os.path.lexists(path):
        return str(Path(glob.escape(str(Path.cwd())), path))
    return str(Path(path).absolute())
