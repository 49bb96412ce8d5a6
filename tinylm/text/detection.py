"""What the beginning of a file says about it: text, text in another encoding, JSON, or no text at all."""

import codecs
import json
import re

HEAD_BYTES = 8192
# Signatures of common files that are no text. Those that are printable count only where the rest is not clean text.
_SIGNATURES = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"%PDF-", "a PDF document"),
    (b"{\\rtf", "an RTF document"),
    (b"PK\x03\x04", "a zip archive or an office document"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"PAR1", "a Parquet file"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3\0", "a SQLite database"),
    (b"\xd0\xcf\x11\xe0", "an office document"),
)
_ALWAYS_BINARY = (b"%PDF-", b"{\\rtf")  # formats that may be printable throughout, and still hold no plain text
_TAR = slice(257, 262)
_BYTE_ORDER_MARKS = (  # the longer ones first: that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# C0 controls that no text has; form feeds, backspaces and the escapes of terminals do occur.
_CONTROLS = frozenset(map(chr, (*range(8), *range(14, 27), *range(28, 32), 127)))
_MOST_CONTROLS = 0.03  # share of the characters, or bytes; a tenth of random bytes are controls
_FEWEST_BYTES_OF_UTF16 = 8  # in fewer, zeros at every second place are chance
_FEWEST_CHARACTERS_OF_UTF8 = 8  # beyond ASCII; fewer may be valid by chance in a text of GBK, for one
_JSON_OBJECT = re.compile(r'\s*(?:\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')


def signature(head: bytes) -> str | None:
    """The kind of a well-known file format that is not text, such as "a PNG image"."""
    if head[_TAR] == b"ustar":
        return "a tar archive"
    return next((name for start, name in _SIGNATURES if head.startswith(start)), None)


def decode_head(head: bytes, encoding: str) -> str | None:
    """The text of the beginning, a character that is cut at its end left out; `None` where it is not valid."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeError:
        return None


def is_text(head: bytes, encoding: str) -> bool:
    """Whether a file that begins like this is text in the encoding: valid, without zeros and with few controls."""
    text = decode_head(head, encoding)
    if text is None or "\0" in text or head.startswith(_ALWAYS_BINARY):
        return False
    return sum(character in _CONTROLS for character in text) <= _MOST_CONTROLS * len(text)


def is_undecodable_text(head: bytes, encoding: str) -> bool:
    """Whether it is not valid in the encoding, and looks like text nevertheless: of another one, or damaged."""
    if decode_head(head, encoding) is not None or signature(head) or 0 in head:
        return False
    controls = sum(head.count(character.encode()) for character in _CONTROLS)
    return controls <= _MOST_CONTROLS * len(head)


def other_encoding(head: bytes, encoding: str) -> str | None:
    """The encoding that text of another one is probably in; `None` for what is valid in `encoding`, and for no text.

    A byte-order mark and the zeros of UTF-16 are sure signs; among the 8-bit encodings it can only be an example.
    """
    family = codecs.lookup(encoding).name
    for mark, name in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return None if family.startswith(name) or not _decodes(head, name) else name
    if not family.startswith("utf-8") and _is_evidently_utf8(head, encoding):
        return "utf-8"
    for name, high in (("utf-16-le", head[1::2]), ("utf-16-be", head[::2])):
        wide = len(head) >= _FEWEST_BYTES_OF_UTF16 and high.count(0) > 0.4 * len(high)
        if wide and not family.startswith(("utf-16", "utf-32")) and _decodes(head, name) and _is_latin(head, name):
            return name
    if not is_undecodable_text(head, encoding) or _is_damaged_utf8(head):
        return None
    if sum(byte >= 0x80 for byte in head) > 0.3 * len(head):
        return "cp1251, gb18030 or shift_jis"
    return "cp1252" if decode_head(head, "cp1252") is not None else "latin-1"


def _decodes(head: bytes, encoding: str) -> bool:
    """Whether it is clean text in a UTF-16 or UTF-32 encoding."""
    return is_text(head[: len(head) // 4 * 4], encoding)


def _is_evidently_utf8(head: bytes, encoding: str) -> bool:
    """Whether it is valid UTF-8 and would be read as something else in `encoding`: chance hardly ever makes it so."""
    if not is_text(head, "utf-8"):
        return False
    if codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        return len(head) >= _FEWEST_BYTES_OF_UTF16
    beyond_ascii = sum(character > "\x7f" for character in decode_head(head, "utf-8") or "")
    return beyond_ascii >= _FEWEST_CHARACTERS_OF_UTF8 or (beyond_ascii > 0 and decode_head(head, encoding) is None)


def _is_latin(head: bytes, encoding: str) -> bool:
    """Whether most of it is ASCII, and all of it printable: small numbers of two bytes each have zeros as well."""
    text = decode_head(head, encoding) or ""
    return sum(map(str.isascii, text)) > 0.7 * len(text) and not _CONTROLS.intersection(text)


def _is_damaged_utf8(head: bytes) -> bool:
    """Whether more of its characters beyond ASCII are valid UTF-8 than not: it is UTF-8 with a bad byte in it."""
    valid = sum(character > "\x7f" for character in head.decode("utf-8", "ignore"))
    invalid = head.decode("utf-8", "replace").count("\ufffd")
    return valid > invalid


def is_json(text: str) -> bool:
    """Whether a text begins with a JSON object that has a key, or with an array of such objects."""
    return _JSON_OBJECT.match(text) is not None


def is_single_object(text: str) -> bool:
    """Whether the beginning of a file is that of one JSON object over several lines, which is no list of documents."""
    first, line_feed, _ = text.lstrip("\ufeff \t\r\n").partition("\n")
    if not first.startswith("{") or not line_feed:
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return False
