"""Tables as texts, pairs and conversations: columns that Python's csv module and pyarrow write."""

import csv
import gzip
import io
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.text.corpora import documents_of, read_conversations, read_documents, require_errors, write_file
from tinylm.errors import UsageError
from tinylm.jobs.pairs.corpus import PairCorpus
from tinylm.jobs.reading import ModelReader, load_text
from tinylm.reporter import LogReporter
from tinylm.text.corpus import find_corpus
from tinylm.text.file_selection import TextSource, conversation_keys
from tinylm.text.readers import MAX_FIELD

DOCUMENTS = ['The "cat", sat;', "on the mat\nand\r\nleft\n", "été\u2028x", "x" * 200_000, " a\tb "]


def table(documents: list[str], separator: str = ",", column: str = "body", **options: Any) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=separator, **options)
    writer.writerows([["id", column, "label"], *([number, text, "z"] for number, text in enumerate(documents))])
    return stream.getvalue()


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def with_line_feeds(texts: list[str]) -> list[str]:
    return [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]


@pytest.mark.parametrize(
    "name, separator", [("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t"), ("a.TSV", "\t"), ("a.csv.gz", ",")]
)
def test_a_column_of_a_csv_file_holds_the_texts(name: str, separator: str, tmp_path: Path) -> None:
    for terminator, quoting in (("\r\n", csv.QUOTE_MINIMAL), ("\n", csv.QUOTE_ALL)):
        content = table(DOCUMENTS, separator, lineterminator=terminator, quoting=quoting).encode()
        data = gzip.compress(content) if name.endswith(".gz") else b"\xef\xbb\xbf" + content
        file = write_file(tmp_path / name, data)
        assert read_documents(file, text_key="body") == with_line_feeds(DOCUMENTS)
        assert read_documents(file) == with_line_feeds([content.decode()])
        file = write_file(
            tmp_path / f"empty-lines-{name}",
            gzip.compress(b"\r\n\n" + content) if name.endswith(".gz") else b"\n" + content,
        )
        assert read_documents(file, text_key="body") == with_line_feeds(DOCUMENTS)
    write_file(tmp_path / "text.csv", table(["a", "", "b"], column="text"))
    assert read_documents(tmp_path / "text.csv") == ["a", "b"]  # this column needs no name


