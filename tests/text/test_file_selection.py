"""The files that are read, skipped and refused in folders and by patterns."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest

from tests.text.corpora import read_documents, require_errors, write_file
from tinylm.errors import UsageError
from tinylm.text.corpus import Corpus, find_corpus
from tinylm.text.file_selection import describe_skipped

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


def find_in(folder: Path, **settings: str) -> Corpus:
    return find_corpus([str(folder)], **settings)


def test_skipped_files_of_a_folder_are_listed_by_reason(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for number in range(5):
        write_file(folder / f"{number}.png", PNG)
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
        write_file(folder / name, content)
    (folder / "broken").symlink_to(tmp_path / "nowhere")
    (folder / "loop").symlink_to(folder)
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
    corpus = find_in(folder)
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
        assert {file.path.relative_to(folder).as_posix() for file in corpus.skipped if file.reason == reason} == names
    words = describe_skipped(corpus.skipped)
    assert words.startswith("7 binary (")
    assert "0.png, 1.png, 2.png, ...)" in words
    assert "1 empty (sub/empty.txt)" in words.replace("\\", "/")


@pytest.mark.skipif(os.name != "posix", reason="needs a limit of open files")
def test_a_folder_of_thousands_of_files_is_read_with_few_open_at_a_time(tmp_path: Path) -> None:
    import resource

    documents = [f"document {number}" for number in range(7)]
    files = [write_file(tmp_path / "originals" / f"{number}", text) for number, text in enumerate(documents)]
    (tmp_path / "texts").mkdir()
    for number in range(3003):
        (tmp_path / "texts" / f"{number:04}.txt").hardlink_to(files[number % 7])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (tmp_path / "unused").open("w") as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 20, limits[1]))
        try:
            found = read_documents(tmp_path / "texts")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == documents * 429


def test_an_error_about_text_in_another_encoding_suggests_that_encoding(tmp_path: Path) -> None:
    write_file(tmp_path / "texts" / "a.txt", "A" * 10_000)
    file = tmp_path / "texts" / "b.txt"
    for text, encoding, suggested in (
        ("café au lait", "latin-1", "cp1252"),
        ("über", "utf-16", "utf-16"),
        ("long enough", "utf-16-le", "utf-16-le"),
        ("über", "utf-32", "utf-32"),
        ("Привет, мир", "cp1251", "cp1251"),
    ):
        write_file(file, text.encode(encoding))
        for path in (file, tmp_path / "texts"):
            with pytest.raises(UsageError, match=rf"{re.escape(str(file))} is .*`encoding.*\b{suggested}\b"):
                find_in(path)
        assert read_documents(file, encoding=suggested) == [text]
    write_file(file, "größer ".encode() + b"\xff" + "für".encode())
    with pytest.raises(UsageError, match=rf"{re.escape(str(file))} is not valid UTF-8 \(byte 0xFF at offset 9\)"):
        read_documents(tmp_path / "texts")


def test_an_error_about_a_named_binary_file_gives_its_type(tmp_path: Path) -> None:
    png = write_file(tmp_path / "x.png", PNG)
    unknown = write_file(tmp_path / "x.bin", b"\xfe\0\x01\x02" * 100)
    advice = "If it is text in another encoding, name it with `encoding`; leave binary files out"
    rows = [
        (png, "utf-8", r"x\.png is a PNG image, not text\. Leave it out"),
        (png, "latin-1", r"x\.png is a PNG image, not text\. Leave it out"),
        (unknown, "utf-8", rf"x\.bin is not valid UTF-8 \(byte 0xFE at offset 0\)\. {advice}\."),
    ]
    require_errors(lambda file, encoding: read_documents(file, encoding=encoding), rows)


def test_a_pattern_is_expanded_in_sorted_order_unless_a_file_has_that_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", "sub/d.txt", ".hidden.txt", "e[1].txt"):
        write_file(tmp_path / name, name)
    assert read_documents(tmp_path / "*.txt") == ["a.txt", "b.txt", "e[1].txt"]
    assert read_documents(tmp_path / "**" / "d.*") == ["sub/d.txt"]
    assert read_documents(tmp_path / "[ab].txt", tmp_path / "c.md") == ["a.txt", "b.txt", "c.md"]
    assert read_documents(tmp_path / "e[1].txt") == ["e[1].txt"]
    with pytest.raises(UsageError, match=r"No file matches the pattern '.*\*\.csv'"):
        read_documents(tmp_path / "*.csv")


# JSON without a JSON suffix.

LINES = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two"))


def test_json_in_a_file_of_another_suffix_is_refused_unless_the_format_is_given(tmp_path: Path) -> None:
    contents = (LINES, json.dumps([{"text": "one"}]), '{"text": "' + "x" * 20_000 + '"}\n')
    for name in ("data.txt", "part-00000", "data.log"):
        for content in contents:
            file = write_file(tmp_path / name, content)
            with pytest.raises(UsageError, match=rf'{name} contains JSON.*`format="jsonl"`.*`format="text"`'):
                read_documents(file)
            assert read_documents(file, format="text") == [content]
            records = json.loads(content) if content.startswith("[") else map(json.loads, content.splitlines())
            assert read_documents(file, format="jsonl") == [record["text"] for record in records]
    with pytest.raises(UsageError, match=r"data\.txt contains JSON"):
        read_documents(write_file(tmp_path / "data.txt", "\ufeff" + LINES))


def test_json_in_a_folder_is_refused_in_files_with_the_suffix_txt_or_none(tmp_path: Path) -> None:
    write_file(tmp_path / "code" / "a.ipynb", LINES)
    assert read_documents(tmp_path / "code") == [LINES]
    write_file(tmp_path / "code" / "part-00000", LINES)
    with pytest.raises(UsageError, match="part-00000 contains JSON"):
        read_documents(tmp_path / "code")


def test_a_single_json_object_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    text = '{\n  "text": "one"\n}\n'
    file = write_file(tmp_path / "a.json", text)
    formats = r"`format` is '.*'; it must be one of: auto, text, jsonl, lines, pairs, chat\."
    rows = [
        ("auto", r'a\.json is a single JSON object.*`format="text"`'),
        *((f, formats) for f in ("chats", "csv", "")),
    ]
    require_errors(lambda format: read_documents(file, format=format), rows)
    assert read_documents(file, format="text") == [text]
