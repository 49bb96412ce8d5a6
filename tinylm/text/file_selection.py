"""Select the text files among named files, folders and glob patterns, and record why others are skipped."""

import glob
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tinylm.errors import UsageError
from tinylm.text import format_detection
from tinylm.text.compression import content_suffix, decompressed_chunks, display_name
from tinylm.text.readers import SIGNATURE, is_json_file, is_parquet, parquet_columns

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
    files and files without a suffix.
    """

    encoding: str
    format: str
    reject_json: bool


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
    if not format_detection.is_text(head, rules.encoding):
        if named and (kind := format_detection.binary_format(head)):
            raise UsageError(f"{display_name(file)} is {kind}, not text. Leave it out, or convert it to text.")
        if not named and not format_detection.is_undecodable_text(head, rules.encoding):
            return BINARY
        return None  # reading the file raises an error if it has an invalid byte
    text = (format_detection.decode_head(head, rules.encoding) or "").removeprefix("\ufeff")
    if rules.format != "auto":
        return None
    if content_suffix(file) == ".json" and format_detection.is_single_json_object(text):
        if named:
            raise UsageError(
                f"{file} is a single JSON object; documents must be an array of objects, or one object per line. To "
                'read it as plain text, use `format="text"`.'
            )
        return NO_DOCUMENTS
    if rules.reject_json and (named or content_suffix(file) in ("", ".txt")) and not is_json_file(file):
        _reject_json(file, text)
    return None


def _reject_other_encoding(file: Path, head: bytes, encoding: str) -> None:
    """Raise UsageError for text in another UTF encoding, and for text that is not valid in `encoding`."""
    other = format_detection.other_encoding(head, encoding)
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


def holds_chat(file: Path, encoding: str) -> bool:
    """Whether a file begins with a conversation in JSON, or has the columns of conversations in Parquet."""
    if is_parquet(file):
        return format_detection.has_chat_keys(set(parquet_columns(file)))
    return format_detection.is_chat((format_detection.decode_head(_read_head(file), encoding) or "").lstrip("\ufeff"))


def _reject_json(file: Path, text: str) -> None:
    """Raise UsageError for JSON that would be read as plain text, except for conversations."""
    if format_detection.is_json(text) and not format_detection.is_chat(text):
        raise UsageError(
            f"{display_name(file)} contains JSON, which would be read as plain text. Read its documents with "
            '`format="jsonl"` (and `text_key`), or the JSON itself with `format="text"`.'
        )


def _read_head(file: Path) -> bytes:
    head = b""
    # A generator has `close`, although it is annotated as an Iterator.
    with closing(decompressed_chunks(file, chunk_bytes=format_detection.HEAD_BYTES)) as chunks:  # type: ignore[type-var]
        for chunk in chunks:
            head += chunk
            if len(head) >= format_detection.HEAD_BYTES:
                break
    return head[: format_detection.HEAD_BYTES]
