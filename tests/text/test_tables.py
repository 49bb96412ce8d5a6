"""CSV and TSV as texts: the columns that Python's csv module writes."""

import csv
import gzip
import io
from pathlib import Path
from typing import Any

import pytest

from tests.text.corpora import read_documents, write_file
from tinylm.errors import UsageError
from tinylm.reporter import LogReporter
from tinylm.text import readers
from tinylm.text.corpus_loading import TextSource, load_text

DOCUMENTS = ['The "cat", sat;', "on the mat\nand\r\nleft\n", "été\u2028x", "x" * 200_000, " a\tb "]


def table(documents: list[str], separator: str = ",", column: str = "body", **options: Any) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=separator, **options)
    writer.writerows([["id", column, "label"], *([number, text, "z"] for number, text in enumerate(documents))])
    return stream.getvalue()


@pytest.mark.parametrize(
    "name, separator", [("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t"), ("a.TSV", "\t"), ("a.csv.gz", ",")]
)
def test_a_column_holds_the_texts(name: str, separator: str, tmp_path: Path) -> None:
    for terminator, quoting in (("\r\n", csv.QUOTE_MINIMAL), ("\n", csv.QUOTE_ALL)):
        content = table(DOCUMENTS, separator, lineterminator=terminator, quoting=quoting).encode()
        file = write_file(
            tmp_path / name, gzip.compress(content) if name.endswith(".gz") else b"\xef\xbb\xbf" + content
        )
        assert read_documents(file, text_key="body") == DOCUMENTS
        assert read_documents(file) == [content.decode()]


def test_the_column_text_is_taken_without_its_name(tmp_path: Path) -> None:
    assert read_documents(write_file(tmp_path / "a.csv", table(["a", "", "b"], column="text"))) == ["a", "b"]


MALFORMED = {
    "too few fields": ("a,b\n1,2\n3\n", "line 3: it has 1 fields, but the first line has 2"),
    "too many fields": ("a,b\n1,2\n\n3,4,5\n", "line 4: it has 3 fields"),
    "text after a quote": ('a,b\n"1" x,2\n', "from line 2: invalid CSV"),
    "an open quote": ('a,b\n1,"2\n3,4\n', "from line 2: invalid CSV (unexpected end of data)"),
    "a long field": ("a,b\n1," + "x" * 2000 + "\n", "from line 2: invalid CSV (field larger than"),
    "a long field of several lines": ('a,b\n1,"' + "x\n" * 2000 + '"\n', "from line 2: invalid CSV (field larger than"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_row_is_an_error_with_file_and_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_FIELD", 1000)
    content, problem = MALFORMED[name]
    with pytest.raises(UsageError) as caught:
        read_documents(write_file(tmp_path / "a.csv", content), text_key="b")
    assert "a.csv" in str(caught.value) and problem in str(caught.value)


def test_a_table_that_is_read_as_plain_text_is_reported_with_its_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_file(tmp_path / "a.csv", table(DOCUMENTS))

    def warnings(**settings: Any) -> str:
        caplog.clear()
        load_text(TextSource(paths=(str(file),), **settings), tmp_path, "text", LogReporter())
        return caplog.text

    assert "is read as plain text, with the first line and the separators. `text_key` takes" in warnings()
    assert "(id, body, label)" in warnings()
    assert warnings(format="text") == warnings(text_key="body") == ""
    with pytest.raises(UsageError, match=r"a\.csv: no column 'text_' \(found: id, body, label\)"):
        warnings(text_key="text_")
    write_file(tmp_path / "a.tsv", "Hello\tHallo\n" * 20)
    file = tmp_path / "a.tsv"
    assert '`format="pairs"` reads TSV as sources and targets' in warnings()
