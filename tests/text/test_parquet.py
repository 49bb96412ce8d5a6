"""Parquet files, written by pyarrow, as texts, pairs and conversations."""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.text.corpora import documents_of, read_documents, write_file
from tinylm.errors import UsageError
from tinylm.text.chat import read_conversations
from tinylm.text.corpus import find_corpus
from tinylm.text.file_selection import holds_chat
from tinylm.text.pairs import PairCorpus

DOCUMENTS = ["The cat sat.", "on the mat\nand left", "été", "x" * 3000]


def write_table(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_each_row_is_a_document(compression: str, rows: int, tmp_path: Path) -> None:
    file = write_table(
        tmp_path / "a.parquet", {"id": range(4), "text": DOCUMENTS}, compression=compression, row_group_size=rows
    )
    assert read_documents(file) == DOCUMENTS
    assert read_documents(tmp_path) == DOCUMENTS


def test_text_key_names_the_column(tmp_path: Path) -> None:
    file = write_table(tmp_path / "a.parquet", {"content": pa.array(DOCUMENTS, pa.large_string())})
    assert read_documents(file, text_key="content") == DOCUMENTS
    with pytest.raises(UsageError, match=r"no column 'text' \(found: content\); name .* with `text_key`"):
        read_documents(file)


def test_dictionaries_are_read_and_empty_texts_are_skipped(tmp_path: Path) -> None:
    column = pa.array(["a", "b", "a", ""]).dictionary_encode()
    assert read_documents(write_table(tmp_path / "a.parquet", {"text": column})) == ["a", "b", "a"]


def test_a_text_that_is_null_is_the_error_that_it_is_in_json(tmp_path: Path) -> None:
    table = write_table(tmp_path / "a.parquet", {"text": ["a", None]})
    lines = write_file(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": null}\n')
    for file, place in ((table, "row 2"), (lines, "line 2")):
        with pytest.raises(
            UsageError, match=rf"{file.name}, {place}: the value under 'text' is null, which is not a string"
        ):
            read_documents(file)


@pytest.mark.parametrize("column", [[1, 2], [b"bytes", b"x"], [["a"], ["b"]], [{"a": "b"}, {"a": "c"}]], ids=str)
def test_a_column_without_texts_is_an_error_that_names_the_row(column: list[Any], tmp_path: Path) -> None:
    file = write_table(tmp_path / "a.parquet", {"text": column})
    with pytest.raises(UsageError, match=r"a\.parquet, row 1: the value under 'text' .* not a string"):
        read_documents(file)


def test_columns_of_messages_are_conversations(tmp_path: Path) -> None:
    messages = [
        [{"role": "user", "content": "Hi", "name": None}, {"role": "assistant", "content": "Hello", "name": "A"}],
        [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b", "name": None}],
    ]
    file = write_table(tmp_path / "a.parquet", {"messages": messages, "score": [1, 2]})
    assert holds_chat(file, "utf-8")
    first, second = read_conversations(file, "utf-8")
    assert first.messages == ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "name": "A"})
    assert second.location == f"{file}, row 2"
    pairs = write_table(tmp_path / "b.parquet", {"prompt": ["a"], "completion": ["b"]})
    assert holds_chat(pairs, "utf-8")
    (conversation,) = read_conversations(pairs, "utf-8")
    assert [message["content"] for message in conversation.messages] == ["a", "b"]
    assert not holds_chat(write_table(tmp_path / "c.parquet", {"text": ["a"], "messages": ["b"]}), "utf-8")


def test_columns_of_sources_and_targets_are_pairs(tmp_path: Path) -> None:
    file = write_table(tmp_path / "a.parquet", {"source": ["abc", "d"], "target": ["ij", "hgf"], "other": [1, 2]})
    corpus = find_corpus([str(file)], corpus_type=PairCorpus)
    assert documents_of(corpus.stream()) == ["abc", "ij", "d", "hgf"]


def test_progress_adds_up_to_the_size_of_the_file(tmp_path: Path) -> None:
    file = write_table(tmp_path / "a.parquet", {"text": [str(n) for n in range(5000)]}, row_group_size=700)
    progress: list[int] = []
    list(find_corpus([str(file)]).stream(progress.append))
    assert sum(progress) == file.stat().st_size
    assert len(progress) > 10 and min(progress) >= 0


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = write_table(tmp_path / "a.parquet", {"text": DOCUMENTS * 50}, row_group_size=20)
    content = file.read_bytes()
    for damaged in (content[:-1], content[:100], b"PAR1", content[:4] + bytes(300) + content[304:]):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"Cannot read .*a\.parquet: .*\. Copy it again"):
            read_documents(file)


def test_only_files_with_the_suffix_are_read_as_parquet(tmp_path: Path) -> None:
    content = write_table(tmp_path / "data" / "a.parquet", {"text": DOCUMENTS}).read_bytes()
    with pytest.raises(UsageError, match="is a Parquet file, not text"):
        read_documents(write_file(tmp_path / "a.txt", content))
    with pytest.raises(UsageError, match=r"Cannot read .*text\.parquet"):
        read_documents(write_file(tmp_path / "text.parquet", "This is text."))


def test_without_pyarrow_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_table(tmp_path / "a.parquet", {"text": DOCUMENTS})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"a\.parquet is a Parquet file.*pip install pyarrow"):
        read_documents(file)
    with pytest.raises(UsageError, match="pip install pyarrow"):
        read_documents(tmp_path)
