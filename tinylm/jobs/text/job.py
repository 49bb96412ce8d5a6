"""The job of plain text."""

from collections.abc import Sequence
from typing import Any, ClassVar

from tinylm.errors import UsageError
from tinylm.jobs.job import Baselines, Job, MakeTask
from tinylm.jobs.text.baselines import baseline_bits_per_byte
from tinylm.jobs.text.evaluation import evaluate_text, text_excerpt
from tinylm.jobs.text.task import NextToken
from tinylm.reporter import Reporter
from tinylm.text.compression import content_suffix, display_name
from tinylm.text.corpus import Corpus, document_end
from tinylm.text.file_selection import CONVERTERS
from tinylm.text.readers import is_table, table_columns
from tinylm.text.recognition import is_html
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer

COUNTED_TOKENS = 1 << 20  # tokens that are decoded at a time, to count their bytes


def report_tables(corpora: Sequence[Corpus], reporter: Reporter, *, required: bool) -> None:
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


def report_html(corpora: Sequence[Corpus], reporter: Reporter) -> None:
    """Note that HTML is read with its tags."""
    files = [file for corpus in corpora for file in corpus.files if is_html(file, corpus.encoding)]
    if files:
        others = "" if len(files) == 1 else f" (and {len(files) - 1:,} more)"
        reporter.note(
            f"{display_name(files[0])}{others} is HTML, and is read with its tags. For the text alone, convert it "
            f"first, for example with {CONVERTERS['.html']}."
        )


class TextJob(Job):
    """A decoder predicts the next token of a text."""

    task: ClassVar[MakeTask] = NextToken
    evaluate = staticmethod(evaluate_text)
    excerpt = staticmethod(text_excerpt)
    baselines: ClassVar[Baselines | None] = staticmethod(baseline_bits_per_byte)

    def report_found(self, corpora: Sequence[Corpus], reporter: Reporter, *, needs_records: bool) -> None:
        """Warn of tables and of HTML that are read as they are."""
        report_tables(corpora, reporter, required=needs_records)
        report_html(corpora, reporter)

    def recorded(self, tokens: TokenFolder, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
        """The number of UTF-8 bytes of the validation text without its first token, which is not scored."""
        sizes = (
            tokenizer.decoded_size(tokens.val[start : start + COUNTED_TOKENS], document_end(corpus.format))[1]
            for start in range(1, len(tokens.val), COUNTED_TOKENS)
        )
        return {"val_bytes": sum(sizes)}


JOB = TextJob()
