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


@pytest.mark.parametrize("text", [ENGLISH, GERMAN, RUSSIAN, JAPANESE, CHINESE, "x", "\n", "\x1b[31mred\x1b[0m\f\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_text_in_its_encoding_is_text_without_another_suggestion(text: str, encoding: str) -> None:
    data = text.encode(encoding)[:HEAD_BYTES]
    assert is_text(data, encoding)
    assert other_encoding(data, encoding) is None


@pytest.mark.parametrize(
    ("text", "encoding", "suggested"),
    [
        (ENGLISH, "cp1252", "cp1252"),
        (GERMAN, "latin-1", "cp1252"),  # equal for these characters
        ("caf\xe9 \x81\n" * 9, "latin-1", "latin-1"),
        (RUSSIAN, "cp1251", "cp1251, gb18030 or shift_jis"),
        (RUSSIAN, "koi8-r", "cp1251, gb18030 or shift_jis"),
        (CHINESE, "gb18030", "cp1251, gb18030 or shift_jis"),
        (JAPANESE, "shift_jis", "cp1251, gb18030 or shift_jis"),
        (JAPANESE, "euc-jp", "cp1251, gb18030 or shift_jis"),
        (ENGLISH, "utf-16", "utf-16"),
        (ENGLISH, "utf-16-le", "utf-16-le"),
        (ENGLISH, "utf-16-be", "utf-16-be"),
        (GERMAN, "utf-32", "utf-32"),
    ],
)
def test_text_in_another_encoding_than_utf_8_is_recognised(text: str, encoding: str, suggested: str) -> None:
    assert other_encoding(text.encode(encoding)[:HEAD_BYTES], "utf-8") == suggested


@pytest.mark.parametrize("text", [ENGLISH, GERMAN, RUSSIAN, JAPANESE, CHINESE])
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii", "gb18030", "shift_jis", "utf-16", "utf-32-be"])
def test_utf_8_is_recognised_when_another_encoding_is_expected(text: str, encoding: str) -> None:
    """Otherwise it would be decoded as mojibake without an error."""
    assert other_encoding(text.encode()[:HEAD_BYTES], encoding) == "utf-8"


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii", "gb18030", "shift_jis"])
def test_plain_ascii_is_text_in_every_encoding_that_extends_it(encoding: str) -> None:
    assert other_encoding(b"plain words\n" * 99, encoding) is None


@pytest.mark.parametrize(("text", "encoding"), [("联通", "gbk"), ("Ã©", "latin-1")])
def test_a_word_that_is_valid_utf_8_by_chance_keeps_its_encoding(text: str, encoding: str) -> None:
    assert other_encoding(text.encode(encoding), encoding) is None


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF32_BE, "utf-32"),
        (codecs.BOM_UTF8, "utf-8"),
    ],
)
def test_a_byte_order_mark_names_the_encoding(mark: bytes, encoding: str) -> None:
    order = "be" if mark in (codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE) else "le"
    data = mark + JAPANESE.encode(encoding if encoding == "utf-8" else f"{encoding}-{order}")
    for read_as in ("utf-8", "latin-1", "cp1252", "utf-16", "utf-32", "shift_jis"):
        same = codecs.lookup(read_as).name.startswith(encoding)
        assert other_encoding(data[:HEAD_BYTES], read_as) == (None if same else encoding)


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


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(20), "a PNG image"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n",
            "a Git LFS pointer (git lfs pull fetches the file)",
        ),
        (b"%PDF-1.7\nplain so far\n", "a PDF document"),
        (b"{\\rtf1\\ansi Hello}", "an RTF document"),
        (b"PK\x03\x04\x14\0", "a zip archive or an office document"),
        (b"a.txt".ljust(257, b"\0") + b"ustar\x0000", "a tar archive"),
        (b"PAR1\x15\x04", "a Parquet file"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_known_binary_formats_are_not_text_in_any_encoding(head: bytes, name: str, encoding: str) -> None:
    assert binary_format(head) == name
    assert not is_text(head, encoding)
    assert other_encoding(head, encoding) is None


def test_text_that_starts_with_a_signature_is_text() -> None:
    for start in ("GIF89a is a format.", "PAR1 is short.", "PK is a kind of zip."):
        assert is_text(start.encode(), "utf-8")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"text": "a"}\n{"text": "b"}', True),
        ('\n  [ {"a\\"b" : 1}]', True),
        ('{"long": "' + "x" * 9000, True),
        ("{}", False),
        ('{"no colon"}', False),
        ("[1, 2]", False),
        ("{x: 1}", False),
        ('"quoted": {"a": 1}', False),
    ],
)
def test_objects_with_keys_are_detected_as_json(text: str, expected: bool) -> None:
    assert is_json(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "name": "x"\n}', True),
        ('{"name":\n "x"}', True),
        ('{"text": "a"}\n{"text": "b"}\n', False),
        ('{"text": "a"}', False),
        ('{"text": "cut off here', False),
        ('[\n{"text": "a"}]', False),
    ],
)
def test_an_object_over_several_lines_is_a_single_object(text: str, expected: bool) -> None:
    assert is_single_json_object(text) is expected


NAMES = "Ada\nTom\nNell van Hask\nJonas\nBess\n" * 8


@pytest.mark.parametrize(
    "text", [NAMES, NAMES + "cut at the end of what was re", "münchen\nköln\n" * 20, "12\n7\n" * 20]
)
def test_short_lines_without_empty_ones_are_a_list(text: str) -> None:
    assert is_list(text)


@pytest.mark.parametrize(
    "text",
    [
        *(ENGLISH, GERMAN, RUSSIAN, JAPANESE, CHINESE),
        "Ada\nTom\n" * 5,  # too few
        NAMES + "\n" + NAMES,
        "Ada\tshe\nTom\the\n" * 20,
        "x = 1\nif x:\n    y()\n" * 20,
        "The sea was grey,\nthe sky was blue,\nand so were you.\n" * 20,
        "and the one who came\nbefore the others had seen the light of the sea\n" * 20,
        NAMES + "a" * 61 + "\n",
        "",
        "\n" * 50,
        "a" * 500,
    ],
)
def test_prose_verse_code_and_tables_are_no_list(text: str) -> None:
    assert not is_list(text)
