"""Judge: Python's codecs, its JSON parser on the whole text, and its own splitting at line feeds."""

import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.test_compression import COMPRESSORS
from tests.text.test_corpus import documents_of, written
from tinylm.errors import UsageError
from tinylm.text import readers
from tinylm.text.corpus import find_corpus, scan
from tinylm.text.readers import json_records, numbered_lines, parse_json_line

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32", "gb18030"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def cut_up(text: str, places: list[int]) -> list[str]:
    """The text in pieces, cut at some places."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)] or [""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@given(
    documents=st.lists(texts.filter(lambda text: not text.startswith("\ufeff")), min_size=1, max_size=4),
    layout=st.sampled_from(["text", "jsonl", "array", "strings", "lines"]),
    suffix=st.sampled_from(["", *COMPRESSORS]),
    encoding=st.sampled_from(ENCODINGS),
    escaped=st.booleans(),
)
def test_documents_written_in_any_format_compression_and_encoding_are_read_back_equal(
    folder: Path, documents: list[str], layout: str, suffix: str, encoding: str, escaped: bool
) -> None:
    records = [{"id": number, "text": text} for number, text in enumerate(documents)]
    match layout:
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
        found = find_corpus([str(file)], encoding=encoding, format=format)
        assert documents_of(found.stream()) == [text for text in documents if text]
    except UsageError as error:  # the few bytes of a short text may be another encoding's mark
        assert "Name its encoding" in str(error) or "not text" in str(error)
        assert len(data) < 200


@given(st.lists(json_values, max_size=6), st.lists(st.integers(0, 500), max_size=9), st.sampled_from([None, 0, 2]))
def test_an_array_is_parsed_alike_wherever_it_is_cut_into_pieces(
    values: list[object], places: list[int], indent: int | None
) -> None:
    text = json.dumps(values, indent=indent)
    pieces = [piece for piece in cut_up(text, places) if piece]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if numbers and len(pieces) > 1:
        return  # a number that is cut in two is no document in any case
    assert [value for _, value in json_records(iter(pieces), "a.json")] == values


@given(st.lists(json_values.map(lambda value: {"text": value}), min_size=1, max_size=6), st.data())
def test_an_array_that_is_cut_off_or_goes_on_is_an_error(values: list[object], data: st.DataObject) -> None:
    text = json.dumps(values)
    cut = data.draw(st.integers(1, len(text) - 1))
    for wrong in (text[:cut], text + "]", text + ' {"text": "more"}'):
        with pytest.raises(UsageError, match=r"^a\.json(, element \d+)?: "):
            list(json_records(iter([wrong]), "a.json"))


def test_an_array_of_long_elements_is_parsed_in_linear_time_and_a_wrong_one_found_at_once() -> None:
    text = json.dumps([{"text": "x" * 300_000}, {"text": "y"}])
    pieces = [text[i : i + 100] for i in range(0, len(text), 100)]
    assert [len(value["text"]) for _, value in json_records(iter(pieces), "a")] == [300_000, 1]
    read = 0

    def counted() -> "list[str]":
        nonlocal read
        for piece in ['[{"text": nonsense, "more": ', *(["x" * 100] * 1000)]:
            read += 1
            yield piece

    with pytest.raises(UsageError, match=r"a, element 1: not JSON"):
        list(json_records(counted(), "a"))
    assert read < 5


@given(st.text("ab \r\n\u2028\x85", max_size=30), st.lists(st.integers(0, 60), max_size=6))
def test_lines_end_at_line_feeds_alone_wherever_the_text_is_cut(text: str, places: list[int]) -> None:
    expected = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    assert list(numbered_lines(iter(cut_up(text, places)), "a")) == expected


@pytest.mark.parametrize("content", ["x" * 500, '{"text": "' + "x" * 500, '[{"text": "' + "x" * 500])
def test_a_line_or_element_that_would_fill_the_memory_is_refused(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", 300)
    with pytest.raises(UsageError, match=r"a, (line|element) 1: longer than 300 characters; split it"):
        list(json_records((content[i : i + 50] for i in range(0, len(content), 50)), "a"))


@pytest.mark.parametrize("element", ["[" * 100_000, "1" * 5000, "{", "nul", '"\\ud800"'])
def test_elements_that_are_no_document_are_named(element: str, tmp_path: Path) -> None:
    file = written(tmp_path / "a.json", f'["fine", {element}]')
    with pytest.raises(UsageError, match=r"a\.json, element 2: "):
        list(find_corpus([str(file)]).stream())


def test_pairs_in_place_of_documents_are_called_by_their_name(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", '{"source": "a", "target": "b"}')
    with pytest.raises(UsageError, match=r"no text under 'text' \(found: source, target\); these are pairs"):
        list(find_corpus([str(file)]).stream())


def test_a_line_of_json_is_parsed_by_itself() -> None:
    assert parse_json_line('{"prompt": "x"}', "here") == {"prompt": "x"}
    with pytest.raises(UsageError, match=r"^here: not JSON \(.*\); each line must be one JSON object\.$"):
        parse_json_line("{", "here")


def test_the_format_lines_makes_a_document_of_each(tmp_path: Path) -> None:
    file = written(tmp_path / "names.txt", "ann\r\n\n  \nbo b\nçelik")
    assert documents_of(find_corpus([str(file)], format="lines").stream()) == ["ann", "bo b", "çelik"]


def test_reading_is_told_in_bytes_of_the_disk(tmp_path: Path) -> None:
    text = "größer\n" * 5000
    plain, packed = written(tmp_path / "a.txt", text), written(tmp_path / "b.txt.gz", gzip.compress(text.encode()))
    found = find_corpus([str(plain), str(packed)])
    told: list[int] = []
    assert scan(found.stream(told.append)).characters == 2 * len(text)
    assert 0.9 * found.size <= sum(told) <= found.size
