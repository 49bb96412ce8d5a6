"""What the user should know about files that are read as plain text."""

from collections.abc import Sequence

from tinylm.errors import UsageError
from tinylm.reporter import Reporter
from tinylm.text.compression import content_suffix, display_name
from tinylm.text.corpus import Corpus
from tinylm.text.file_selection import CONVERTERS, is_html
from tinylm.text.readers import is_table, table_columns


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
