"""The text that a model is evaluated on: files, a text, or the validation text of its run."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinylm.config.jobs import rows_on
from tinylm.config.run import DataConfig
from tinylm.config.validation import describe_value, require
from tinylm.errors import UsageError
from tinylm.jobs.job import EvaluationTokens, Reader, job_on
from tinylm.jobs.reading import find_corpora, report_read
from tinylm.jobs.run_tokens import check_encoder, reopen_part
from tinylm.reporter import Reporter
from tinylm.system.files import temporary_folder
from tinylm.text.corpus import Corpus, CorpusStats, RecordCorpus, document_end
from tinylm.text.file_selection import TextSource, text_paths
from tinylm.text.files import STANDARD_INPUT
from tinylm.text.parallel_encoding import encode_in_memory
from tinylm.text.readers import require_encodable
from tinylm.text.tokenizer import Tokenizer
from tinylm.text.tokenizer_choice import corpus_without_unknown, report_dropped, require_known_characters


@contextlib.contextmanager
def evaluation_source(
    files: str | Path | Sequence[str | Path] | TextSource | None,
    text: str | None,
    kind: str,
    reading: Mapping[str, Any],
) -> Iterator[TextSource | None]:
    """Context manager for the source of an evaluation: `files`, or a temporary file that contains `text` and is read as
    a corpus of this kind. `None` if neither is given.

    reading: fields of TextSource that are not the default, for `files` that are not a TextSource. For `text`, only
        `unknown` applies.

    Raises UsageError if both are given, for settings that do not apply, and for a text that is empty or no text.
    """
    require(files is None or text is None, "Files and a text contradict each other; give one of them.")
    if text is not None:
        for name in sorted(reading.keys() - {"unknown"}):
            raise UsageError(f"`{name}` is for files, not for a text; leave it out.")
        require(isinstance(text, str), f"The text is {describe_value(text)}; name files without `text`.")
        require(bool(text), "The text is empty; give one that is not.")
        with temporary_folder() as folder:
            file = folder / "text"
            file.write_bytes(require_encodable(text, "The text").encode())
            yield TextSource(paths=(str(file),), format=kind, **reading)
    elif files is None or isinstance(files, TextSource):
        yield files
    else:
        yield TextSource(paths=text_paths(files), **reading)


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
        records = "text" if data.is_plain_text else rows_on(data.kind)[0].records
        reporter.note(f"Evaluating on the validation {records} of {run}.")
        codes = np.asarray(reopen_part(run, data, tokenizer, "val"))
        return EvaluationTokens(data.kind, codes, document_end(data.format))
    with opened_corpus(source, reader, reporter) as corpus:
        encoding = job_on(corpus.kind).encoding
        corpus, stats = known_text(corpus, tokenizer, source.unknown, run, reporter)
        with reporter.counting("encoding", stats.characters, "characters") as advance:
            check_encoder(tokenizer, encoding, stats.sample, reporter.warn)
            documents = corpus.examples() if isinstance(corpus, RecordCorpus) else corpus.stream()
            codes = encode_in_memory(documents, tokenizer, encoding, advance)
        return EvaluationTokens(corpus.kind, codes, document_end(corpus.format))


@contextlib.contextmanager
def opened_corpus(source: TextSource, reader: Reader, reporter: Reporter) -> Iterator[Corpus]:
    """Context manager that finds the corpus of a source; errors are those of `load_text`.

    Standard input is copied to a temporary file.
    """
    piped = STANDARD_INPUT in source.paths
    with temporary_folder() if piped else contextlib.nullcontext(Path()) as folder:
        (corpus,) = find_corpora(source, folder, reader, reporter)
        yield corpus


def known_text(
    corpus: Corpus, tokenizer: Tokenizer, unknown: str, run: Path, reporter: Reporter
) -> tuple[Corpus, CorpusStats]:
    """The corpus and its statistics. If `unknown` is "skip", characters without an id in `tokenizer` are removed from
    the corpus, but counted in the statistics. `run`: the run of the tokenizer, for messages.

    Raises UsageError if there is no text, or none with ids, and the errors of `require_known_characters`.
    """
    stats = corpus.scan()
    report_read([corpus], [stats], reporter)
    if dropped := require_known_characters(corpus, stats.alphabet, tokenizer, "The model", run, unknown):
        corpus = corpus_without_unknown(corpus, tokenizer)
        remaining = corpus.scan()
        report_dropped(dropped, [corpus], [stats], [remaining], reporter)
    return corpus, stats
