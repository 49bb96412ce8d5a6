"""Load, split and encode the texts that a user names, with progress and reports of skipped files and characters."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tinylm.config.jobs import all_data, applicable, listed, rows_on
from tinylm.config.run import DataConfig
from tinylm.config.validation import require
from tinylm.errors import UsageError
from tinylm.jobs.encoding import check_encoder, encode_split, is_resumable
from tinylm.jobs.job import EvaluationTokens, Reader, job_on
from tinylm.jobs.run_tokens import reopen_part
from tinylm.reporter import Reporter, counted
from tinylm.system.files import resolve_links, temporary_folder
from tinylm.text.compression import SPOOL_FILE
from tinylm.text.corpus import (
    STANDARD_INPUT,
    Corpus,
    CorpusStats,
    RecordCorpus,
    as_corpus,
    document_end,
    find_corpus,
)
from tinylm.text.file_selection import (
    BAD,
    EXCLUDED,
    conversion_advice,
    describe_problems,
    describe_skipped,
    format_size,
    is_excluded,
)
from tinylm.text.source import TextSource
from tinylm.text.split import (
    SplitCorpus,
    corpus_without_unknown,
    drop_unknown_characters,
    require_known_characters,
    require_text,
    split_corpus,
)
from tinylm.text.token_files import TokenFolder, encode_in_memory
from tinylm.text.tokenizer import Tokenizer, describe_characters

TEXT_FORMATS = {"lines": "text"}  # formats of a kind of data that have a name of their own
MAX_COMPARED = 1 << 26  # tokens of a training text whose records are compared with those for validation


def load_text(source: TextSource, staging: Path, reader: Reader, reporter: Reporter) -> SplitCorpus:
    """Find, scan and split the texts. Standard input is copied into the folder `staging`.

    Raises UsageError for contradictory settings, for settings that do not apply to the data, and for data that cannot
    be read or that the reader does not take, and TinyLMError if standard input cannot be copied.
    """
    if source.val_data is not None and source.val_fraction is not None:
        raise UsageError("`val_data` and `val_fraction` contradict each other; give one of them.")
    if source.val_data == STANDARD_INPUT and STANDARD_INPUT in source.paths:
        raise UsageError("Standard input cannot be both the text and `val_data`; put one of them into a file.")
    parts = [source.paths] if source.val_data is None else [source.paths, (source.val_data,)]
    corpus, *val_corpus = _find_corpora(source, parts, staging, reader, reporter)
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
        job_on(part.kind).report_read(part, reporter)
    own = None if split.validates_on_itself else split.val_stats
    _report_line_ends(split.stats.carriage_returns + (own.carriage_returns if own else 0), reporter)
    return split


def _find_corpora(
    source: TextSource, parts: Sequence[Sequence[str]], spool: Path, reader: Reader, reporter: Reporter
) -> list[Corpus]:
    """Find one corpus per list of paths in `parts`, and report skipped files.

    Raises the errors of `find_corpus`, and UsageError for data that the reader does not take and for a setting that
    applies to none of the corpora.
    """
    kinds = reader.data_kinds
    kind, format = kinds[0], source.format
    wanted = TEXT_FORMATS.get(format, format)
    if wanted in all_data() and wanted not in kinds:
        if "format" not in source.ignorable:
            raise UsageError(f'`format="{format}"` does not fit the model, which takes {_listed(kinds)}; leave it out.')
        format = "auto"
    elif wanted in all_data():
        kind = wanted
    needs_records = source.text_key is not None and "text_key" not in source.ignorable
    job, text_key = job_on(kind), source.text_key or "text"
    accepted = [keys for other in kinds if (keys := job_on(other).accepted_keys(text_key))]

    fields: dict[str, Any] = {"exclude": source.excluded, "skip_bad": source.skip_bad}
    if job.corpus is not Corpus:
        fields |= job.fields(_without_inapplicable(source, kind), reader)
    how: Any = (text_key, source.encoding, spool, job.corpus, format, accepted)
    corpora = [find_corpus(paths, *how, **fields) for paths in parts]
    if format == "auto" and job.corpus is Corpus:
        for other in _others(kinds, needs_records):
            if job_on(other).recognises(corpora, reporter):
                if other not in kinds:
                    raise UsageError(f"{corpora[0].name} has {_listed([other])}, and the model takes {_listed(kinds)}.")
                kind, job = other, job_on(other)
                fields = job.fields(_without_inapplicable(source, kind), reader)
                corpora = [as_corpus(corpus, job.corpus, **fields) for corpus in corpora]
                break
    source = _without_inapplicable(source, kind)
    corpora = job.opened(corpora, reader, reporter)
    if format == "auto":
        job.report_found(corpora, reporter, needs_records=needs_records)
    if needs_records and not any(corpus.has_keys for corpus in corpora):
        raise UsageError(
            "`text_key` is for JSONL, Parquet and CSV, and no file is such; leave it out, or read the files as JSONL "
            'with `format="jsonl"`.'
        )
    for corpus in corpora:
        _report_skipped(corpus, reporter)
    _report_unused_patterns(corpora, source, reporter)
    return corpora


def _without_inapplicable(source: TextSource, kind: str) -> TextSource:
    """The source without ignorable settings that do not apply to this kind of data. Raises UsageError for others."""
    kept = applicable(TextSource, source.given, rows_on(kind), source.ignorable)
    dropped: dict[str, Any] = dict.fromkeys(source.given.keys() - kept.keys())
    return replace(source, **dropped)


def _others(kinds: Sequence[str], needs_records: bool) -> Iterator[str]:
    """The kinds of data that plain text may turn out to be, the most special ones first.

    needs_records: whether the text is under a key that the user named
    """
    for kind in reversed(all_data()):
        if job_on(kind).shares_text:
            if kind in kinds:
                yield kind
        elif not needs_records:
            yield kind


def _listed(kinds: Sequence[str]) -> str:
    """What a user calls these kinds of data."""
    return listed([rows_on(kind)[0].noun for kind in kinds], "or")


def _report_unused_patterns(corpora: Sequence[Corpus], source: TextSource, reporter: Reporter) -> None:
    """Warn of patterns of `exclude` that match no file, and may be misspelled."""
    excluded = [file for corpus in corpora for file in corpus.skipped if file.reason == EXCLUDED]
    for pattern in source.excluded:
        used = any(is_excluded(file.path, Path(file.folder), [pattern]) for file in excluded)
        if not used and "exclude" not in source.ignorable:
            reporter.warn(f"No file matches the pattern {pattern!r} of `exclude`, so it leaves none out.")


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
            f"{total - left:,} of {total:,} {rows_on(corpus.kind)[0].records} are left out, since a text of theirs has "
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
    job_on(split.corpus.kind).report_encoded(split, tokens, reporter)
    _report_repeated(split, tokens, tokenizer, reporter)
    return encoded


def _report_repeated(split: SplitCorpus, tokens: TokenFolder, tokenizer: Tokenizer, reporter: Reporter) -> None:
    """Count the records for validation that are training records, too. The labels of texts may differ."""
    if not split.corpus.is_records or split.validates_on_itself or len(tokens.train) > MAX_COMPARED:
        return
    job = job_on(split.corpus.kind)
    val, train = (
        list(job.record_ids(part, split.corpus, tokenizer.end_of_text_id)) for part in (tokens.val, tokens.train)
    )
    repeated = set(val).intersection(train)
    if count := sum(record in repeated for record in val):
        name = rows_on(split.corpus.kind)[0].records
        reporter.note(
            f"{count:,} of {len(val):,} {name} for validation are training {name}, too, and do not show what the model "
            "learns beyond these; leave out duplicates."
        )


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


def known_text(
    corpus: Corpus, tokenizer: Tokenizer, unknown: str, run: Path, reporter: Reporter
) -> tuple[Corpus, CorpusStats]:
    """The corpus and its statistics. If `unknown` is "skip", characters without an id in `tokenizer` are removed from
    the corpus, but counted in the statistics. `run`: the run of the tokenizer, for messages.

    Raises UsageError if there is no text, or none with ids, and UnknownCharactersError for unknown characters if
    `unknown` is "error" or a chat template writes them.
    """
    stats = corpus.scan()
    job_on(corpus.kind).report_read(corpus, reporter)
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


def evaluation_tokens(
    source: TextSource | None,
    run: Path,
    data: DataConfig | None,
    tokenizer: Tokenizer,
    reader: Reader,
    reporter: Reporter,
) -> EvaluationTokens:
    """Encode the data of a source in memory. Without a source, open the validation tokens of the run.

    No file is written except a temporary copy of standard input, which is read twice. Raises UsageError for data that
    cannot be read, are empty or are not of a kind that the reader takes, for unknown characters unless the source skips
    them, and if neither a source nor `data` is given, and TinyLMError if the validation tokens are missing or damaged.
    """
    if source is None:
        if data is None:
            raise UsageError(f"{run} has no validation {reader.data_kinds[0]} of its own; name a file to evaluate on.")
        reporter.note(f"Evaluating on the validation {_records_of(data)} of {run}.")
        codes = np.asarray(reopen_part(run, data, tokenizer, "val"))
        return EvaluationTokens(data.kind, codes, document_end=document_end(data.format))
    names: list[str] = []
    with opened_corpus(source, reader, reporter) as corpus:
        job = job_on(corpus.kind)
        corpus, stats = known_text(corpus, tokenizer, source.unknown, run, reporter)
        with reporter.counting("encoding", stats.characters, "characters") as advance:
            if not job.encoding.has_special:
                check_encoder(tokenizer, stats.sample, reporter.warn)
            documents = corpus.examples() if isinstance(corpus, RecordCorpus) else corpus.stream(started=names.append)
            codes = encode_in_memory(documents, tokenizer, job.encoding, advance)
        return EvaluationTokens(corpus.kind, codes, names, document_end(corpus.format))


def _records_of(data: DataConfig) -> str:
    return "text" if data.is_plain_text else rows_on(data.kind)[0].records


@contextlib.contextmanager
def opened_corpus(source: TextSource, reader: Reader, reporter: Reporter) -> Iterator[Corpus]:
    """Context manager that finds the corpus of a source; errors are those of `load_text`.

    Standard input is copied to a temporary file.
    """
    piped = STANDARD_INPUT in source.paths
    with temporary_folder() if piped else contextlib.nullcontext(Path()) as folder:
        (corpus,) = _find_corpora(source, [source.paths], folder, reader, reporter)
        yield corpus


@dataclass(frozen=True)
class ModelReader:
    """A Reader for a model with these labels, this tokenizer and this chat template; by default, of plain text.

    tokenizer, chat_template: `None` for those of ChatML. adds_tokens: see Reader
    """

    data_kinds: tuple[str, ...] = ("text",)
    labels: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    adds_tokens: bool = False
