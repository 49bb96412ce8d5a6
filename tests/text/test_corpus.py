"""Corpora as streams of text, compared with the text itself, the codecs of Python and `hashlib`."""

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.corpora import documents_of, read_documents, require_errors, write_file
from tinylm.errors import TinyLMError, UsageError
from tinylm.text.corpus import Corpus, find_corpus, rechunk, scan_stream, slice_stream
from tinylm.text.files import CHUNK_BYTES

BOM = "\ufeff"


def test_a_character_may_be_in_two_chunks(tmp_path: Path) -> None:
    for shift in (-3, -2, -1, 0):
        text = "a" * (CHUNK_BYTES + shift) + "漢👩é" * 3
        file = write_file(tmp_path / "a.txt", text)
        assert read_documents(file) == [text]
        assert max(map(len, filter(None, find_corpus([str(file)]).stream()))) <= CHUNK_BYTES + 1


def test_line_ends_are_those_of_python_also_if_one_is_in_two_chunks_and_are_counted(tmp_path: Path) -> None:
    """In lines and in the texts of records as well, and a carriage return is in no vocabulary."""
    text = "one\r\ntwo\rthree\n\r\r\n\n\rfour\r"
    for shift in range(-6, 2):
        for name, content in (("a.txt", "x" * (CHUNK_BYTES + shift) + text), ("b.txt", text), ("c.txt", "\r" + text)):
            file = write_file(tmp_path / name, content)
            expected = file.read_text(encoding="utf-8")  # universal newlines
            corpus = find_corpus([str(file)])
            stats = corpus.scan()
            assert documents_of(corpus.stream()) == [expected]
            assert documents_of(find_corpus([str(file)]).stream(lambda size: None)) == [expected]
            assert stats.carriage_returns == content.count("\r") == corpus.scan().carriage_returns
            assert (stats.bytes, stats.line_breaks) == (
                len(expected),
                expected.count("\n"),
            ) and "\r" not in stats.alphabet
            assert read_documents(file, format="lines") == [line for line in expected.split("\n") if line]
    records = json.dumps({"text": "one\r\ntwo"}) + "\r\n" + json.dumps({"text": "\rthree\n"})
    corpus = find_corpus([str(write_file(tmp_path / "a.jsonl", records))])
    assert documents_of(corpus.stream()) == ["one\ntwo", "\nthree\n"] and corpus.scan().carriage_returns == 2
    file = write_file(tmp_path / "d.txt", b"one\r\n" * 9 + b"\xff")
    with pytest.raises(UsageError, match=r"byte 0xFF at offset 45\)"):  # in the file
        read_documents(file)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16"])
