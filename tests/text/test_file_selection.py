"""The files that are read, skipped and refused in folders and by patterns; detection of text, encodings and formats."""

import codecs
import gzip
import itertools
import json
import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.corpora import read_documents, require_errors, write_file
from tinylm.errors import UsageError
from tinylm.text import file_selection
from tinylm.text.corpus import find_corpus
from tinylm.text.file_selection import HEAD_BYTES, describe_skipped, is_json, is_list, is_text, other_encoding

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


def test_a_folder_is_read_in_sorted_order_and_skipped_files_are_listed_by_reason(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    texts = {"a/c.txt": "AC", "a/z.md": "AZ", "a.txt": "A", "b.txt": "B"}
    texts |= {"head": "a" * 8191 + "漢", "late": "x" * 9000 + "\0"}  # its first bytes end within a character
    for name, content in {
        **texts,
        **{f"{number}.png": PNG for number in range(5)},
        "lines.jsonl": '{"text": "L1"}\n{"text": "L2"}\n',
        "sub/empty.txt": b"",
        ".git/objects/one": b"x",
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
    corpus = find_corpus([str(folder)])
    assert read_documents(folder) == [*texts.values(), "L1", "L2"]
    expected = {
        "binary": {"0.png", "1.png", "2.png", "3.png", "4.png", "zeros.bin", "a.tar.gz"},
        "empty": {"sub/empty.txt"},
        "hidden": {".git", ".hidden"},
        "JSON without documents": {"package.json"},
        "links to folders or to nothing": {"broken", "loop"},
        **({"pipes or devices": {"pipe"}} if hasattr(os, "mkfifo") else {}),
    }
    skipped = {
        reason: {file.path.relative_to(folder).as_posix() for file in corpus.skipped if file.reason == reason}
        for reason in {file.reason for file in corpus.skipped}
    }
    assert skipped == expected
    words = describe_skipped(corpus.skipped)
    assert words.startswith("7 binary (") and "0.png, 1.png, 2.png, ...)" in words
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


def test_an_error_about_a_named_file_gives_its_type_or_suggests_its_encoding(tmp_path: Path) -> None:
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
                find_corpus([str(path)])
        assert read_documents(file, encoding=suggested) == [text]
    write_file(file, "größer ".encode() + b"\xff" + "für".encode())
    with pytest.raises(UsageError, match=rf"{re.escape(str(file))} is not valid UTF-8 \(byte 0xFF at offset 9\)"):
        read_documents(tmp_path / "texts")
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


LINES = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two"))


def test_json_of_another_suffix_or_a_single_object_is_refused_unless_the_format_is_given(tmp_path: Path) -> None:
    """An unknown format is refused."""
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
    write_file(tmp_path / "code" / "a.ipynb", LINES)  # in a folder, files with the suffix .txt or none are refused
    assert read_documents(tmp_path / "code") == [LINES]
    write_file(tmp_path / "code" / "part-00000", LINES)
    with pytest.raises(UsageError, match="part-00000 contains JSON"):
        read_documents(tmp_path / "code")
    text = '{\n  "text": "one"\n}\n'
    file = write_file(tmp_path / "a.json", text)
    formats = r"`format` is '.*'; it must be one of: auto, jsonl, lines, text, pairs, chat, preferences, labels\."
    rows = [
        ("auto", r'a\.json is a single JSON object.*`format="text"`'),
        *((f, formats) for f in ("chats", "csv", "")),
    ]
    require_errors(lambda format: read_documents(file, format=format), rows)
    assert read_documents(file, format="text") == [text]


ENGLISH = "The café's menu — “déjà vu” — costs 5 € a person.\n" * 20
GERMAN = "Die Straße zum Schloß ist für Fußgänger gesperrt.\r\n" * 20
RUSSIAN = "Все счастливые семьи похожи друг на друга.\n" * 20
JAPANESE = "吾輩は猫である。名前はまだ無い。\n" * 20
CHINESE = "道可道，非常道。名可名，非常名。\n" * 20
PROSE = (ENGLISH, GERMAN, RUSSIAN, JAPANESE, CHINESE)
ASCII_BASED = ("latin-1", "cp1252", "ascii", "gb18030", "shift_jis")


def test_text_is_recognised_in_its_encoding_and_in_another_than_the_expected_one() -> None:
    """UTF-8 in an expected encoding would be mojibake; text that is valid in two keeps the expected one."""
    short = ("x", "\n", "\x1b[31mred\x1b[0m\f\n")
    for text, encoding in itertools.product((*PROSE, *short), ("utf-8", "utf-16", "utf-32")):
        data = text.encode(encoding)[:HEAD_BYTES]
        assert is_text(data, encoding) and other_encoding(data, encoding) is None, (text, encoding)
    national = "cp1251, gb18030 or shift_jis"
    rows = [
        (ENGLISH, "cp1252", "cp1252"),
        (GERMAN, "latin-1", "cp1252"),  # equal for these characters
        ("caf\xe9 \x81\n" * 9, "latin-1", "latin-1"),
        *((RUSSIAN, name, national) for name in ("cp1251", "koi8-r")),
        (CHINESE, "gb18030", national),
        *((JAPANESE, name, national) for name in ("shift_jis", "euc-jp")),
        *((ENGLISH, name, name) for name in ("utf-16", "utf-16-le", "utf-16-be")),
        (GERMAN, "utf-32", "utf-32"),
    ]
    found = [other_encoding(text.encode(encoding)[:HEAD_BYTES], "utf-8") for text, encoding, _ in rows]
    assert found == [suggested for *_, suggested in rows]
    for encoding in (*ASCII_BASED, "utf-16", "utf-32-be"):
        assert [other_encoding(text.encode()[:HEAD_BYTES], encoding) for text in PROSE] == ["utf-8"] * 5, encoding
    plain = [("plain words\n" * 99, encoding) for encoding in ASCII_BASED]
    for text, encoding in (*plain, ("联通", "gbk"), ("Ã©", "latin-1")):  # words that are valid UTF-8 by chance
        assert other_encoding(text.encode(encoding), encoding) is None, encoding


def test_a_byte_order_mark_names_the_encoding() -> None:
    marks = {
        codecs.BOM_UTF16_LE: ("utf-16", "utf-16-le"),
        codecs.BOM_UTF16_BE: ("utf-16", "utf-16-be"),
        codecs.BOM_UTF32_LE: ("utf-32", "utf-32-le"),
        codecs.BOM_UTF32_BE: ("utf-32", "utf-32-be"),
        codecs.BOM_UTF8: ("utf-8", "utf-8"),
    }
    for mark, (name, encoding) in marks.items():
        data = mark + JAPANESE.encode(encoding)
        for read_as in ("utf-8", "latin-1", "cp1252", "utf-16", "utf-32", "shift_jis"):
            same = codecs.lookup(read_as).name.startswith(name)
            assert other_encoding(data[:HEAD_BYTES], read_as) == (None if same else name), (name, read_as)


@given(st.integers(0, 2**32), st.booleans())
def test_random_bytes_16_bit_numbers_and_damaged_utf_8_are_not_another_encoding(seed: int, zeros: bool) -> None:
    noise = random.Random(seed).randbytes(1000)
    noise = noise if zeros else noise.replace(b"\0", b"\x80")
    assert other_encoding(noise, "utf-8") is None
    assert not is_text(noise, "utf-8") and not is_text(noise, "latin-1")
    rng = random.Random(seed)
    for numbers in (range(200), (rng.randrange(300) for _ in range(500)), (rng.gauss(200, 20) for _ in range(500))):
        assert other_encoding(b"".join(int(number).to_bytes(2, "little") for number in numbers), "utf-8") is None
    damaged = GERMAN.encode()[:100] + b"\xff" + GERMAN.encode()[100:]
    assert other_encoding(damaged, "utf-8") is None and not is_text(damaged, "utf-8")


def test_known_binary_formats_are_not_text_in_any_encoding() -> None:
    names = {
        b"\x89PNG\r\n\x1a\n" + bytes(20): "a PNG image",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n": (
            "a Git LFS pointer (git lfs pull fetches the file)"
        ),
        b"%PDF-1.7\nplain so far\n": "a PDF document",
        b"{\\rtf1\\ansi Hello}": "an RTF document",
        b"PK\x03\x04\x14\0": "a zip archive or an office document",
        b"a.txt".ljust(257, b"\0") + b"ustar\x0000": "a tar archive",
        b"PAR1\x15\x04": "a Parquet file",
    }
    assert {head: file_selection.binary_format(head) for head in names} == names
    for head in names:
        for encoding in ("utf-8", "latin-1"):
            assert not is_text(head, encoding) and other_encoding(head, encoding) is None, head
    for start in ("GIF89a is a format.", "PAR1 is short.", "PK is a kind of zip."):
        assert is_text(start.encode(), "utf-8"), start


def test_json_and_a_single_object_are_detected() -> None:
    records = ('{"text": "a"}\n{"text": "b"}', '\n  [ {"a\\"b" : 1}]', '{"long": "' + "x" * 9000)
    others = ("{}", '{"no colon"}', "[1, 2]", "{x: 1}", '"quoted": {"a": 1}')
    assert [text for text in records if not is_json(text)] + [text for text in others if is_json(text)] == []
    single = ('{\n  "name": "x"\n}', '{"name":\n "x"}')
    others = ('{"text": "a"}\n{"text": "b"}\n', '{"text": "a"}', '{"text": "cut off here', '[\n{"text": "a"}]')
    assert [file_selection.is_single_json_object(text) for text in (*single, *others)] == [True] * 2 + [False] * 4


NAMES = "Ada\nTom\nNell van Hask\nJonas\nBess\n" * 8


def test_short_lines_without_empty_ones_are_a_list_unlike_prose_verse_code_and_tables() -> None:
    lists = (NAMES, NAMES + "cut at the end of what was re", "münchen\nköln\n" * 20, "12\n7\n" * 20)
    lists += (("a" * 24 + "\n") * 20, NAMES + "a" * 60 + "\n", "a\n" * 20)
    others = (
        *PROSE,
        "a\n" * 19,
        ("a" * 25 + "\n") * 20,
        NAMES + "\n" + NAMES,
        "Ada\tshe\nTom\the\n" * 20,
        "x = 1\nif x:\n    y()\n" * 20,
        "The sea was grey,\nthe sky was blue,\nand so were you.\n" * 20,
        "and the one who came\nbefore the others had seen the light of the sea\n" * 20,
        NAMES + "a" * 61 + "\n",
        *("", "\n" * 50, "a" * 500),
    )
    assert [text for text in lists if not is_list(text)] + [text for text in others if is_list(text)] == []
