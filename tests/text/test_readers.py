"""Readers of text, lines and JSON, compared with Python's codecs, JSON parser and `str.split`."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.corpora import documents_of, require_errors, write_file
from tests.text.test_compression import COMPRESSORS
from tinylm.errors import UsageError
from tinylm.text import readers
from tinylm.text.corpus import find_corpus
from tinylm.text.readers import json_records, numbered_lines, parse_json_line

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


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
            documents = [text.replace("\n", " ").rstrip("\r") for text in documents]
            documents = [text for text in documents if text.strip()]
            content, name, format = "\r\n".join(documents), "a.txt", "lines"
    data = content.encode(encoding)
    file = folder / f"{name}{suffix}"
    file.write_bytes(COMPRESSORS[suffix](data) if suffix else data)
    try:
        corpus = find_corpus([str(file)], encoding=encoding, format=format)
        assert documents_of(corpus.stream()) == [text for text in documents if text]
    except UsageError as error:  # the bytes of a short text may look like another encoding
        assert "Name its encoding" in str(error) or "not text" in str(error)
        assert len(data) < 200


@given(st.lists(json_values, max_size=6), st.lists(st.integers(0, 500), max_size=9), st.sampled_from([None, 0, 2]))
def test_an_array_is_parsed_equally_from_any_chunks(
    values: list[object], positions: list[int], indent: int | None
) -> None:
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


def test_an_invalid_element_or_line_is_reported_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_utf_7_is_read_to_its_end_and_a_lone_surrogate_in_it_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"hello +AOk")
    assert documents_of(find_corpus([str(tmp_path / "a.txt")], encoding="utf-7").stream()) == ["hello é"]
    (tmp_path / "b.txt").write_bytes(b"hello +2AA- you")
    with pytest.raises(UsageError, match=r"b\.txt, from offset 0: a lone surrogate at character 6 of the text"):
        list(find_corpus([str(tmp_path / "b.txt")], encoding="utf-7").stream())