def test_a_byte_order_mark_is_removed_only_at_the_start(encoding: str, tmp_path: Path) -> None:
    mark = "" if encoding == "utf-16" else BOM  # this codec adds one
    file = write_file(tmp_path / "a.txt", f"{mark}one{BOM}two".encode(encoding))
    assert read_documents(file, encoding=encoding) == [f"one{BOM}two"]
    assert read_documents(write_file(tmp_path / "b.txt", BOM.encode(encoding)), encoding=encoding) == []
    first = "a" * (CHUNK_BYTES - 3 if encoding == "utf-8" else CHUNK_BYTES // 2 - 1)  # with the mark: one chunk
    assert len(f"{mark}{first}".encode(encoding)) == CHUNK_BYTES
    file = write_file(tmp_path / "c.txt", f"{mark}{first}{BOM}b".encode(encoding))
    assert read_documents(file, encoding=encoding) == [f"{first}{BOM}b"]


def reported_offset(file: Path, encoding: str = "utf-8") -> int:
    with pytest.raises(UsageError) as caught:
        read_documents(file, encoding=encoding)
    message = str(caught.value)
    assert message.startswith(f"{file} is not valid {encoding.upper()} (") and "`encoding`" in message
    offset = int(message.split("offset ")[1].split(")")[0])
    if "byte 0x" in message:
        assert int(message.split("byte 0x")[1][:2], 16) == file.read_bytes()[offset]
    return offset


def test_an_invalid_byte_is_reported_with_its_offset(tmp_path: Path) -> None:
    """Also if the broken character starts in the previous chunk, or is incomplete at the end of the file."""
    first = '{"text": "é漢"}\n'.encode()
    assert reported_offset(write_file(tmp_path / "a.jsonl", first + b'{"text": "\xff"}\n')) == len(first) + 10
    endings = [bad + b"y" * 9 for bad in (b"\xff", b"\xc3(", b"\xe6\xbc(", b"\xed\xa0\x80", b"\xf8\x88\x80\x80")]
    for before in (0, 5, CHUNK_BYTES - 2, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 7):
        for ending in (*endings, "👩".encode()[:3]):
            assert reported_offset(write_file(tmp_path / "a.txt", b"x" * before + ending)) == before, ending
    for encoding, content, offset in (
        ("ascii", b"abc\xe9", 3),
        ("utf-16", b"h\0e\0y\0", 0),
        ("utf-16-le", "ab".encode("utf-16-le") + b"\x00\xdc" + b"a\0", 4),
        ("utf-32-le", "ab".encode("utf-32-le") + b"\xff" * 4, 8),
        ("shift_jis", "漢字".encode("shift_jis") + b"\xfd\xff", 4),
        ("cp1252", b"ab\x81", 2),
    ):
        assert reported_offset(write_file(tmp_path / "a.txt", content), encoding) == offset, encoding


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    file = str(write_file(tmp_path / "a.txt", "text"))
    names = ("utf-9", "", "rot13", "base64", "undefined", "zip", "utf-8\0", "ütf")
    words = r"^`encoding` .* try utf-8, utf-16, latin-1 or cp1252"
    require_errors(lambda name: find_corpus([file], encoding=name), [(name, words) for name in names])


def test_a_folder_without_text_a_missing_path_or_a_pipe_which_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    write_file(tmp_path / "binary" / "a.bin", b"\0")
    write_file(tmp_path / "hidden" / ".x", b"\0")
    skipped = {"corpus": "; name another", "binary": r" \(skipped: 1 ", "hidden": r" \(skipped: 1 "}
    rows = [(tmp_path / name, f"older .*{name} contains no text files{words}") for name, words in skipped.items()]
    rows += [(tmp_path / "absent.txt", r"no file or folder '.*absent\.txt'")]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        rows.append((tmp_path / "pipe", r"pipe is a pipe or a device, which cannot be read twice"))
    require_errors(read_documents, rows)


def test_named_files_are_read_in_their_order_even_if_hidden_or_with_nuls_unless_they_are_empty(tmp_path: Path) -> None:
    one, two, hidden = (write_file(tmp_path / name, name) for name in ("z.txt", "a.txt", ".hidden"))
    assert read_documents(one, hidden, two) == ["z.txt", ".hidden", "a.txt"]
    assert read_documents(write_file(tmp_path / "zeros", b"a\0b")) == ["a\0b"]
    files = [write_file(tmp_path / f"{i}.txt", text) for i, text in enumerate(["", "a", "", "", "b", BOM, "c", ""])]
    assert list(find_corpus(map(str, files)).stream()) == ["a", None, "b", None, "c"]
    assert list(Corpus(("x",), tuple(files[:1])).stream()) == []


def test_each_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    lines = ["one\ntwo", "漢字", "", "  ", 'a "quoted" \\ word', "👩"]
    content = "\r\n".join(json.dumps({"id": 1, "text": line}) for line in lines) + "\n\n  \n"
    assert read_documents(write_file(tmp_path / "a.jsonl", BOM + content)) == [line for line in lines if line]
    assert read_documents(write_file(tmp_path / "b.NDJSON", '{"body": "x"}'), text_key="body") == ["x"]


def test_an_invalid_line_is_reported_with_its_number(tmp_path: Path) -> None:
    invalid = ("{", "hello", "[" * 100_000, '{"n": ' + "1" * 5000 + "}")
    rows = [
        *((line, "invalid JSON") for line in invalid),
        ("[1]", "no text under 'text' .*found: list"),
        ("7", "no text under 'text' .*found: int"),
        ('{"body": "x", "id": 3}', "no text under 'text' .*found: body, id.*`text_key`"),
        ('{"source": "a", "target": "b"}', r"\(found: source, target\); read pairs with `format="),
        ('{"text": 5}', "the value under 'text' is 5, which is not a string.*`text_key`"),
        ('{"text": null}', "the value under 'text' is null, which is not a string"),
        ('{"text": "ab\\ud800"}', "a lone surrogate at character 2"),
    ]
    require_errors(
        lambda line: read_documents(write_file(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n\n{line}\n')),
        [(line, rf"^{re.escape(str(tmp_path))}\Wa\.jsonl, line 3: .*{words}") for line, words in rows],
    )


def test_standard_input_is_copied_so_that_it_can_be_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def piped(content: bytes, spool: Path) -> Corpus:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        return find_corpus(["-", str(file)], spool=spool)

    file = write_file(tmp_path / "a.txt", "file")
    corpus = piped("piped 漢".encode(), tmp_path / "spool")
    assert documents_of(corpus.stream()) == documents_of(corpus.stream()) == ["piped 漢", "file"]
    assert (corpus.name, corpus.size) == (f"standard input, {file}", 9 + 4)
    rows = [
        (b"abc\xff", tmp_path, r"^standard input is not valid UTF-8 \(byte 0xFF at offset 3\)"),
        (b"abc", file / "spool", r"Cannot copy standard input to .*Not a directory"),
    ]
    require_errors(piped, rows, TinyLMError)


documents = st.lists(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4), max_size=5)


def stream_of(parts: list[list[str]]) -> Iterator[str | None]:
    for index, chunks in enumerate(parts):
        yield from ([None] if index else [])
        yield from chunks


@given(documents, st.integers(0, 60), st.integers(0, 60))
def test_slices_and_statistics_are_those_of_the_documents(parts: list[list[str]], start: int, stop: int) -> None:
    expected, position = [], 0
    for document in map("".join, parts):
        part = document[max(0, start - position) : max(0, stop - position)]
        position += len(document)
        expected += [part] if part else []
    assert documents_of(slice_stream(stream_of(parts), start, stop)) == expected
    text, stats = "".join(map("".join, parts)), scan_stream(stream_of(parts))
    assert (stats.characters, stats.bytes, stats.documents) == (len(text), len(text.encode()), len(parts))
    assert stats.alphabet == "".join(sorted(set(text)))
    assert stats.fingerprint == hashlib.sha256(b"\xff".join("".join(p).encode() for p in parts)).hexdigest()


@given(documents, st.integers(1, 6), st.integers(0, 3))
def test_rechunk_splits_only_at_safe_points_or_the_limit(parts: list[list[str]], limit: int, every: int) -> None:
    def safe_split_point(text: str) -> int:
        return len(text) // every * every if every else 0

    chunks = list(rechunk(stream_of(parts), safe_split_point, limit))
    assert documents_of(iter(chunks)) == ["".join(p) for p in parts]
    for chunk, following in pairwise(chunks):
        if chunk is not None and following is not None:
            assert len(chunk) == limit if not every else len(chunk) % every == 0 or len(chunk) == limit


@pytest.mark.parametrize("characters", [0, 1, 1024, 5000, 131_072, 131_073, 1_000_000])
def test_a_sample_is_evenly_spread_and_bounded(characters: int) -> None:
    text = "".join(f"{i:07}" for i in range(characters // 7 + 1))[:characters]
    for chunk in (3000, 1 << 20):
        sample = scan_stream(text[i : i + chunk] for i in range(0, len(text), chunk)).sample
        assert len(sample) <= 128 and sum(map(len, sample)) <= 128 * 1024
        starts = [0] * len(sample)
        for i, part in enumerate(sample):
            starts[i] = text.index(part, starts[i - 1] + 1 if i else 0)
        assert all(after - before <= max(1024, characters // 32) for before, after in pairwise([*starts, characters]))
        if characters <= 131_072 and chunk > characters:
            assert "".join(sample) == text
