"""Readers of compressed files, text, lines and JSON, compared with Python's codecs, JSON parser and `str.split`."""

import bz2
import contextlib
import gzip
import itertools
import json
import lzma
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.text.corpora import documents_of, require_errors, write_file
from tinylm.errors import UsageError
from tinylm.text import readers
from tinylm.text.corpus import find_corpus
from tinylm.text.files import CHUNK_BYTES, content_stem, content_suffix, decompressed_chunks
from tinylm.text.readers import json_records, numbered_lines, parse_json_line

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
every_suffix = pytest.mark.parametrize("suffix", COMPRESSORS)


def content_of(path: Path) -> bytes:
    return b"".join(decompressed_chunks(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compressed")


def test_compression_is_detected_by_the_first_bytes_and_what_is_not_compressed_is_refused(tmp_path: Path) -> None:
    for suffix, compress in COMPRESSORS.items():
        assert content_of(write_file(tmp_path / "standard input", compress(b"some text\n" * 9))) == b"some text\n" * 9
        path = write_file(tmp_path / f"a{suffix}", b"")
        assert content_of(path) == b""
        for data in (b"plain text", compress(b"text") + b"no stream"):
            with pytest.raises(UsageError, match=rf"a\{suffix} is damaged or not \w+ data"):
                content_of(write_file(path, data))


@every_suffix
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_concatenated_streams_are_decompressed(suffix: str, folder: Path, parts: list[bytes]) -> None:
    path = folder / f"a{suffix}"
    path.write_bytes(b"".join(map(COMPRESSORS[suffix], parts)))
    assert content_of(path) == b"".join(parts)


@every_suffix
@given(data=st.data())
def test_an_error_about_an_incomplete_stream_names_the_file(suffix: str, folder: Path, data: st.DataObject) -> None:
    whole = COMPRESSORS[suffix](b"the first member " * 30)
    second = COMPRESSORS[suffix](b"and the second one " * 30)
    cut = data.draw(st.integers(1, len(second) - 1))
    path = folder / f"cut{suffix}"
    for before in (b"", whole):
        path.write_bytes(before + second[:cut])
        with pytest.raises(UsageError, match=rf"cut\{suffix} is damaged or not \w+ data \(.+\)\. Copy or compress"):
            content_of(path)


@every_suffix
def test_decompressing_many_zeros_takes_little_memory(suffix: str, tmp_path: Path) -> None:
    """100 MB in three streams, which are 1,000 (gzip) to 700,000 times (bzip2) smaller."""
    path = write_file(tmp_path / f"a{suffix}", COMPRESSORS[suffix](bytes(1 << 25)) * 3)
    total = 0
    tracemalloc.start()
    try:
        for chunk in decompressed_chunks(path):
            total += len(chunk)
            del chunk
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 3 << 25 and peak < 1 << 26


def test_progress_counts_the_bytes_read_from_the_disk(tmp_path: Path) -> None:
    text = b"".join(bytes([i % 251, i // 251 % 251]) for i in range(CHUNK_BYTES // 4))
    for suffix, compress in {"": bytes, **COMPRESSORS}.items():
        path = write_file(tmp_path / f"a{suffix}", compress(text))
        progress: list[int] = []
        assert b"".join(decompressed_chunks(path, progress.append)) == text and min(progress) >= 0
        assert 0.9 * path.stat().st_size <= sum(progress) <= path.stat().st_size


def test_a_missing_file_or_package_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"Cannot read .*absent\.gz: No such file or directory\."):
        content_of(tmp_path / "absent.gz")
    (tmp_path / "a.zst").write_bytes(COMPRESSORS[".zst"](b"text"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r"a\.zst is compressed with Zstandard.*pip install zstandard"):
        content_of(tmp_path / "a.zst")


def test_suffix_and_stem_ignore_the_compression_suffix() -> None:
    expected = {
        "a.jsonl.gz": (".jsonl", "a"),
        "A.JSON.BZ2": (".json", "A"),
        "a.xz": ("", "a"),
        "a.txt": (".txt", "a"),
        "a": ("", "a"),
        "v1.2.txt.zst": (".txt", "v1.2"),
        ".hidden": ("", ".hidden"),
    }
    assert {name: (content_suffix(Path(name)), content_stem(name)) for name in expected} == expected


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32", "gb18030"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def chunks_of(text: str, positions: list[int]) -> list[str]:
    """The text split at the given positions."""
    ends = sorted({position % (len(text) + 1) for position in positions} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)] or [""]


@given(
    documents=st.lists(texts.filter(lambda text: not text.startswith("\ufeff")), min_size=1, max_size=4),
    form=st.sampled_from(["text", "jsonl", "array", "strings", "lines"]),
    suffix=st.sampled_from(["", *COMPRESSORS]),
    encoding=st.sampled_from(ENCODINGS),
    escaped=st.booleans(),
)
def test_documents_are_read_in_any_format_compression_and_encoding(
    folder: Path, documents: list[str], form: str, suffix: str, encoding: str, escaped: bool
) -> None:
    records = [{"id": number, "text": text} for number, text in enumerate(documents)]
    match form:
        case "text":
            documents = ["".join(documents)]
            content, name, format = documents[0], "a.txt", "text"
        case "jsonl":
            content = "".join(json.dumps(record, ensure_ascii=escaped) + "\n" for record in records)
            name, format = "a.jsonl", "auto"
        case "array":
            content, name, format = json.dumps(records, ensure_ascii=escaped, indent=1), "a.json", "auto"
        case "strings":
            content, name, format = json.dumps(documents, ensure_ascii=escaped), "a.json", "auto"
        case _:
            documents = [text.replace("\n", " ").replace("\r", " ") for text in documents]
            documents = [text for text in documents if text.strip()]
            content, name, format = "\r\n".join(documents), "a.txt", "lines"
    data = content.encode(encoding)
    if encoding == "gb18030":
        with contextlib.suppress(UnicodeError):
            assume(data.decode() == content)  # unless a few characters are valid UTF-8 by chance
    file = folder / f"{name}{suffix}"
    file.write_bytes(COMPRESSORS[suffix](data) if suffix else data)
    try:
        corpus = find_corpus([str(file)], encoding=encoding, format=format)
        expected = [text.replace("\r\n", "\n").replace("\r", "\n") for text in documents if text]
        assert documents_of(corpus.stream()) == expected
    except UsageError as error:  # the bytes of a short text may look like another encoding
        assert re.search("Name its encoding|not text|not valid UTF-8", str(error))
        assert len(data) < 200


@given(st.lists(json_values, max_size=6), st.lists(st.integers(0, 500), max_size=9), st.sampled_from([None, 0, 2]))
def test_an_array_is_parsed_equally_in_chunks(values: list[object], positions: list[int], indent: int | None) -> None:
    text = json.dumps(values, indent=indent)
    chunks = [chunk for chunk in chunks_of(text, positions) if chunk]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if numbers and len(chunks) > 1:
        return  # a split number is parsed as two, but it is not a document anyway
    assert [value for _, value in json_records(iter(chunks), "a.json")] == values


@given(st.lists(json_values.map(lambda value: {"text": value}), min_size=1, max_size=6), st.data())
def test_an_incomplete_array_and_text_after_an_array_are_errors(values: list[object], data: st.DataObject) -> None:
    text = json.dumps(values)
    cut = data.draw(st.integers(1, len(text) - 1))
    for wrong in (text[:cut], text + "]", text + ' {"text": "more"}'):
        with pytest.raises(UsageError, match=r"^a\.json(, element \d+)?: "):
            list(json_records(iter([wrong]), "a.json"))


def test_long_elements_are_parsed_and_an_invalid_one_is_reported_before_the_rest_is_read() -> None:
    text = json.dumps([{"text": "x" * 300_000}, {"text": "y"}])
    chunks = [text[i : i + 100] for i in range(0, len(text), 100)]
    assert [len(value["text"]) for _, value in json_records(iter(chunks), "a")] == [300_000, 1]
    read = 0

    def counted() -> "list[str]":
        nonlocal read
        for chunk in ['[{"text": nonsense, "more": ', *(["x" * 100] * 1000)]:
            read += 1
            yield chunk

    with pytest.raises(UsageError, match=r"a, element 1: invalid JSON"):
        list(json_records(counted(), "a"))
    assert read < 5


@given(st.text("ab \r\n\u2028\x85", max_size=30), st.lists(st.integers(0, 60), max_size=6))
def test_lines_end_only_at_line_feeds_in_any_chunks(text: str, positions: list[int]) -> None:
    expected = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    assert list(numbered_lines(iter(chunks_of(text, positions)), "a")) == expected


def test_invalid_elements_and_lines_are_reported_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UTF-7 is read to its end."""
    elements = ("[" * 100_000, "1" * 5000, "{", "nul", '"\\ud800"')
    require_errors(
        lambda element: list(find_corpus([str(write_file(tmp_path / "a.json", f'["fine", {element}]'))]).stream()),
        [(element, r"a\.json, element 2: ") for element in elements],
    )
    monkeypatch.setattr(readers, "MAX_RECORD", 300)
    contents = ("x" * 500, '{"text": "' + "x" * 500, '[{"text": "' + "x" * 500)
    require_errors(
        lambda content: list(json_records((content[i : i + 50] for i in range(0, len(content), 50)), "a")),
        [(content, r"a, (line|element) 1: longer than 300 characters; split it") for content in contents],
    )
    words = r"^here: invalid JSON \(.*\); each line must be one JSON object\.$"
    require_errors(parse_json_line, [("{", "here", words)])
    assert parse_json_line('{"prompt": "x"}', "here") == {"prompt": "x"}
    file = write_file(tmp_path / "a.txt", b"hello +AOk")
    assert documents_of(find_corpus([str(file)], encoding="utf-7").stream()) == ["hello é"]
    write_file(file, b"hello +2AA- you")
    with pytest.raises(UsageError, match=r"a\.txt, from offset 0: a lone surrogate at character 6 of the text"):
        list(find_corpus([str(file)], encoding="utf-7").stream())
