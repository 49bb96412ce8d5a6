"""Select the text files among named files, folders and glob patterns, and record why others are skipped.

The first bytes of a file show whether it is text, text in another encoding, JSON or binary.
"""

import codecs
import glob
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tinylm.errors import UsageError
from tinylm.system.files import LFS_POINTER
from tinylm.text.compression import content_suffix, decompressed_chunks, display_name
from tinylm.text.readers import SIGNATURE, is_json_file, is_parquet, parquet_columns

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

    The keys are those of a layout in `tinylm.text.chat`, or of a preference. If the text ends within the object, so
    that later keys are unknown, `prompt`, `completion`, `instruction`, `chosen` or `rejected` is enough.
    """
    return has_chat_keys(*_first_keys(text))


def has_chat_keys(keys: set[str], complete: bool = True) -> bool:
    """Whether these are the keys of a conversation. `complete`: whether the object has no other keys."""
    if "text" in keys:
        return False
    pairs = ({"prompt", "completion"}, {"instruction", "output"}, {"chosen", "rejected"})
    if not complete and keys & {"prompt", "completion", "instruction", "chosen", "rejected"}:
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


# Reasons to skip a file or a subfolder, as they appear in messages.
BINARY, EMPTY, HIDDEN, NO_DOCUMENTS = "binary", "empty", "hidden", "JSON without documents"
RUNS = "run directories"
TWICE = "named twice"
LINKS, SPECIAL = "links to folders or to nothing", "pipes or devices"
_MAX_LISTED_NAMES = 3  # per reason


@dataclass(frozen=True)
class SkippedFile:
    """A file or subfolder of `folder` that is not read.

    reason: one of the constants above. size: in bytes if the reason is BINARY or NO_DOCUMENTS, else 0.
    """

    folder: str
    path: Path
    reason: str
    size: int


@dataclass(frozen=True)
class FileRules:
    """The settings that decide which files are read.

    With the `format` auto, `reject_json` makes JSON in a file without a JSON suffix an error; in folders, only in .txt
    files and files without a suffix. Objects with all of `accepted_keys` are no error, unless that is empty.
    """

    encoding: str
    format: str
    reject_json: bool
    accepted_keys: frozenset[str] = frozenset()


def expand_globs(names: Iterable[str]) -> Iterator[str]:
    """Replace each glob pattern, such as texts/*.txt, by its matches in sorted order.

    The name of an existing file is not a pattern. Raises UsageError for a pattern without a match.
    """
    for name in names:
        if not glob.has_magic(name) or os.path.lexists(name):
            yield name
            continue
        matches = sorted(map(Path, glob.glob(name, recursive=True)))  # noqa: PTH207
        if not matches:
            raise UsageError(f"No file matches the pattern {name!r}; check it, or name the files.")
        yield from map(str, matches)


def check_named_file(file: Path, rules: FileRules) -> None:
    """Raise UsageError for a file that the user named and whose content cannot be used (see `_reason_by_content`)."""
    _reason_by_content(file, rules, named=True)


def find_text_files(folder: Path, rules: FileRules) -> tuple[list[Path], list[SkippedFile]]:
    """The text files of a folder and its subfolders, sorted, and the skipped files.

    Raises UsageError for a file that cannot be read, for text in another encoding, for JSON that `rules` reject and for
    a folder without text.
    """
    text_files: list[Path] = []
    skipped: list[SkippedFile] = []
    for path, reason in _entries_below(folder):
        reason = reason or _reason_by_content(path, rules, named=False)
        if reason is None:
            text_files.append(path)
        else:
            size = path.stat().st_size if reason in (BINARY, NO_DOCUMENTS) else 0
            skipped.append(SkippedFile(str(folder), path, reason, size))
    if not text_files:
        reasons = f" (skipped: {describe_skipped(skipped)})" if skipped else ""
        raise UsageError(f"The folder {folder} contains no text files{reasons}; name another folder, or a file.")
    return text_files, skipped


def describe_skipped(skipped: Iterable[SkippedFile]) -> str:
    """Count files by reason, with some names: 9 binary (1.2 MB: a.png, b.zip, c.pdf, ...), 2 empty (d.txt, e.txt)."""
    by_reason: dict[str, list[SkippedFile]] = {}
    for file in skipped:
        by_reason.setdefault(file.reason, []).append(file)
    parts = []
    for reason, files in sorted(by_reason.items(), key=_by_size_and_number):
        names = [str(file.path.relative_to(file.folder)) for file in files[:_MAX_LISTED_NAMES]]
        names += ["..."] * (len(files) > _MAX_LISTED_NAMES)
        size = sum(file.size for file in files)
        parts.append(f"{len(files)} {reason} ({f'{format_size(size)}: ' if size else ''}{', '.join(names)})")
    return ", ".join(parts)


def _by_size_and_number(reason: tuple[str, list[SkippedFile]]) -> tuple[int, int]:
    """Sort key: most bytes first, then most files."""
    return -sum(file.size for file in reason[1]), -len(reason[1])


def format_size(size: int) -> str:
    """A number of bytes for a message: "1.2 MB", or "300 bytes" below 50 kB."""
    return f"{size / 1e6:,.1f} MB" if size >= 50_000 else f"{size:,} bytes"


def _entries_below(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """All files below a folder, and the folders that are not searched, sorted, with the reasons to skip them.

    The reason is `None` for a regular file that is not hidden: whether it is skipped depends on its content. Raises
    UsageError for a folder or file that cannot be read.
    """
    entries: list[tuple[Path, str | None]] = []
    for parent, folders, names in os.walk(folder, onerror=_raise_cannot_read):
        if "config.json" in names and {"last", "model.safetensors", "adapter.safetensors"} & {*names, *folders}:
            entries.append((Path(parent), RUNS))  # its JSON files are not training text
            folders.clear()
            continue
        for name in list(folders):
            path = Path(parent, name)
            if name.startswith(".") or path.is_symlink():
                entries.append((path, HIDDEN if name.startswith(".") else LINKS))
                folders.remove(name)
        entries += ((Path(parent, name), _reason_by_type(Path(parent, name))) for name in names)
    yield from sorted(entries)


def _raise_cannot_read(error: OSError) -> None:
    raise UsageError(f"Cannot read {error.filename}: {error.strerror}.") from error


def _reason_by_type(path: Path) -> str | None:
    """The reason to skip a path because of its name or file type, or `None`."""
    if path.name.startswith("."):
        return HIDDEN
    try:
        return None if stat.S_ISREG(path.stat().st_mode) else SPECIAL
    except FileNotFoundError:
        return LINKS
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error


def _reason_by_content(file: Path, rules: FileRules, *, named: bool) -> str | None:
    """The reason to skip a file because of its content, or `None`.

    For a file that the user named, raises UsageError instead for a known binary format and for a single JSON object.
    For any file, raises UsageError for text in another encoding, and for JSON that `rules` reject.
    """
    head = _read_head(file)
    if not head:
        return EMPTY
    if is_parquet(file) and head.startswith(SIGNATURE):
        return None
    _reject_other_encoding(file, head, rules.encoding)
    if not is_text(head, rules.encoding):
        if named and (kind := binary_format(head)):
            raise UsageError(f"{display_name(file)} is {kind}, not text. Leave it out, or convert it to text.")
        if not named and not is_undecodable_text(head, rules.encoding):
            return BINARY
        return None  # reading the file raises an error if it has an invalid byte
    text = (decode_head(head, rules.encoding) or "").removeprefix("\ufeff")
    if rules.format != "auto":
        return None
    if content_suffix(file) == ".json" and is_single_json_object(text):
        if named:
            raise UsageError(
                f"{file} is a single JSON object; documents must be an array of objects, or one object per line. To "
                'read it as plain text, use `format="text"`.'
            )
        return NO_DOCUMENTS
    if rules.reject_json and (named or content_suffix(file) in ("", ".txt")) and not is_json_file(file):
        reject_json(file, text, rules.accepted_keys)
    return None


def _reject_other_encoding(file: Path, head: bytes, encoding: str) -> None:
    """Raise UsageError for text in another UTF encoding, and for text that is not valid in `encoding`."""
    other = other_encoding(head, encoding)
    if other is None:
        return
    if other.startswith("utf"):
        raise UsageError(
            f"{display_name(file)} is text in {other.upper()}, not in {encoding.upper()}. Name its encoding "
            f'(`encoding="{other}"`), or convert it.'
        )
    try:
        head.decode(encoding)
    except UnicodeError as error:
        start = getattr(error, "start", 0)
        raise UsageError(
            f"{display_name(file)} is not valid {encoding.upper()} (byte 0x{head[start]:02X} at offset {start}), and "
            f"looks like text in another encoding. Name it with `encoding`, for example {other}, or convert the file."
        ) from None


def conversation_keys(file: Path, encoding: str) -> set[str]:
    """The keys of the first conversation in a JSON file, or the columns of Parquet; empty without conversations."""
    if is_parquet(file):
        keys, complete = set(parquet_columns(file)), True
    else:
        keys, complete = _first_keys(first_text(file, encoding))
    return keys if has_chat_keys(keys, complete) else set()


def first_text(file: Path, encoding: str) -> str:
    """The beginning of a file, without a byte-order mark; "" if it is not text."""
    return (decode_head(_read_head(file), encoding) or "").lstrip("\ufeff")


def reject_json(file: Path, text: str, accepted_keys: frozenset[str] = frozenset()) -> None:
    """Raise UsageError for JSON that would be read as plain text, except for conversations, and for objects with all of
    `accepted_keys`, if there are any.
    """
    is_accepted = bool(accepted_keys) and accepted_keys <= _first_keys(text)[0]
    if is_json(text) and not is_chat(text) and not is_accepted:
        raise UsageError(
            f"{display_name(file)} contains JSON, which would be read as plain text. Read its documents with "
            '`format="jsonl"` (and `text_key`), or the JSON itself with `format="text"`.'
        )


def _read_head(file: Path) -> bytes:
    head = b""
    # A generator has `close`, although it is annotated as an Iterator.
    with closing(decompressed_chunks(file, chunk_bytes=HEAD_BYTES)) as chunks:  # type: ignore[type-var]
        for chunk in chunks:
            head += chunk
            if len(head) >= HEAD_BYTES:
                break
    return head[:HEAD_BYTES]
