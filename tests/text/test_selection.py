"""Which files are read: folders and patterns laid out by hand, what is left out of them, and what is refused."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest

from tests.text.test_corpus import read, written
from tinylm.errors import UsageError
from tinylm.text.corpus import Corpus, find_corpus
from tinylm.text.selection import describe_left_out

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


def found_in(folder: Path, **choices: str) -> Corpus:
    return find_corpus([str(folder)], **choices)


def test_what_a_folder_holds_besides_text_is_counted_and_named_by_reason(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for number in range(5):
        written(folder / f"{number}.png", PNG)
    for name, content in {
        "a.txt": b"A",
        "sub/empty.txt": b"",
        ".git/objects/one": b"x",
        ".git/objects/two": b"x",
        ".hidden": b"x",
        "package.json": b'{\n "name": "x"\n}\n',
        "zeros.bin": b"text\0text",
        "a.tar.gz": gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar" + bytes(300)),
    }.items():
        written(folder / name, content)
    (folder / "broken").symlink_to(tmp_path / "nowhere")
    (folder / "loop").symlink_to(folder)
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
    corpus = found_in(folder)
    assert [path.name for path in corpus.files] == ["a.txt"]
    expected = {
        "binary": {"0.png", "1.png", "2.png", "3.png", "4.png", "zeros.bin", "a.tar.gz"},
        "empty": {"sub/empty.txt"},
        "hidden": {".git", ".hidden"},
        "JSON without documents": {"package.json"},
        "links to folders or to nothing": {"broken", "loop"},
        "pipes or devices": {"pipe"} if hasattr(os, "mkfifo") else set(),
    }
    for reason, names in expected.items():
        assert {one.path.relative_to(folder).as_posix() for one in corpus.left_out if one.reason == reason} == names
    words = describe_left_out(corpus.left_out)
    assert words.startswith("7 binary (")
    assert "0.png, 1.png, 2.png, ...)" in words
    assert "1 empty (sub/empty.txt)" in words.replace("\\", "/")


def test_a_folder_of_text_leaves_nothing_out(tmp_path: Path) -> None:
    written(tmp_path / "texts" / "a.txt", "A")
    written(tmp_path / "texts" / "b" / "c.md", "C")
    assert found_in(tmp_path / "texts").left_out == ()


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        ("caf\xe9 au lait".encode("latin-1"), "cp1252"),
        ("über".encode("utf-16"), "utf-16"),
        ("long enough".encode("utf-16-le"), "utf-16-le"),
        ("über".encode("utf-32"), "utf-32"),
        ("Привет, мир".encode("cp1251"), "cp1251"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_text_in_another_encoding_stops_with_the_option_that_helps(
    content: bytes, encoding: str, named: bool, tmp_path: Path
) -> None:
    written(tmp_path / "texts" / "a.txt", "A" * 10_000)
    file = written(tmp_path / "texts" / "b.txt", content)
    with pytest.raises(UsageError, match=rf"{re.escape(str(file))} is .*--encoding.* {encoding}\b"):
        found_in(file if named else tmp_path / "texts")
    assert read(file, encoding=encoding) == [content.decode(encoding)]


def test_a_damaged_byte_of_utf_8_is_an_error_in_a_folder_too(tmp_path: Path) -> None:
    file = written(tmp_path / "texts" / "a.txt", "größer ".encode() + b"\xff" + "für".encode())
    with pytest.raises(UsageError, match=rf"{re.escape(str(file))} is not valid UTF-8 \(byte 0xFF at offset 9\)"):
        read(tmp_path / "texts")


def test_a_binary_file_that_is_named_is_refused_as_what_it_is(tmp_path: Path) -> None:
    png = written(tmp_path / "x.png", PNG)
    for encoding in ("utf-8", "latin-1"):
        with pytest.raises(UsageError, match=r"x\.png is a PNG image, not text\. Leave it out"):
            read(png, encoding=encoding)
    unknown = written(tmp_path / "x.bin", b"\xfe\0\x01\x02" * 100)
    with pytest.raises(
        UsageError,
        match=r"x\.bin is not valid UTF-8 \(byte 0xFE at offset 0\)\. If it is text in another encoding, name it with "
        r"--encoding; leave binary files out\.",
    ):
        read(unknown)


def test_a_pattern_is_expanded_in_order_and_where_no_file_has_its_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", "sub/d.txt", ".hidden.txt", "e[1].txt"):
        written(tmp_path / name, name)
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt", "e[1].txt"]
    assert read(tmp_path / "**" / "d.*") == ["sub/d.txt"]
    assert read(tmp_path / "[ab].txt", tmp_path / "c.md") == ["a.txt", "b.txt", "c.md"]
    assert read(tmp_path / "e[1].txt") == ["e[1].txt"]
    with pytest.raises(UsageError, match=r"No file matches the pattern '.*\*\.csv'"):
        read(tmp_path / "*.csv")


# JSON that is not called so.

LINES = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two"))


@pytest.mark.parametrize("content", [LINES, json.dumps([{"text": "one"}]), '{"text": "' + "x" * 20_000 + '"}\n'])
@pytest.mark.parametrize("name", ["data.txt", "part-00000", "data.log"])
def test_json_that_would_be_read_as_text_is_refused_until_its_format_is_named(
    content: str, name: str, tmp_path: Path
) -> None:
    file = written(tmp_path / name, content)
    with pytest.raises(UsageError, match=rf"{name} holds JSON.*--format jsonl.*--format text"):
        read(file)
    assert read(file, format="text") == [content]
    records = json.loads(content) if content.startswith("[") else map(json.loads, content.splitlines())
    assert read(file, format="jsonl") == [record["text"] for record in records]


def test_json_in_a_folder_is_refused_where_its_name_says_text_or_nothing(tmp_path: Path) -> None:
    written(tmp_path / "code" / "a.ipynb", LINES)
    assert read(tmp_path / "code") == [LINES]
    written(tmp_path / "code" / "part-00000", LINES)
    with pytest.raises(UsageError, match="part-00000 holds JSON"):
        read(tmp_path / "code")


def test_a_single_json_object_is_not_taken_for_documents(tmp_path: Path) -> None:
    text = '{\n  "text": "one"\n}\n'
    file = written(tmp_path / "a.json", text)
    with pytest.raises(UsageError, match=r"a\.json is a single JSON object.*--format text"):
        read(file)
    assert read(file, format="text") == [text]


def test_a_format_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "a.txt", "x")
    for format in ("chat", "csv", ""):
        with pytest.raises(UsageError, match=r"--format is '.*'; it must be one of: auto, text, jsonl, lines, pairs\."):
            read(file, format=format)
