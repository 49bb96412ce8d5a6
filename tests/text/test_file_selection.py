"""The files that are read, skipped and refused in folders and by patterns; detection of text, encodings and formats."""

import codecs
import gzip
import io
import itertools
import json
import lzma
import os
import random
import re
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.corpora import documents_of, read_documents, require_errors, write_file
from tinylm.errors import BadFilesError, UsageError
from tinylm.text import file_selection, files
from tinylm.text.corpus import find_corpus
from tinylm.text.file_selection import BAD, describe_skipped, is_json, is_list
from tinylm.text.files import CHUNK_BYTES, HEAD_BYTES, encoding_of, is_text, is_undecodable_text, unmarked_utf16

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
        "linked to folders or to nothing": {"broken", "loop"},
        **({"of special kinds, such as pipes": {"pipe"}} if hasattr(os, "mkfifo") else {}),
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
        ("long enough", "utf-16-le", "utf-16-le"),
        ("Привет, мир", "cp1251", "cp1251"),
    ):
        write_file(file, text.encode(encoding))
        for path in (file, tmp_path / "texts"):
            with pytest.raises(UsageError, match=rf"{re.escape(str(file))} is .*") as caught:
                find_corpus([str(path)])
            assert re.search(rf"\b{suggested}\b", str(caught.value)) and "`encoding" in str(caught.value)
        assert read_documents(file, encoding=suggested) == [text]
    write_file(file, "größer ".encode() + b"\xff" + "für".encode())
    with pytest.raises(UsageError, match=rf"{re.escape(str(file))} is not valid UTF-8 \(byte 0xFF at offset 9\)"):
        read_documents(tmp_path / "texts")
    png = write_file(tmp_path / "x.png", PNG)
    unknown = write_file(tmp_path / "x.bin", b"\xfe\0\x01\x02" * 100)
    advice = "If it looks right in another encoding, such as .*, name that with `encoding`; leave binary files out"
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


def test_text_is_recognised_in_its_encoding_and_utf_16_without_a_mark() -> None:
    short = ("x", "\n", "\x1b[31mred\x1b[0m\f\n")
    for text, encoding in itertools.product((*PROSE, *short), ("utf-8", "utf-16", "utf-32")):
        data = text.encode(encoding)[:HEAD_BYTES]
        assert is_text(data, encoding), (text, encoding)
    for text, encoding in itertools.product((ENGLISH, GERMAN, "long"), ("utf-16-le", "utf-16-be")):
        assert unmarked_utf16(text.encode(encoding)[:HEAD_BYTES]) == encoding
    for text, encoding in ((b"plain words\n" * 99, None), *((text.encode(), None) for text in (*PROSE, *short))):
        assert unmarked_utf16(text) is encoding


NAMED = (*ASCII_BASED, "koi8-r", "big5", "utf-7", "iso2022_jp", "utf-16", "utf-16-le", "utf-32-be")


def test_the_encoding_is_by_the_byte_order_mark_else_utf_8_else_the_named_one(tmp_path: Path) -> None:
    marks = {
        codecs.BOM_UTF16_LE: ("utf-16", "utf-16-le"),
        codecs.BOM_UTF16_BE: ("utf-16", "utf-16-be"),
        codecs.BOM_UTF32_LE: ("utf-32", "utf-32-le"),
        codecs.BOM_UTF32_BE: ("utf-32", "utf-32-be"),
        codecs.BOM_UTF8: ("utf-8", "utf-8"),
    }
    for named in ("utf-8", *NAMED):
        for mark, (name, encoding) in marks.items():
            file = write_file(tmp_path / "a.txt", mark + JAPANESE.encode(encoding))
            assert encoding_of(file, named) == name, named
            assert read_documents(file, encoding=named) == [JAPANESE]
        for text in (*PROSE, "a" * CHUNK_BYTES + "é", "x" * 40):  # the first two chunks may be ASCII
            normalised = text.replace("\r\n", "\n")
            assert read_documents(write_file(tmp_path / "a.txt", text), encoding=named) == [normalised], named
    for text, encoding in (
        *((text, encoding) for text in (ENGLISH, "café", "a" * (CHUNK_BYTES - 1) + "é") for encoding in ("cp1252",)),
        *((RUSSIAN, encoding) for encoding in ("cp1251", "koi8-r", "utf-16-le", "utf-32-be")),
        *((JAPANESE, encoding) for encoding in ("shift_jis", "euc-jp", "iso2022_jp", "utf-16-be", "gb18030")),
        *((text, encoding) for text in ("hello + é", "漢字") for encoding in ("utf-7", "utf-16-le")),
        ("plain words", "cp037"),
    ):
        file = write_file(tmp_path / "a.txt", text.encode(encoding))
        assert encoding_of(file, encoding) == encoding, (text[:9], encoding)
        assert read_documents(file, encoding=encoding) == [text]
    file = write_file(tmp_path / "a.txt", GERMAN.encode() + b"\xff")  # damaged UTF-8 is not read as something else
    with pytest.raises(UsageError, match=rf"a\.txt is not valid UTF-8 \(byte 0xFF at offset {file.stat().st_size - 1}"):
        read_documents(file, encoding="latin-1")


