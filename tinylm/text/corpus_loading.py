"""Load, split and encode the texts that a user names, with progress and reports of skipped files and characters."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinylm.config.run import DataConfig
from tinylm.config.settings import TextSettings
from tinylm.config.validation import check_settings, declared_settings, describe_value, require
from tinylm.errors import UsageError
from tinylm.reporter import Reporter, counted
from tinylm.system.files import resolve_links, temporary_folder
from tinylm.text.answer_spans import ChatFormat
from tinylm.text.chat import LAYOUTS
from tinylm.text.chat_corpus import ChatCorpus
from tinylm.text.chat_tokens import FIRST
from tinylm.text.compression import SPOOL_FILE, content_suffix, display_name
from tinylm.text.corpus import STANDARD_INPUT, Corpus, CorpusStats, RecordCorpus, document_end, find_corpus
from tinylm.text.corpus_encoding import (
    CHAT_TYPES,
    CORPUS_TYPES,
    ENCODINGS,
    SplitCorpus,
    check_encoder,
    corpus_without_unknown,
    drop_unknown_characters,
    encode_split,
    is_resumable,
    require_known_characters,
    require_text,
    split_corpus,
)
from tinylm.text.encodings import first_text
from tinylm.text.file_selection import (
    BAD,
    CONVERTERS,
    EXCLUDED,
    conversation_keys,
    conversion_advice,
    describe_problems,
    describe_skipped,
    format_size,
    is_excluded,
    is_html,
    reject_json,
)
from tinylm.text.labels import LABEL_KEY, LabelCorpus, LabelTokens, describe_labels, has_labels, with_labels
from tinylm.text.readers import is_table, table_columns
from tinylm.text.run_tokens import encode_again, find_run_corpus, reopen_part
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.token_files import TokenFolder, encode_in_memory
from tinylm.text.tokenizer import Tokenizer, describe_characters

OTHER_FORMATS = {  # by the kind of text that a model takes: formats of other kinds, and why they do not fit
    "text": (("pairs",), "only an encoder-decoder takes them"),
    "pairs": (("text", "lines"), "an encoder-decoder takes pairs"),
}
RECORD_KEYS = {  # phrases for messages: the JSON keys of the kinds of corpus to which `text_key` does not apply
    "pairs": "pairs has the keys 'source' and 'target'",
    "chat": f"conversations has the keys {LAYOUTS}",
    "preferences": "preferences has the keys 'prompt', 'chosen' and 'rejected'",
}
NAMES_OF_RECORDS = {"text": "documents", "labels": "texts", "chat": "conversations"} | {
    kind: kind for kind in ("pairs", "preferences")
}
MAX_LISTED_KEYS = 10
MAX_COMPARED = 1 << 26  # tokens of a training text whose records are compared with those for validation


@dataclass(frozen=True, kw_only=True)
class TextSource(TextSettings):
    """Texts and how they are read. `paths` are files, folders and glob patterns, or - for standard input.

    `format`, `text_key`, `encoding`, `exclude`, `skip_bad` and `unknown` are the settings of the same names in a
    DataConfig. The validation text is at the path `val_data`, or else the share `val_fraction` of the text (default:
    see `split_corpus`). Conversations are rendered by `chat_template` (chatml or the path of a file; default: that
    of the model) and scored according to `train_on`. A setting that does not apply to the text is an error, unless its
    name is in `ignorable`; then it is ignored.
    """

    paths: tuple[str, ...]
    ignorable: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_settings(TextSettings, {name: getattr(self, name) for name in declared_settings(TextSettings)})


ChatFormatOf = Callable[[TextSource], ChatFormat]  # the format of conversations in a source


def load_text(
    source: TextSource,
    staging: Path,
    kind: str,
    reporter: Reporter,
    make_chat_format: ChatFormatOf | None = None,
    labels: Sequence[str] | None = None,
) -> SplitCorpus:
    """Find, scan and split the texts. `kind` is a default; standard input is copied into the folder `staging`.

    make_chat_format: returns the format of the conversations in a source. `None` if the model cannot be trained on
        conversations, which are then an error.
    labels: those of the model, or if empty, those of texts that have labels. `None` reads the texts alone.

    Raises UsageError for contradictory settings, for settings that do not apply to the text, and for a text that
    cannot be read, and TinyLMError if standard input cannot be copied.
    """
    if source.val_data is not None and source.val_fraction is not None:
        raise UsageError("`val_data` and `val_fraction` contradict each other; give one of them.")
    if source.val_data == STANDARD_INPUT and STANDARD_INPUT in source.paths:
        raise UsageError("Standard input cannot be both the text and `val_data`; put one of them into a file.")
    parts = [source.paths] if source.val_data is None else [source.paths, (source.val_data,)]
    corpus, *val_corpus = _find_corpora(source, parts, staging, kind, reporter, make_chat_format, labels)
    val_files = {resolve_links(file) for part in val_corpus for file in part.files}
    for file in corpus.files:
        if resolve_links(file) in val_files:
            reporter.warn(
                f"{file} is text for training and for validation, so the validation loss does not show what the model "
                "learns beyond it. Name another file with `val_data`."
            )
    with reporter.counting("reading", sum(part.size for part in (corpus, *val_corpus)), "bytes") as advance:
        split = split_corpus(corpus, val_corpus[0] if val_corpus else None, source.val_fraction, advance)
    for part in (corpus, *val_corpus):
        _report_conversations(part, reporter)
    own = None if split.validates_on_itself else split.val_stats
    _report_line_ends(split.stats.carriage_returns + (own.carriage_returns if own else 0), reporter)
    return split


def _find_corpora(
    source: TextSource,
    parts: Sequence[Sequence[str]],
    spool: Path,
    kind: str,
    reporter: Reporter,
    make_chat_format: ChatFormatOf | None,
    labels: Sequence[str] | None,
) -> list[Corpus]:
    """Find one corpus per list of paths in `parts`, and report skipped files.

    Raises the errors of `find_corpus`, and UsageError for a setting that applies to none of the corpora.
    """
    format = source.format
    requires_records = source.text_key is not None and "text_key" not in source.ignorable
    others, reason = OTHER_FORMATS.get(kind, ((), ""))
    if format in others:
        if "format" not in source.ignorable:
            raise UsageError(f'`format="{format}"` does not fit the model: {reason}. Leave it out.')
        format = "auto"
    fields: dict[str, Any] = {}
    if format in CHAT_TYPES:
        kind, fields["chat"] = format, _chat_format(source, make_chat_format, "`format`")
    if format == LabelCorpus.kind:
        require(labels is not None, f'`format="{format}"` is for classifiers, which encoders and decoders can become.')
        kind = format
    if kind in RECORD_KEYS and requires_records:
        raise UsageError(f"`text_key` is for documents; JSONL of {RECORD_KEYS[kind]}. Leave `text_key` out.")
    text_key = "text" if source.text_key is None else source.text_key
    fields["accepted_keys"] = frozenset() if labels is None else frozenset((text_key, LABEL_KEY))
    fields |= {"exclude": source.excluded, "skip_bad": source.skip_bad}
    corpora = [
        find_corpus(paths, text_key, source.encoding, spool, CORPUS_TYPES[kind], format, **fields) for paths in parts
    ]
    detects = kind == Corpus.kind and format == "auto" and labels is not None
    if (detects or kind == LabelCorpus.kind) and _are_labelled(corpora, reporter, required=not detects):
        kind = LabelCorpus.kind
        corpora = [_as(corpus, LabelCorpus) for corpus in corpora]
        if detects:
            reporter.note(
                f"{corpora[0].name}: the records have the key {LABEL_KEY!r}, so a classifier is trained; "
                '`format="jsonl"` reads the texts alone.'
            )
    if kind == Corpus.kind and format == "auto" and not requires_records and (found := _chat_kind(corpora)):
        kind, chosen = found, _chat_format(source, make_chat_format, corpora[0].name)
        corpora = [_as(corpus, CHAT_TYPES[kind], chat=chosen) for corpus in corpora]
    if kind not in CHAT_TYPES:
        _reject_chat_settings(source)
    labelled = [corpus for corpus in corpora if isinstance(corpus, LabelCorpus)]
    if labelled:
        corpora = list(with_labels(labelled, labels or ()))
    if kind == Corpus.kind and format == "auto":
        _report_tables(corpora, reporter, required=requires_records)
        _report_html(corpora, reporter)
    if requires_records and not any(corpus.has_keys for corpus in corpora):
        raise UsageError(
            "`text_key` is for JSONL, Parquet and CSV, and no file is such; leave it out, or read the files as JSONL "
            'with `format="jsonl"`.'
        )
    for corpus in corpora:
        _report_skipped(corpus, reporter)
    _report_unused_patterns(corpora, source, reporter)
    return corpora


def _report_tables(corpora: Sequence[Corpus], reporter: Reporter, *, required: bool) -> None:
    """Warn of CSV and TSV that are read as plain text; raise UsageError for the first if a column is `required`."""
    texts = [
        (corpus, file) for corpus in corpora for file in corpus.files if is_table(file) and not corpus.has_records(file)
    ]
    for corpus, file in texts[:1]:
        columns = ", ".join(table_columns(file, corpus.encoding))[:200]
        if required:
            raise UsageError(
                f"{display_name(file)}: no column {corpus.text_key!r} (found: {columns}); name the column of the text "
                "with `text_key`."
            )
        others = f" and {len(texts) - 1:,} others are" if len(texts) > 1 else " is"
        pairs = '; `format="pairs"` reads TSV as sources and targets' if content_suffix(file) == ".tsv" else ""
        reporter.warn(
            f"{display_name(file)}{others} read as plain text, with the first line and the separators. `text_key` "
            f"takes the texts of a column ({columns}){pairs}."
        )


def _report_html(corpora: Sequence[Corpus], reporter: Reporter) -> None:
    files = [file for corpus in corpora for file in corpus.files if is_html(file, corpus.encoding)]
    if files:
        others = "" if len(files) == 1 else f" (and {len(files) - 1:,} more)"
        reporter.note(
            f"{display_name(files[0])}{others} is HTML, and is read with its tags. For the text alone, convert it "
            f"first, for example with {CONVERTERS['.html']}."
        )


def _report_unused_patterns(corpora: Sequence[Corpus], source: TextSource, reporter: Reporter) -> None:
    """Warn of patterns of `exclude` that match no file, and may be misspelled."""
    excluded = [file for corpus in corpora for file in corpus.skipped if file.reason == EXCLUDED]
    for pattern in source.excluded:
        used = any(is_excluded(file.path, Path(file.folder), [pattern]) for file in excluded)
        if not used and "exclude" not in source.ignorable:
            reporter.warn(f"No file matches the pattern {pattern!r} of `exclude`, so it leaves none out.")


def _are_labelled(corpora: Sequence[Corpus], reporter: Reporter, *, required: bool) -> bool:
    """Whether all files have texts with labels; a warning if only some of them have.

    Raises UsageError for a file that has none if they are `required`, and for JSON with labels beside other texts in a
    file without a JSON suffix.
    """
    found = [
        (corpus, file, has_labels(file, corpus.encoding, corpus.text_key))
        for corpus in corpora
        for file in corpus.files
    ]
    labelled = [(corpus, file) for corpus, file, has in found if has]
    others = [file for _, file, has in found if not has]
    if required and others:
        raise UsageError(
            f"{display_name(others[0])} has no texts with labels, which a classifier takes: records with the keys "
            f"{corpora[0].text_key!r} and {LABEL_KEY!r}, as JSONL, Parquet or CSV."
        )
    if labelled and others:
        for corpus, file in labelled:
            if not corpus.has_records(file):
                reject_json(file, first_text(file, corpus.encoding))
        reporter.warn(
            f"The labels in {display_name(labelled[0][1])} are not read, since {display_name(others[0])} has none."
        )
    return bool(labelled) and not others


def _chat_kind(corpora: Sequence[Corpus]) -> str | None:
    """The kind of the first conversations in the corpora, a key of CHAT_TYPES; `None` without conversations."""
    for corpus in corpora:
        for file in corpus.files:
            if keys := conversation_keys(file, corpus.encoding):
                kinds = [kind for kind, corpus_type in CHAT_TYPES.items() if corpus_type.has_keys_of(keys)]
                return kinds[-1]  # the most special one
    return None


def _chat_format(source: TextSource, make_chat_format: ChatFormatOf | None, subject: str) -> ChatFormat:
    """The format of the conversations in a source. Raises UsageError if the model takes none."""
    if make_chat_format is None:
        raise UsageError(
            f"{subject} is for conversations (chat), which only the training and the evaluation of decoders take."
        )
    return make_chat_format(source)


def _reject_chat_settings(source: TextSource) -> None:
    """Raise UsageError for settings of conversations."""
    given = [name for name in ("chat_template", "train_on") if getattr(source, name) and name not in source.ignorable]
    if given:
        names = " and ".join(f"`{name}`" for name in given)
        raise UsageError(f"{names} is for conversations, and the text has none: JSONL with {LAYOUTS}.")


def _as(corpus: Corpus, corpus_type: type[Corpus], **fields: Any) -> Corpus:
    kept = ("paths", "files", "text_key", "encoding", "format", "skipped", "exclude", "skip_bad")
    return corpus_type(**{name: getattr(corpus, name) for name in kept}, **fields)


def _report_skipped(corpus: Corpus, reporter: Reporter) -> None:
    """Report the skipped files of each folder, as a warning if they are larger than the corpus, and those that cannot
    be read.
    """
    bad = [file for file in corpus.skipped if file.reason == BAD]
    others = [file for file in corpus.skipped if file.reason != BAD]
    for folder in dict.fromkeys(file.folder for file in others):
        files = [file for file in others if file.folder == folder]
        report = reporter.warn if sum(file.size for file in files) > corpus.size else reporter.note
        read = format_size(corpus.size)
        report(f"Skipped in {folder}: {describe_skipped(files)}. Read: {read}.{conversion_advice(files)}")
    if bad:
        total = len(bad) + len(corpus.files)
        reporter.warn(f"Skipped {len(bad):,} of {total:,} files, which cannot be read: {describe_problems(bad)}.")


def _report_line_ends(count: int, reporter: Reporter) -> None:
    if count:
        reporter.note(f"{count:,} line ends of the text, \\r\\n or \\r, are read as \\n.")


def _report_conversations(corpus: Corpus, reporter: Reporter) -> None:
    if not isinstance(corpus, ChatCorpus):
        return
    if corpus.unused_keys:
        names = ", ".join(map(describe_value, corpus.unused_keys[:MAX_LISTED_KEYS]))
        others = ", ..." if len(corpus.unused_keys) > MAX_LISTED_KEYS else ""
        reporter.note(f"{corpus.name}: these keys of its conversations have no effect: {names}{others}.")
    if corpus.n_with_literal_tokens:
        reporter.warn(
            f"{corpus.name}: {corpus.n_with_literal_tokens:,} of its conversations contain the text of special tokens. "
            "In messages and tools it is encoded as other text; only the chat template writes special tokens."
        )


def handle_unknown_characters(
    split: SplitCorpus,
    tokenizer: Tokenizer,
    unknown: str,
    reporter: Reporter,
    *,
    vocabulary_owner: str,
    model: Path | None,
) -> SplitCorpus:
    """Return the split text without the characters that have no id, with a warning, if `unknown` is "skip".

    Raises UnknownCharactersError for such characters if `unknown` is "error" or a chat template writes them
    (`vocabulary_owner` and `model` as for `require_known_characters`), and UsageError if no text is left.
    """
    unknown_characters = tokenizer.unknown_characters(split.alphabet)
    if not unknown_characters:
        return split
    require_known_characters(split.corpus, split.alphabet, tokenizer, vocabulary_owner, model, unknown=unknown)
    parts = [part for part in (split.corpus, split.val_corpus) if part]
    with reporter.counting("reading", sum(part.size for part in parts), "bytes") as advance:
        remaining = drop_unknown_characters(split, tokenizer, advance)
    _report_dropped(unknown_characters, split.characters - remaining.characters, reporter)
    for part, before, after in (
        (remaining.corpus, split.stats, remaining.stats),
        (remaining.val_corpus, split.val_stats, remaining.val_stats),
    ):
        if part is not None and before is not None and after is not None:
            _report_left_out(part, before, after, reporter)
    return remaining


def _report_dropped(characters: str, count: int, reporter: Reporter) -> None:
    reporter.warn(
        f"Skipped {counted(count, 'character')} of the text without an id, "
        f"{counted(len(characters), 'different one')} ({describe_characters(characters)})."
    )


def _report_left_out(corpus: Corpus, before: CorpusStats, after: CorpusStats, reporter: Reporter) -> None:
    """Name the records that no longer have a text that they need, once unknown characters are skipped."""
    total, left = (stats.documents // corpus.documents_per_record for stats in (before, after))
    if left < total:
        others = "; ..." if total - left > len(corpus.left_out) else ""
        places = f" ({'; '.join(corpus.left_out)}{others})" if corpus.left_out else ""
        reporter.warn(
            f"{total - left:,} of {total:,} {NAMES_OF_RECORDS[corpus.kind]} are left out, since a text of theirs has "
            f"no other characters{places}."
        )


def encode_text(
    split: SplitCorpus, tokenizer: Tokenizer, staging: Path, reporter: Reporter
) -> tuple[TokenFolder, DataConfig]:
    """Encode both parts into the cache, or, for text from standard input, into tokens/ of the new run in `staging`.

    The copy of standard input there is deleted. Raises UsageError if either part is too short, and TinyLMError if
    the token files cannot be written.
    """
    piped = any(STANDARD_INPUT in part.paths for part in (split.corpus, split.val_corpus) if part)
    folder = staging / "tokens" if piped else None
    with reporter.counting("encoding", split.characters, "characters") as advance:
        try:
            encoded = encode_split(split, tokenizer, folder, advance, reporter.warn)
        except BaseException as error:
            if not isinstance(error, Exception) and is_resumable(split, folder):
                reporter.note("Complete token files are kept: the same command continues the encoding.")
            raise
    if piped:
        (staging / SPOOL_FILE).unlink()
    tokens, _ = encoded
    if split.labels:
        note, warnings = describe_labels(split.labels, LabelTokens(tokens.train), LabelTokens(tokens.val))
        reporter.note(f"{split.corpus.name} has {note}.")
        for warning in warnings:
            reporter.warn(warning)
    _report_repeated(split, tokens, tokenizer, reporter)
    return encoded


def _report_repeated(split: SplitCorpus, tokens: TokenFolder, tokenizer: Tokenizer, reporter: Reporter) -> None:
    """Count the records for validation that are training records, too. The labels of texts may differ."""
    if not split.corpus.is_records or split.validates_on_itself or len(tokens.train) > MAX_COMPARED:
        return
    val = list(_records(tokens.val, split.corpus, tokenizer.end_of_text_id))
    repeated = set(val).intersection(_records(tokens.train, split.corpus, tokenizer.end_of_text_id))
    if count := sum(record in repeated for record in val):
        name = NAMES_OF_RECORDS[split.corpus.kind]
        reporter.note(
            f"{count:,} of {len(val):,} {name} for validation are training {name}, too, and do not show what the model "
            "learns beyond these; leave out duplicates."
        )


def _records(tokens: Tokens, corpus: Corpus, end_of_text_id: int) -> Iterator[bytes]:
    """The ids of each record of one part, without labels."""
    codes = np.asarray(tokens)
    if isinstance(corpus, RecordCorpus):
        starts = np.flatnonzero(codes & FIRST)
    else:
        starts = np.append(0, np.flatnonzero(codes[:-1] == end_of_text_id) + 1)
    edges = [*starts[:: corpus.documents_per_record].tolist(), len(codes)]
    for start, stop in itertools.pairwise(edges):
        separated = not isinstance(corpus, RecordCorpus) and codes[stop - 1] == end_of_text_id
        yield codes[start : stop - (separated or corpus.kind == LabelCorpus.kind)].tobytes()


def encode_recorded_text(
    run: Path,
    data: DataConfig,
    tokenizer: Tokenizer,
    source: TextSource,
    reporter: Reporter,
    chat_template: str | None = None,
    labels: Sequence[str] = (),
) -> TokenFolder:
    """Encode the text of a run whose token files are no longer in the cache. Only the paths of `source` are used.

    chat_template, labels: of the run.

    Raises UsageError unless `source` is the text that the run was trained on, and TinyLMError as `encode_again` does.
    """
    if STANDARD_INPUT in (*source.paths, source.val_data):
        raise UsageError("With `resume`, the text is read from files; put standard input into a file.")
    corpora = [
        find_run_corpus(paths, data, tokenizer, chat_template, labels)
        for paths in (source.paths, (source.val_data,) if source.val_data else ())
        if paths
    ]
    corpus, val_corpus = corpora[0], corpora[1] if len(corpora) > 1 else None
    if val_corpus is None and data.val_fingerprint == data.fingerprint:
        val_corpus = corpus
    return encode_again(run, data, tokenizer, corpus, val_corpus, reporter)


class EvaluationTokens(NamedTuple):
    """An encoded text.

    kind: of the corpus. codes: (N,), ids, or codes of conversations. names: of the documents (see `Corpus.stream`), ""
    for those of pairs; no names for conversations and for the validation text of a run. document_end: the text that
    each end-of-text id stands for.
    """

    kind: str
    codes: np.ndarray
    names: Sequence[str] = ()
    document_end: str = ""


@contextlib.contextmanager
def evaluation_source(
    files: str | Path | Sequence[str | Path] | TextSource | None,
    text: str | None,
    kind: str,
    reading: Mapping[str, Any],
) -> Iterator[TextSource | None]:
    """Context manager for the source of an evaluation: `files`, or a temporary file that contains `text` and is read as
    a corpus of this kind. `None` if neither is given.

    reading: fields of TextSource for `files` that are not a TextSource. For `text`, only `unknown` applies.

    Raises UsageError if both are given.
    """
    require(files is None or text is None, "Files and a text contradict each other; give one of them.")
    if text is not None:
        with temporary_folder() as folder:
            file = folder / "text"
            file.write_bytes(text.encode())
            yield TextSource(paths=(str(file),), format=kind, unknown=reading["unknown"])
    elif files is None or isinstance(files, TextSource):
        yield files
    else:
        yield TextSource(paths=tuple(map(str, (files,) if isinstance(files, str | Path) else files)), **reading)


def evaluation_tokens(
    source: TextSource | None,
    run: Path,
    data: DataConfig | None,
    tokenizer: Tokenizer,
    kind: str,
    reporter: Reporter,
    make_chat_format: ChatFormatOf | None,
    labels: Sequence[str] | None = None,
) -> EvaluationTokens:
    """Encode the text, pairs or conversations of a source in memory. Without a source, open the validation tokens of
    the run.

    kind, make_chat_format, labels: as for `load_text`.

    No file is written except a temporary copy of standard input, which is read twice. Raises UsageError for a text that
    cannot be read or is empty, for unknown characters unless the source skips them, and if neither a source nor `data`
    is given, and TinyLMError if the validation tokens are missing or damaged.
    """
    if source is None:
        if data is None:
            raise UsageError(f"{run} has no validation {kind} of its own; name a file to evaluate on.")
        name = "conversations" if data.is_chat else "texts" if data.has_labels else data.kind
        reporter.note(f"Evaluating on the validation {name} of {run}.")
        codes = np.asarray(reopen_part(run, data, tokenizer, "val"))
        return EvaluationTokens(data.kind, codes, document_end=document_end(data.format))
    names: list[str] = []
    with opened_corpus(source, kind, reporter, make_chat_format, labels) as corpus:
        corpus, stats = known_text(corpus, tokenizer, source.unknown, run, reporter)
        with reporter.counting("encoding", stats.characters, "characters") as advance:
            if not isinstance(corpus, ChatCorpus):
                check_encoder(tokenizer, stats.sample, reporter.warn)
            documents = corpus.examples() if isinstance(corpus, RecordCorpus) else corpus.stream(started=names.append)
            codes = encode_in_memory(documents, tokenizer, ENCODINGS[corpus.kind], advance)
        return EvaluationTokens(corpus.kind, codes, names, document_end(corpus.format))


@contextlib.contextmanager
def opened_corpus(
    source: TextSource,
    kind: str,
    reporter: Reporter,
    make_chat_format: ChatFormatOf | None = None,
    labels: Sequence[str] | None = None,
) -> Iterator[Corpus]:
    """Context manager that finds the corpus of a source; the other arguments and errors are those of `load_text`.

    Standard input is copied to a temporary file.
    """
    piped = STANDARD_INPUT in source.paths
    with temporary_folder() if piped else contextlib.nullcontext(Path()) as folder:
        (corpus,) = _find_corpora(source, [source.paths], folder, kind, reporter, make_chat_format, labels)
        yield corpus


def known_text(
    corpus: Corpus, tokenizer: Tokenizer, unknown: str, run: Path, reporter: Reporter
) -> tuple[Corpus, CorpusStats]:
    """The corpus and its statistics. If `unknown` is "skip", characters without an id in `tokenizer` are removed from
    the corpus, but counted in the statistics. `run`: the run of the tokenizer, for messages.

    Raises UsageError if there is no text, or none with ids, and UnknownCharactersError for unknown characters if
    `unknown` is "error" or a chat template writes them.
    """
    stats = corpus.scan()
    _report_conversations(corpus, reporter)
    _report_line_ends(stats.carriage_returns, reporter)
    require_text(corpus, stats)
    unknown_characters = tokenizer.unknown_characters(stats.alphabet)
    if not unknown_characters:
        return corpus, stats
    require_known_characters(corpus, stats.alphabet, tokenizer, "The model", run, unknown=unknown)
    corpus = corpus_without_unknown(corpus, tokenizer)
    remaining = corpus.scan()
    require_text(corpus, remaining)
    _report_dropped(unknown_characters, stats.characters - remaining.characters, reporter)
    _report_left_out(corpus, stats, remaining, reporter)
    return corpus, stats
