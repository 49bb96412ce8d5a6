"""Detection of text, encodings and binary formats, on encoded text and on the signatures of formats."""

import codecs
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinylm.text.format_detection import (
    HEAD_BYTES,
    binary_format,
    is_json,
    is_list,
    is_single_json_object,
    is_text,
    other_encoding,
)

ENGLISH = "The café's menu — “déjà vu” — costs 5 € a person.\n" * 20
GERMAN = "Die Straße zum Schloß ist für Fußgänger gesperrt.\r\n" * 20
RUSSIAN = "Все счастливые семьи похожи друг на друга.\n" * 20
JAPANESE = "吾輩は猫である。名前はまだ無い。\n" * 20
CHINESE = "道可道，非常道。名可名，非常名。\n" * 20


PROSE = (ENGLISH, GERMAN, RUSSIAN, JAPANESE, CHINESE)
ASCII_BASED = ("latin-1", "cp1252", "ascii", "gb18030", "shift_jis")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_text_in_its_encoding_is_text_without_another_suggestion(encoding: str) -> None:
    for text in (*PROSE, "x", "\n", "\x1b[31mred\x1b[0m\f\n"):
        data = text.encode(encoding)[:HEAD_BYTES]
        assert is_text(data, encoding), text
        assert other_encoding(data, encoding) is None, text


def test_text_in_another_encoding_than_utf_8_is_recognised() -> None:
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


def test_utf_8_is_recognised_when_another_encoding_is_expected() -> None:
    """Otherwise it would be decoded as mojibake without an error."""
    for encoding in (*ASCII_BASED, "utf-16", "utf-32-be"):
        assert [other_encoding(text.encode()[:HEAD_BYTES], encoding) for text in PROSE] == ["utf-8"] * 5, encoding


def test_text_that_is_valid_in_two_encodings_keeps_the_expected_one() -> None:
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
def test_random_bytes_are_not_text_in_another_encoding(seed: int, zeros: bool) -> None:
    noise = random.Random(seed).randbytes(1000)
    if not zeros:
        noise = noise.replace(b"\0", b"\x80")
    assert other_encoding(noise, "utf-8") is None
    assert not is_text(noise, "utf-8") and not is_text(noise, "latin-1")


def test_16_bit_numbers_are_not_utf_16() -> None:
    rng = random.Random(0)
    for numbers in (range(200), (rng.randrange(300) for _ in range(500)), (rng.gauss(200, 20) for _ in range(500))):
        data = b"".join(int(number).to_bytes(2, "little") for number in numbers)
        assert other_encoding(data, "utf-8") is None


def test_utf_8_with_an_invalid_byte_is_not_another_encoding() -> None:
    data = GERMAN.encode()
    damaged = data[:100] + b"\xff" + data[100:]
    assert other_encoding(damaged, "utf-8") is None
    assert not is_text(damaged, "utf-8")


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
    assert {head: binary_format(head) for head in names} == names
    for head in names:
        for encoding in ("utf-8", "latin-1"):
            assert not is_text(head, encoding) and other_encoding(head, encoding) is None, head
    for start in ("GIF89a is a format.", "PAR1 is short.", "PK is a kind of zip."):
        assert is_text(start.encode(), "utf-8"), start


def test_objects_with_keys_are_detected_as_json() -> None:
    records = ('{"text": "a"}\n{"text": "b"}', '\n  [ {"a\\"b" : 1}]', '{"long": "' + "x" * 9000)
    others = ("{}", '{"no colon"}', "[1, 2]", "{x: 1}", '"quoted": {"a": 1}')
    assert [text for text in records if not is_json(text)] + [text for text in others if is_json(text)] == []


def test_an_object_over_several_lines_is_a_single_object() -> None:
    single = ('{\n  "name": "x"\n}', '{"name":\n "x"}')
    others = ('{"text": "a"}\n{"text": "b"}\n', '{"text": "a"}', '{"text": "cut off here', '[\n{"text": "a"}]')
    assert [text for text in single if not is_single_json_object(text)] == []
    assert [text for text in others if is_single_json_object(text)] == []


NAMES = "Ada\nTom\nNell van Hask\nJonas\nBess\n" * 8


def test_short_lines_without_empty_ones_are_a_list() -> None:
    lists = (NAMES, NAMES + "cut at the end of what was re", "münchen\nköln\n" * 20, "12\n7\n" * 20)
    assert [text for text in lists if not is_list(text)] == []


def test_prose_verse_code_and_tables_are_no_list() -> None:
    others = (
        *PROSE,
        "Ada\nTom\n" * 5,  # too few
        NAMES + "\n" + NAMES,
        "Ada\tshe\nTom\the\n" * 20,
        "x = 1\nif x:\n    y()\n" * 20,
        "The sea was grey,\nthe sky was blue,\nand so were you.\n" * 20,
        "and the one who came\nbefore the others had seen the light of the sea\n" * 20,
        NAMES + "a" * 61 + "\n",
        *("", "\n" * 50, "a" * 500),
    )
    assert [text for text in others if is_list(text)] == []