def test_a_folder_of_several_encodings_is_read_if_the_one_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    folder, late = tmp_path / "texts", "a" * CHUNK_BYTES + "é\n"
    data = {
        "a.txt": ENGLISH.encode(),
        "b.txt": b"caf\xe9",
        "c.txt": late.encode("latin-1"),
        "d.csv": b"text\n\xfcber\n",
    }
    data |= {"e.txt": "é".encode(), "f.txt": GERMAN.encode("utf-16"), "g.txt": b"plain"}
    data["h.jsonl"] = '{"text": "größer"}\n'.encode("latin-1")
    for name, content in data.items():
        write_file(folder / name, content)
    expected = [ENGLISH, "café", late, "über", "é", GERMAN.replace("\r\n", "\n"), "plain", "größer"]
    assert read_documents(folder, encoding="latin-1") == expected
    with pytest.raises(
        BadFilesError, match=r"4 of 8 files cannot be read: .*b\.txt is.*c\.txt is.*d\.csv is.*h\.jsonl is"
    ):
        read_documents(folder)


@given(st.integers(0, 2**32), st.booleans())
def test_random_bytes_16_bit_numbers_and_damaged_utf_8_are_not_text(seed: int, zeros: bool) -> None:
    noise = random.Random(seed).randbytes(1000)
    noise = noise if zeros else noise.replace(b"\0", b"\x80")
    assert unmarked_utf16(noise) is None
    assert not is_text(noise, "utf-8") and not is_text(noise, "latin-1")
    rng = random.Random(seed)
    for numbers in (range(200), (rng.randrange(300) for _ in range(500)), (rng.gauss(200, 20) for _ in range(500))):
        assert unmarked_utf16(b"".join(int(number).to_bytes(2, "little") for number in numbers)) is None
    assert not is_text(GERMAN.encode()[:100] + b"\xff" + GERMAN.encode()[100:], "utf-8")


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
    assert {head: files.binary_format(head) for head in names} == names
    for head in names:
        for encoding in ("utf-8", "latin-1"):
            assert not is_text(head, encoding) and not is_undecodable_text(head, encoding), head
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


# Files that cannot be read


