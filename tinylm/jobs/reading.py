"""Find, read and split the texts that a user names, and report what is not read or read in another way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinylm.config.jobs import all_data, applicable, listed, rows_on
from tinylm.errors import UsageError, concerning
from tinylm.jobs.job import Reader, job_on
from tinylm.reporter import Reporter
from tinylm.system.files import resolve_links
from tinylm.text.corpus import Corpus, CorpusStats, as_corpus, find_corpus
from tinylm.text.file_selection import (
    BAD,
    EXCLUDED,
    TextSource,
    conversion_advice,
    describe_problems,
    describe_skipped,
    format_size,
    is_excluded,
)
from tinylm.text.files import STANDARD_INPUT
from tinylm.text.split import SplitCorpus, split_corpus
from tinylm.text.tokenizer import Tokenizer

TEXT_FORMATS = {"lines": "text"}  # formats of a kind of data that have a name of their own


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


def load_text(source: TextSource, staging: Path, reader: Reader, reporter: Reporter) -> SplitCorpus:
    """Find, scan and split the texts. Standard input is copied into the folder `staging`.

    Raises UsageError for contradictory settings, for settings that do not apply to the data, and for data that cannot
    be read or that the reader does not take, and TinyLMError if standard input cannot be copied.
    """
    if source.val_data is not None and source.val_fraction is not None:
        raise UsageError("`val_data` and `val_fraction` contradict each other; give one of them.")
    if source.val_data == STANDARD_INPUT and STANDARD_INPUT in source.paths:
        raise UsageError("Standard input cannot be both the text and `val_data`; put one of them into a file.")

    # Find the files
    corpora = find_corpora(source, staging, reader, reporter)
    val_files = {resolve_links(file) for corpus in corpora[1:] for file in corpus.files}
    for file in corpora[0].files:
        if resolve_links(file) in val_files:
            reporter.warn(
                f"{file} is text for training and for validation, so the validation loss does not show what the model "
                "learns beyond it. Name another file with `val_data`."
            )

    # Read them
    with reporter.counting("reading", sum(part.size for part in corpora), "bytes") as advance:
        split = split_corpus(corpora, source.val_fraction, advance)
    report_read(corpora, split.all_stats, reporter)
    return split


def find_corpora(source: TextSource, spool: Path, reader: Reader, reporter: Reporter) -> list[Corpus]:
    """Find the corpus of a source, and the one of its `val_data` if there is any, and report skipped files.

    spool: folder for a copy of standard input

    Raises the errors of `find_corpus`, and UsageError for data that the reader does not take and for a setting that
    applies to none of the corpora.
    """
    kinds, format, text_key = reader.data_kinds, source.format, source.text_key or "text"
    needs_records = source.text_key is not None and "text_key" not in source.ignorable

    # The kind of data: the one that the format names, or else the default of the model
    kind = TEXT_FORMATS.get(format, format)
    if kind not in all_data():
        kind = kinds[0]
    elif kind not in kinds:
        if "format" not in source.ignorable:
            raise UsageError(f'`format="{format}"` does not fit the model, which takes {_listed(kinds)}; leave it out.')
        kind, format = kinds[0], "auto"

    # The files
    job, fields = job_on(kind), {}
    if job.corpus is not Corpus:
        fields = job.fields(_applicable(source, kind), reader)
    accepted = [keys for other in kinds if (keys := job_on(other).accepted_keys(text_key))]
    how: Any = (text_key, source.encoding, spool, job.corpus, format, accepted, source.excluded, source.skip_bad)
    corpora = [find_corpus(source.paths, *how, **fields)]
    if source.val_data is not None:
        with concerning("val_data"):
            corpora.append(find_corpus((source.val_data,), *how, **fields))

    # The kind of data by its first records, the most special kinds first
    if format == "auto" and job.corpus is Corpus:
        for other in reversed(all_data()):
            possible = other in kinds if job_on(other).shares_text else not needs_records
            if possible and job_on(other).recognises(corpora, reporter):
                if other not in kinds:
                    raise UsageError(f"{corpora[0].name} has {_listed([other])}, and the model takes {_listed(kinds)}.")
                kind, job = other, job_on(other)
                fields = job.fields(_applicable(source, kind), reader)
                corpora = [as_corpus(corpus, job.corpus, **fields) for corpus in corpora]
                break

    # Checks and reports
    source = _applicable(source, kind)
    corpora = job.opened(corpora, reader, reporter)
    if format == "auto":
        job.report_found(corpora, reporter, needs_records=needs_records)
    if needs_records and not any(corpus.has_records(file) for corpus in corpora for file in corpus.files):
        raise UsageError(
            "`text_key` is for JSONL, Parquet and CSV, and no file is such; leave it out, or read the files as JSONL "
            'with `format="jsonl"`.'
        )
    for corpus in corpora:
        _report_skipped(corpus, reporter)
    excluded = [file for corpus in corpora for file in corpus.skipped if file.reason == EXCLUDED]
    for pattern in () if "exclude" in source.ignorable else source.excluded:
        if not any(is_excluded(file.path, Path(file.folder), [pattern]) for file in excluded):
            reporter.warn(f"No file matches the pattern {pattern!r} of `exclude`, so it leaves none out.")
    return corpora


def _applicable(source: TextSource, kind: str) -> TextSource:
    """The source without ignorable settings that do not apply to this kind of data. Raises UsageError for others."""
    kept = applicable(TextSource, source.given, rows_on(kind), source.ignorable)
    dropped: dict[str, Any] = dict.fromkeys(source.given.keys() - kept.keys())
    return replace(source, **dropped)


def _listed(kinds: Sequence[str]) -> str:
    """What a user calls these kinds of data."""
    return listed([rows_on(kind)[0].noun for kind in kinds], "or")


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


def report_read(corpora: Sequence[Corpus], stats: Sequence[CorpusStats], reporter: Reporter) -> None:
    """Tell the user about corpora after they were read, and about line ends that are read as line feeds."""
    for corpus in corpora:
        job_on(corpus.kind).report_read(corpus, reporter)
    if count := sum(each.carriage_returns for each in stats):
        reporter.note(f"{count:,} line ends of the text, \\r\\n or \\r, are read as \\n.")