def test_a_malformed_row_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    line = "x" * 9999 + "\n"
    rows = [
        ("a,b\n1,2\n3\n", "line 3: it has 1 fields, but the first line has 2"),
        ("a,b\n1,2\n\n3,4,5\n", "line 4: it has 3 fields"),
        ("\n\na;b\n1;2;3\n", "line 4: it has 3 fields"),
        ('a,b\n"1" x,2\n', "from line 2: invalid CSV"),
        ('a,b\n1,"2\n3,4\n', r"from line 2: invalid CSV \(unexpected end of data\)"),
        ("a,b\n1," + "x" * (MAX_FIELD + 1) + "\n", "line 2: longer than 16,777,216 characters; split it"),
        ('a,b\n1,"' + line * (MAX_FIELD // len(line) + 1) + '"\n', r"from line 2: invalid CSV \(field larger than"),
    ]
    require_errors(
        lambda content: read_documents(write_file(tmp_path / "a.csv", content), text_key="b"),
        [(content, rf"a\.csv, {words}") for content, words in rows],
    )


def test_a_table_that_is_read_as_plain_text_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warnings(file: Path, **settings: Any) -> str:
        caplog.clear()
        load_text(TextSource(paths=(str(file),), **settings), tmp_path, ModelReader(), LogReporter())
        return caplog.text

    file = write_file(tmp_path / "a.csv", table(DOCUMENTS))
    words = "is read as plain text, with the first line and the separators. `text_key` takes"
    assert words in warnings(file) and "(id, body, label)" in caplog.text
    assert warnings(file, format="text") == warnings(file, text_key="body") == ""
    with pytest.raises(UsageError, match=r"a\.csv: no column 'text_' \(found: id, body, label\)"):
        warnings(file, text_key="text_")
    assert '`format="pairs"` reads TSV' in warnings(write_file(tmp_path / "a.tsv", "Hello\tHallo\n" * 20))


def test_each_row_of_a_parquet_file_is_a_document(tmp_path: Path) -> None:
    for compression, rows in (("none", 1), ("snappy", 3), ("zstd", 1000), ("gzip", 3)):
        columns = {"id": range(5), "text": DOCUMENTS}
        file = write_parquet(tmp_path / "a.parquet", columns, compression=compression, row_group_size=rows)
        assert read_documents(file) == read_documents(tmp_path) == with_line_feeds(DOCUMENTS)
    progress: list[int] = []
    write_parquet(file, {"text": [str(n) for n in range(5000)]}, row_group_size=700)
    list(find_corpus([str(file)]).stream(progress.append))
    assert (sum(progress), len(progress) > 10, min(progress) >= 0) == (file.stat().st_size, True, True)
    column = pa.array(["a", "b", "a", ""]).dictionary_encode()
    assert read_documents(write_parquet(file, {"text": column})) == ["a", "b", "a"]
    write_parquet(file, {"content": pa.array(DOCUMENTS, pa.large_string())})
    assert read_documents(file, text_key="content") == with_line_feeds(DOCUMENTS)


def test_columns_are_conversations_or_pairs(tmp_path: Path) -> None:
    messages = [
        [{"role": "user", "content": "Hi", "name": None}, {"role": "assistant", "content": "Hello", "name": "A"}],
        [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b", "name": None}],
    ]
    file = write_parquet(tmp_path / "a.parquet", {"messages": messages, "score": [1, 2]})
    assert conversation_keys(file, "utf-8")
    first, second = read_conversations(file)
    assert first.messages == ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "name": "A"})
    assert second.location == f"{file}, row 2"
    assert conversation_keys(write_parquet(file, {"prompt": ["a"], "completion": ["b"]}), "utf-8")
    assert not conversation_keys(write_parquet(file, {"text": ["a"], "messages": ["b"]}), "utf-8")
    write_parquet(file, {"source": ["abc", "d"], "target": ["ij", "hgf"], "other": [1, 2]})
    assert documents_of(find_corpus([str(file)], corpus_type=PairCorpus).stream()) == ["abc", "ij", "d", "hgf"]


def test_errors_of_parquet_files_and_a_missing_pyarrow_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.parquet"
    columns = ([1, 2], [b"bytes", b"x"], [["a"], ["b"]], [{"a": "b"}, {"a": "c"}])
    rows = [({"text": column}, r"a\.parquet, row 1: the value under 'text' .* not a string") for column in columns]
    rows += [
        ({"content": ["a"]}, r"no column 'text' \(found: content\); name .* with `text_key`"),
        ({"text": ["a", None]}, r"a\.parquet, row 2: the value under 'text' is null, which is not a string"),
    ]
    require_errors(lambda columns: read_documents(write_parquet(file, columns)), rows)
    content = write_parquet(file, {"text": DOCUMENTS * 50}, row_group_size=20).read_bytes()
    damaged = (content[:-1], content[:100], b"PAR1", content[:4] + bytes(300) + content[304:], b"This is text.")
    require_errors(
        lambda content: read_documents(write_file(file, content)),
        [(content, r"Cannot read .*a\.parquet: .*\. Copy it again") for content in damaged],
    )
    require_errors(read_documents, [(write_file(tmp_path / "a.txt", content), "is a Parquet file, not text")])
    file = write_parquet(tmp_path / "a.parquet", {"text": DOCUMENTS})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path in (file, tmp_path):
        with pytest.raises(UsageError, match=r"a\.parquet is a Parquet file.*pip install pyarrow"):
            read_documents(path)
