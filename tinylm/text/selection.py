"""Which of the files that a user names, alone or by a folder or a pattern, are read, and why others are not."""

import glob
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tinylm.errors import UsageError
from tinylm.text import detection
from tinylm.text.compression import content_suffix, read_bytes, shown
from tinylm.text.readers import is_json_file

BINARY, EMPTY, HIDDEN, NO_DOCUMENTS = "binary", "empty", "hidden", "JSON without documents"
RUNS = "run directories"
LINKS, SPECIAL = "links to folders or to nothing", "pipes or devices"
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class LeftOut:
    """A file in a folder, or a hidden folder, that is not read. `size` is in bytes."""

    folder: str
    path: Path
    reason: str
    size: int = 0


@dataclass(frozen=True)
class Rules:
    """How files are to be read. `evident_json` says whether JSON by any other name is an error."""

    encoding: str
    format: str
    evident_json: bool


def expand_patterns(names: Iterable[str]) -> Iterator[str]:
    """The names, and in place of a pattern such as texts/*.txt the files that match it, in order.

    Raises UsageError for a pattern that matches nothing.
    """
    for name in names:
        if not glob.has_magic(name) or os.path.lexists(name):
            yield name
            continue
        found = sorted(map(Path, glob.glob(name, recursive=True)))  # noqa: PTH207
        if not found:
            raise UsageError(f"No file matches the pattern {name!r}; check it, or name the files.")
        yield from map(str, found)


def check_named(file: Path, rules: Rules) -> None:
    """Raises UsageError for a file that is no text, text in another encoding, or JSON that was not meant to be text."""
    _reason_to_leave_out(file, rules, named=True)


def text_files_below(folder: Path, rules: Rules) -> tuple[list[Path], list[LeftOut]]:
    """The text files of a folder and its subfolders, in order, and what else is there.

    Raises UsageError for what cannot be read, for text in another encoding and for a folder without text.
    """
    found: list[Path] = []
    left_out: list[LeftOut] = []
    for path, reason in _entries_below(folder):
        reason = reason or _reason_to_leave_out(path, rules, named=False)
        if reason is None:
            found.append(path)
        else:
            size = path.stat().st_size if reason in (BINARY, NO_DOCUMENTS) else 0
            left_out.append(LeftOut(str(folder), path, reason, size))
    if not found:
        there = f" (left out: {describe_left_out(left_out)})" if left_out else ""
        raise UsageError(f"The folder {folder} has no text files in it{there}; name one that has, or a file.")
    return found, left_out


def describe_left_out(left_out: Iterable[LeftOut]) -> str:
    """By reason, with some of the names: 9 binary (1.2 MB: a.png, b.zip, c.pdf, ...), 2 empty (d.txt, e.txt)."""
    by_reason: dict[str, list[LeftOut]] = {}
    for one in left_out:
        by_reason.setdefault(one.reason, []).append(one)
    parts = []
    for reason, some in sorted(by_reason.items(), key=_weight):
        names = [str(one.path.relative_to(one.folder)) for one in some[:_NAMES_SHOWN]]
        names += ["..."] * (len(some) > _NAMES_SHOWN)
        size = sum(one.size for one in some)
        parts.append(f"{len(some)} {reason} ({f'{megabytes(size)}: ' if size else ''}{', '.join(names)})")
    return ", ".join(parts)


def _weight(reason: tuple[str, list[LeftOut]]) -> tuple[int, int]:
    """What most bytes are left out for stands first, then what most files are."""
    return -sum(one.size for one in reason[1]), -len(reason[1])


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 50_000 else f"{size:,} bytes"


def _entries_below(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Everything below a folder that is no plain folder, in order, and why it is not read, as far as its kind says."""
    entries: list[tuple[Path, str | None]] = []
    for place, folders, names in os.walk(folder, onerror=_cannot_read):
        if "config.json" in names and {"last", "model.safetensors", "adapter_model.safetensors"} & {*names, *folders}:
            entries.append((Path(place), RUNS))  # its JSON is no text to learn from
            folders.clear()
            continue
        for name in list(folders):
            path = Path(place, name)
            if name.startswith(".") or path.is_symlink():
                entries.append((path, HIDDEN if name.startswith(".") else LINKS))
                folders.remove(name)
        entries += ((Path(place, name), _kind(Path(place, name))) for name in names)
    yield from sorted(entries)


def _cannot_read(error: OSError) -> None:
    raise UsageError(f"Cannot read {error.filename}: {error.strerror}.") from error


def _kind(path: Path) -> str | None:
    if path.name.startswith("."):
        return HIDDEN
    try:
        return None if stat.S_ISREG(path.stat().st_mode) else SPECIAL
    except FileNotFoundError:
        return LINKS
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error


def _reason_to_leave_out(file: Path, rules: Rules, *, named: bool) -> str | None:
    """A file that was named is never left out, but for an empty one: what is wrong with it is an error."""
    head = _read_head(file)
    if not head:
        return EMPTY
    _refuse_other_encoding(file, head, rules.encoding)
    if not detection.is_text(head, rules.encoding):
        if named and (kind := detection.signature(head)):
            raise UsageError(f"{shown(file)} is {kind}, not text. Leave it out, or give the text that is in it.")
        if not named and not detection.is_undecodable_text(head, rules.encoding):
            return BINARY
        return None  # reading it names the first byte that is not valid
    text = detection.decode_head(head, rules.encoding) or ""
    if rules.format != "auto":
        return None
    if content_suffix(file) == ".json" and detection.is_single_object(text):
        if named:
            raise UsageError(
                f"{file} is a single JSON object, and documents are an array of them, or one on each line. Read it as "
                "plain text with --format text."
            )
        return NO_DOCUMENTS
    if rules.evident_json and (named or content_suffix(file) in ("", ".txt")) and not is_json_file(file):
        _refuse_evident_json(file, text)
    return None


def _refuse_other_encoding(file: Path, head: bytes, encoding: str) -> None:
    other = detection.other_encoding(head, encoding)
    if other is None:
        return
    if other.startswith("utf"):
        raise UsageError(
            f"{shown(file)} is text in {other.upper()}, not in {encoding.upper()}. Name its encoding with --encoding "
            f"{other}, or convert it."
        )
    try:
        head.decode(encoding)
    except UnicodeError as error:
        start = getattr(error, "start", 0)
        raise UsageError(
            f"{shown(file)} is not valid {encoding.upper()} (byte 0x{head[start]:02X} at offset {start}), and looks "
            f"like text in another encoding. Name that with --encoding, for example {other}, or convert the file."
        ) from None


def _refuse_evident_json(file: Path, text: str) -> None:
    if detection.is_json(text):
        raise UsageError(
            f"{shown(file)} holds JSON, which would be read as plain text. Read its documents with --format jsonl (and "
            "--text-key), or the JSON itself with --format text."
        )


def _read_head(file: Path) -> bytes:
    head = b""
    with closing(read_bytes(file, piece_bytes=detection.HEAD_BYTES)) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            head += piece
            if len(head) >= detection.HEAD_BYTES:
                break
    return head[: detection.HEAD_BYTES]