def bad_files(folder: Path) -> dict[str, str]:
    """Write files that cannot be read to their ends, and two good ones; the problems by the names of the bad ones."""
    text = "".join(f"line {number}\n" for number in range(20_000))
    flipped = bytearray(gzip.compress(text.encode()))
    flipped[len(flipped) // 2] ^= 0xFF
    table = pa.table({"text": [f"{number} {'x' * (number % 50)}" for number in range(5000)]})
    pq.write_table(table, write_file(folder / "f.parquet", b""), compression="gzip", use_dictionary=False)
    page = bytearray((folder / "f.parquet").read_bytes())
    page[len(page) // 4 : len(page) // 4 + 100] = bytes(100)
    files = {
        "a.txt": ("ok\n" * CHUNK_BYTES).encode() + b"\xff",
        "b.txt.gz": gzip.compress(text.encode())[:-20],
        "c.txt.xz": lzma.compress(text.encode())[:-20],
        "d.txt.gz": bytes(flipped),
        "e.parquet": bytes(page)[:-20],
        "f.parquet": bytes(page),
        "g.jsonl": LINES + '{"text": "cut',
        "h.txt": "café\n".encode("latin-1"),
    }
    for name, content in {**files, "good.txt": GERMAN, "good.jsonl": LINES}.items():
        write_file(folder / name, content)
    gzip_problem, xz_problem = (f"is damaged or not {name} data" for name in ("gzip", "xz"))
    return {
        "a.txt": f"is not valid UTF-8 (byte 0xFF at offset {3 * CHUNK_BYTES})",
        "b.txt.gz": gzip_problem,
        "c.txt.xz": xz_problem,
        "d.txt.gz": gzip_problem,
        **dict.fromkeys(("e.parquet", "f.parquet"), "Cannot read"),
        "g.jsonl": "invalid JSON",
        "h.txt": "is not valid UTF-8 (byte 0xE9 at offset 3)",
    }


def test_all_files_that_cannot_be_read_are_in_one_error_and_skip_bad_leaves_them_out(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    problems = bad_files(folder)
    corpus = find_corpus([str(folder)], skip_bad=True)
    assert documents_of(corpus.stream()) == ["one", "two", GERMAN.replace("\r\n", "\n")]
    found = {file.path.name: file.problem for file in corpus.skipped if file.reason == BAD}
    assert found.keys() == problems.keys()
    assert {name: problem for name, problem in problems.items() if problem not in found[name]} == {}
    for names in (problems.keys(), ("a.txt", "b.txt.gz", "d.txt.gz", "f.parquet", "g.jsonl")):  # damaged in the middle
        for name in problems.keys() - names:
            (folder / name).unlink()
        with pytest.raises(BadFilesError) as caught:
            find_corpus([str(folder)]).scan()
        message = str(caught.value)
        assert (
            message.startswith(f"{len(names)} of {len(names) + 2} files cannot be read: ") and caught.value.is_skippable
        )
        named = [name for name in names if str(folder / name) in message]
        assert len(named) == 5 and ("and 3 more. Name the encoding" in message) == (len(names) == 8)
        assert all(problems[name] in message for name in named)
    with pytest.raises(BadFilesError, match="2 of 2 files cannot be read") as caught:
        find_corpus([str(folder / "b.txt.gz"), str(folder / "g.jsonl")], skip_bad=True)
    assert not caught.value.is_skippable


def test_an_error_about_one_file_or_about_what_its_records_hold_reads_no_other(tmp_path: Path) -> None:
    """Otherwise a wrong `text_key` would be reported only after reading the whole corpus."""
    good = write_file(tmp_path / "good.jsonl", LINES)
    cut = write_file(
        tmp_path / "cut.txt.gz", gzip.compress(random.Random(0).randbytes(3 * HEAD_BYTES).hex().encode())[:-9]
    )
    with pytest.raises(UsageError, match=r"line 1: no text under 'body'"):
        find_corpus([str(good), str(cut)], text_key="body").scan()
    with pytest.raises(BadFilesError, match=r"cut\.txt\.gz is damaged or not gzip data .* Copy or compress") as caught:
        find_corpus([str(cut)]).scan()
    assert not caught.value.is_skippable


def test_files_and_subfolders_are_excluded_by_name_or_path(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    names = ["a.log", "a.txt", "b.txt", "drafts/a.txt", "drafts/deep/c.md", "old/drafts.txt", "[x].txt"]
    for name in names:
        write_file(folder / name, name)
    rows: list[tuple[list[str], set[str]]] = [
        (["*.log"], {"a.log"}),
        (["a.txt"], {"a.txt", "drafts/a.txt"}),
        (["drafts"], {"drafts/a.txt", "drafts/deep/c.md"}),
        (["drafts/"], {"drafts/a.txt", "drafts/deep/c.md"}),
        (["drafts/*.txt", "[[]x*"], {"drafts/a.txt", "[x].txt"}),
        ([f"{folder}/[ab].txt"], {"a.txt", "b.txt"}),
        (["*.TXT", "c"], set()),
    ]
    for patterns, left_out in rows:
        assert set(read_documents(folder, exclude=patterns)) == {*names} - left_out, patterns
    skipped = find_corpus([str(folder)], exclude=["drafts", "*.log"]).skipped
    assert {(file.path.name, file.reason) for file in skipped} == {("drafts", "excluded"), ("a.log", "excluded")}
    assert read_documents(folder / "*.txt", folder / "drafts", exclude=["a.*"]) == [
        "[x].txt",
        "b.txt",
        "drafts/deep/c.md",
    ]
    with pytest.raises(UsageError, match=r"contains no text files .*excluded"):
        find_corpus([str(folder)], exclude=["*"])
    with pytest.raises(UsageError, match=r"`exclude` leaves no file of .*a\.txt"):
        find_corpus([str(folder / "a.txt")], exclude=["a*"])


def test_documents_that_a_program_converts_to_text_are_named_with_it(tmp_path: Path) -> None:
    docx = io.BytesIO()
    with zipfile.ZipFile(docx, "w") as archive:
        archive.writestr("word/document.xml", "<w:t>text</w:t>")
    files = {"a.pdf": b"%PDF-1.7\n\xe2\xe3", "b.docx": docx.getvalue(), "c.doc": b"\xd0\xcf\x11\xe0" + bytes(99)}
    for name, content in {**files, "d.png": PNG}.items():
        write_file(tmp_path / "texts" / name, content)
    tools = {"a.pdf": "pdftotext", "b.docx": "pandoc -t plain", "c.doc": "LibreOffice"}
    for name, tool in tools.items():
        with pytest.raises(UsageError, match=rf"{name} is .*convert it to text, for example with {tool}\."):
            find_corpus([str(tmp_path / "texts" / name)])
    words = r"pdftotext \(\.pdf\) and pandoc -t plain \(\.docx\) and LibreOffice \(\.doc\)\."
    with pytest.raises(UsageError, match=rf"contains no text files \(skipped: 4 binary .* with {words}"):
        find_corpus([str(tmp_path / "texts")])
