"""Detect from the first bytes of a file whether it is text, text in another encoding, JSON or binary."""

import codecs
import json
import re

from tinylm.system.files import LFS_POINTER

HEAD_BYTES = 8192
# Signatures of common binary formats. Valid text may begin with a printable one, such as "GIF8".
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
    (LFS_POINTER, "a Git LFS pointer (git lfs pull fetches the file)"),
)
_ALWAYS_BINARY = (b"%PDF-", b"{\\rtf", LFS_POINTER)  # formats that can be entirely printable but are not plain text
_TAR = slice(257, 262)  # position of the signature of a tar archive
_BYTE_ORDER_MARKS = (  # longer ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Control characters (C0 and DEL) that do not occur in text, unlike form feeds, backspaces and terminal escapes.
_CONTROLS = frozenset(map(chr, (*range(8), *range(14, 27), *range(28, 32), 127)))
_CONTROL = re.compile(f"[{re.escape(''.join(sorted(_CONTROLS)))}]")
_MAX_CONTROL_SHARE = 0.03  # of the characters or bytes; 10 % of random bytes are controls
_MIN_LIST_LINES = 20
_MEAN_ITEM, _LONGEST_ITEM = 24, 60  # characters of the lines of a list
# Tables, indentation, and the ends of lines of prose and code.
_NOT_IN_LISTS = re.compile(r"\t|^\s|[.,:;!?。，！？；：、=(){}\[\]<>|]$", re.MULTILINE)
_MIN_UTF16_BYTES = 8  # in fewer, zeros at every second position may be chance
_MIN_UTF8_CHARACTERS = 8  # non-ASCII characters; fewer in another encoding, such as GBK, may be valid UTF-8 by chance
_JSON_OBJECT = re.compile(r'\s*(?:\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')


def binary_format(head: bytes) -> str | None:
    """The name of the binary format whose signature `head` has, such as "a PNG image", or `None`."""
    if head[_TAR] == b"ustar":
        return "a tar archive"
    return next((name for start, name in _SIGNATURES if head.startswith(start)), None)


def decode_head(head: bytes, encoding: str) -> str | None:
    """Decode the first bytes of a file, without an incomplete last character; `None` if they are not valid."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeError:
        return None


def is_text(head: bytes, encoding: str) -> bool:
    """Whether the first bytes of a file are valid in the encoding, without NULs and with few control characters."""
    text = decode_head(head, encoding)
    if text is None or "\0" in text or head.startswith(_ALWAYS_BINARY):
        return False
    return len(_CONTROL.findall(text)) <= _MAX_CONTROL_SHARE * len(text)


def is_list(text: str) -> bool:
    """Whether the whole lines of a text look like short texts of their own, such as names: without empty lines, short,
    and at most a few of them indented or ending like sentences or code.
    """
    lines = text.split("\n")[:-1]
    lengths = [len(line) for line in lines]
    return (
        len(lines) >= _MIN_LIST_LINES
        and min(lengths) > 0
        and max(lengths) <= _LONGEST_ITEM
        and sum(lengths) <= _MEAN_ITEM * len(lines)
        and sum(_NOT_IN_LISTS.search(line) is not None for line in lines) <= 0.05 * len(lines)
    )


def is_undecodable_text(head: bytes, encoding: str) -> bool:
    """Whether the bytes are not valid in the encoding but look like text: damaged, or in another encoding."""
    if decode_head(head, encoding) is not None or binary_format(head) or 0 in head:
        return False
    controls = sum(head.count(character.encode()) for character in _CONTROLS)
    return controls <= _MAX_CONTROL_SHARE * len(head)


def other_encoding(head: bytes, encoding: str) -> str | None:
    """The probable encoding of text that is not in `encoding`.

    `None` for text in `encoding`, for UTF-8 with some invalid bytes and for binary data.

    UTF encodings are detected reliably. 8-bit and East Asian encodings cannot be distinguished, so the result is an
    example, or a list of them, for a message.
    """
    expected = codecs.lookup(encoding).name
    is_wide = expected.startswith(("utf-16", "utf-32"))
    for mark, name in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return None if expected.startswith(name) or not _is_wide_text(head, name) else name
    if not expected.startswith("utf-8") and _is_clearly_utf8(head, encoding):
        return "utf-8"
    for name, high in (("utf-16-le", head[1::2]), ("utf-16-be", head[::2])):
        if is_wide or len(head) < _MIN_UTF16_BYTES or high.count(0) <= 0.4 * len(high):
            continue
        if _is_wide_text(head, name) and _is_mostly_ascii(head, name):
            return name
    if not is_undecodable_text(head, encoding) or _is_damaged_utf8(head):
        return None
    if sum(byte >= 0x80 for byte in head) > 0.3 * len(head):
        return "cp1251, gb18030 or shift_jis"
    return "cp1252" if decode_head(head, "cp1252") is not None else "latin-1"


def _is_wide_text(head: bytes, encoding: str) -> bool:
    """Whether the bytes, up to the last multiple of four, are text in a UTF encoding."""
    return is_text(head[: len(head) // 4 * 4], encoding)


def _is_clearly_utf8(head: bytes, encoding: str) -> bool:
    """Whether the bytes are UTF-8 that is unlikely to be valid by chance, and decode differently in `encoding`."""
    if not is_text(head, "utf-8"):
        return False
    if codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        return len(head) >= _MIN_UTF16_BYTES
    non_ascii = sum(character > "\x7f" for character in decode_head(head, "utf-8") or "")
    return non_ascii >= _MIN_UTF8_CHARACTERS or (non_ascii > 0 and decode_head(head, encoding) is None)


def _is_mostly_ascii(head: bytes, encoding: str) -> bool:
    """Whether most characters are ASCII and none is a control character, unlike in arrays of 16-bit numbers."""
    text = decode_head(head, encoding) or ""
    return sum(map(str.isascii, text)) > 0.7 * len(text) and not _CONTROLS.intersection(text)


def _is_damaged_utf8(head: bytes) -> bool:
    """Whether the bytes are UTF-8 with some invalid bytes: fewer than the valid non-ASCII characters."""
    valid = sum(character > "\x7f" for character in head.decode("utf-8", "ignore"))
    invalid = head.decode("utf-8", "replace").count("\ufffd")
    return valid > invalid


def is_json(text: str) -> bool:
    """Whether a text begins with a non-empty JSON object, or with an array that begins with one."""
    return _JSON_OBJECT.match(text) is not None


def is_chat(text: str) -> bool:
    """Whether a text begins with a JSON object, or an array of objects, with the keys of a conversation and no `text`.

    The keys are those of a layout in `tinylm.text.chat`. If the text ends within the object, so that later keys are
    unknown, `prompt`, `completion` or `instruction` is enough.
    """
    return has_chat_keys(*_first_keys(text))


def has_chat_keys(keys: set[str], complete: bool = True) -> bool:
    """Whether these are the keys of a conversation. `complete`: whether the object has no other keys."""
    if "text" in keys:
        return False
    pairs = ({"prompt", "completion"}, {"instruction", "output"})
    if not complete and keys & {"prompt", "completion", "instruction"}:
        return True
    return bool(keys & {"messages", "conversations"}) or any(pair <= keys for pair in pairs)


def _first_keys(text: str) -> tuple[set[str], bool]:
    """The keys of the first JSON object of a text, alone or in an array, and whether the object is complete."""
    start = _JSON_OBJECT.match(text)
    keys: set[str] = set()
    if start is None:
        return keys, True
    decoder = json.JSONDecoder()
    at = text.index("{") + 1
    try:
        while True:
            key, at = decoder.raw_decode(text, _skip_blanks(text, at))
            keys.add(str(key))
            _, at = decoder.raw_decode(text, _skip_blanks(text, _skip_blanks(text, at) + 1))  # after the colon
            at = _skip_blanks(text, at)
            if text[at] != ",":
                return keys, text[at] == "}"
            at += 1
    except (ValueError, IndexError, RecursionError):
        return keys, False


def _skip_blanks(text: str, at: int) -> int:
    """The position of the first character from `at` on that is not JSON white space; `len(text)` if there is none."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def is_single_json_object(text: str) -> bool:
    """Whether a text begins with a JSON object over several lines, which is neither JSONL nor an array of documents."""
    first, line_feed, _ = text.lstrip("\ufeff \t\r\n").partition("\n")
    if not first.startswith("{") or not line_feed:
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return False
