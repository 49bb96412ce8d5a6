"""Select the text files among named files, folders and glob patterns, and record why others are skipped."""

import fnmatch
import glob
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinylm.errors import UsageError
from tinylm.text.compression import content_suffix, display_name
from tinylm.text.encodings import (
    binary_format,
    decode_head,
    encoding_of,
    first_text,
    is_text,
    is_undecodable_text,
    other_encoding,
    read_head,
)
from tinylm.text.readers import SIGNATURE, is_json_file, is_parquet, parquet_columns

# By suffix: a program that converts documents to plain text.
CONVERTERS = {
    ".pdf": "pdftotext",
    **dict.fromkeys((".docx", ".odt", ".rtf", ".epub", ".html", ".htm", ".xhtml"), "pandoc -t plain"),
    **dict.fromkeys((".doc", ".ppt", ".pptx", ".xls", ".xlsx"), "LibreOffice"),
}
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
_HTML = re.compile(r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)

_MIN_LIST_LINES = 20
_MEAN_ITEM, _LONGEST_ITEM = 24, 60  # characters of the lines of a list
# Tables, indentation, and the ends of lines of prose and code.
_NOT_IN_LISTS = re.compile(r"\t|^\s|[.,:;!?。，！？；：、=(){}\[\]<>|]$", re.MULTILINE)
_JSON_OBJECT = re.compile(r'\s*(?:\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')


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
TWICE, EXCLUDED = "named twice", "excluded"
LINKS, SPECIAL = "links to folders or to nothing", "pipes or devices"
BAD = "that cannot be read"
_MAX_LISTED_NAMES = 3  # per reason
_MAX_LISTED_PROBLEMS = 5


@dataclass(frozen=True)
class SkippedFile:
    """A file or subfolder of `folder` that is not read.

    reason: one of the constants above. size: in bytes if the reason is BINARY or NO_DOCUMENTS, else 0. problem: an
    error message, if the reason is BAD.
    """

    folder: str
    path: Path
    reason: str
    size: int = 0
    problem: str = ""


@dataclass(frozen=True)
class FileRules:
    """The settings that decide which files are read.

    With the `format` auto, `reject_json` makes JSON in a file without a JSON suffix an error; in folders, only in .txt
    files and files without a suffix. Objects with all of one of the `accepted_keys` are no error. Files and
    subfolders that match a pattern of `exclude` are skipped (see `is_excluded`).
    """

    encoding: str
    format: str
    reject_json: bool
    accepted_keys: tuple[frozenset[str], ...] = ()
    exclude: tuple[str, ...] = ()


def is_excluded(path: Path, folder: Path, patterns: Iterable[str]) -> bool:
    """Whether a pattern, such as *.log, matches the name of a file or subfolder, its path, or its path in `folder`."""
    names = (path.name, path.as_posix(), path.relative_to(folder).as_posix())
    return any(fnmatch.fnmatchcase(name, pattern.rstrip("/")) for name in names for pattern in patterns)


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


def find_named_file(file: Path, rules: FileRules, *, is_excludable: bool = True) -> list[SkippedFile]:
    """The file, if it is excluded or its content cannot be used (see `_reason_by_content`), else an empty list."""
    if is_excludable and is_excluded(file, file.parent, rules.exclude):
        return [SkippedFile(str(file.parent), file, EXCLUDED)]
    try:
        _reason_by_content(file, rules, named=True)
    except UsageError as error:
        return [SkippedFile(str(file.parent), file, BAD, problem=str(error))]
    return []


def find_text_files(folder: Path, rules: FileRules) -> tuple[list[Path], list[SkippedFile]]:
    """The text files of a folder and its subfolders, sorted, and the skipped files, those that cannot be read included.

    Raises UsageError for a folder without any of both.
    """
    text_files: list[Path] = []
    skipped: list[SkippedFile] = []
    for path, found in _entries_below(folder, rules.exclude):
        try:
            reason = _reason_by_content(path, rules, named=False) if found is None else found
        except UsageError as error:
            reason = error
        if reason is None:
            text_files.append(path)
        elif isinstance(reason, UsageError):
            skipped.append(SkippedFile(str(folder), path, BAD, problem=str(reason)))
        else:
            size = path.stat().st_size if reason in (BINARY, NO_DOCUMENTS) else 0
            skipped.append(SkippedFile(str(folder), path, reason, size))
    if not text_files and all(file.reason != BAD for file in skipped):
        reasons = f" (skipped: {describe_skipped(skipped)})" if skipped else ""
        raise UsageError(
            f"The folder {folder} contains no text files{reasons}; name another folder, or a file."
            f"{conversion_advice(skipped)}"
        )
    return text_files, skipped


def conversion_advice(skipped: Iterable[SkippedFile]) -> str:
    """A sentence, after a space, that names programs for the documents among binary files; "" without any."""
    suffixes = sorted({file.path.suffix.lower() for file in skipped if file.reason == BINARY} & CONVERTERS.keys())
    tools = {tool: ", ".join(end for end in suffixes if CONVERTERS[end] == tool) for tool in CONVERTERS.values()}
    named = [f"{tool} ({ends})" for tool, ends in tools.items() if ends]
    return f" To read such documents, convert them to text, for example with {' and '.join(named)}." if named else ""


def is_html(file: Path, encoding: str) -> bool:
    """Whether the suffix of a file, or the beginning of one without a suffix, is that of HTML."""
    suffix = content_suffix(file)
    return suffix in HTML_SUFFIXES or (not suffix and _HTML.match(first_text(file, encoding)) is not None)


def describe_problems(bad: Sequence[SkippedFile]) -> str:
    """The problems of the first files that cannot be read, and the number of the others, without a full stop."""
    problems = [_without_advice(file) for file in bad[:_MAX_LISTED_PROBLEMS]]
    problems += [f"and {len(bad) - _MAX_LISTED_PROBLEMS:,} more"] * (len(bad) > _MAX_LISTED_PROBLEMS)
    return "; ".join(problems)


def _without_advice(file: SkippedFile) -> str:
    """The error message up to the first full stop or semicolon after the name of the file."""
    name = display_name(file.path)
    before, named, after = file.problem.partition(name)
    return f"{before}{named}{re.split('[.;]( |$)', after, maxsplit=1)[0]}"


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


def _entries_below(folder: Path, exclude: Sequence[str]) -> Iterator[tuple[Path, str | UsageError | None]]:
    """All files below a folder, and the folders that are not searched, sorted, with the reasons to skip them.

    The reason is `None` for a regular file that is neither hidden nor excluded: whether it is skipped depends on its
    content. It is an error for a folder or file that cannot be read.
    """
    entries: dict[Path, str | UsageError | None] = {}

    def cannot_read(error: OSError) -> None:
        entries[Path(error.filename)] = _read_error(error)

    for parent, folders, names in os.walk(folder, onerror=cannot_read):
        if "config.json" in names and {"last", "model.safetensors", "adapter.safetensors"} & {*names, *folders}:
            entries[Path(parent)] = RUNS  # its JSON files are not training text
            folders.clear()
            continue
        for path in [Path(parent, name) for name in folders]:
            if reason := _reason_to_leave(path, folder, exclude):
                entries[path] = reason
                folders.remove(path.name)
        for path in [Path(parent, name) for name in names]:
            entries[path] = EXCLUDED if is_excluded(path, folder, exclude) else _reason_by_type(path)
    yield from sorted(entries.items())


def _reason_to_leave(folder: Path, root: Path, exclude: Sequence[str]) -> str | None:
    """The reason not to search a folder below `root`, or `None`."""
    if is_excluded(folder, root, exclude):
        return EXCLUDED
    return HIDDEN if folder.name.startswith(".") else LINKS if folder.is_symlink() else None


def _read_error(error: OSError) -> UsageError:
    return UsageError(f"Cannot read {error.filename}: {error.strerror}.")


def _reason_by_type(path: Path) -> str | UsageError | None:
    """The reason to skip a path because of its name or file type, or `None`; an error if its type cannot be read."""
    if path.name.startswith("."):
        return HIDDEN
    try:
        return None if stat.S_ISREG(path.stat().st_mode) else SPECIAL
    except FileNotFoundError:
        return LINKS
    except OSError as error:
        return _read_error(error)


def _reason_by_content(file: Path, rules: FileRules, *, named: bool) -> str | None:
    """The reason to skip a file because of its content, or `None`.

    For a file that the user named, raises UsageError instead for a known binary format and for a single JSON object.
    For any file, raises UsageError for one that cannot be opened, for text in another encoding, and for JSON that
    `rules` reject.
    """
    head = read_head(file)
    if not head:
        return EMPTY
    if is_parquet(file) and head.startswith(SIGNATURE):
        parquet_columns(file)  # raises for a file that is cut, or without pyarrow
        return None
    encoding = encoding_of(file, rules.encoding)
    _reject_other_encoding(file, head, encoding)
    if not is_text(head, encoding):
        if named and (kind := binary_format(head)):
            tool = CONVERTERS.get(file.suffix.lower())
            raise UsageError(
                f"{display_name(file)} is {kind}, not text. Leave it out, or convert it to text"
                f"{f', for example with {tool}' if tool else ''}."
            )
        if not named and not is_undecodable_text(head, encoding):
            return BINARY
        return None  # reading the file raises an error if it has an invalid byte
    text = (decode_head(head, encoding) or "").removeprefix("\ufeff")
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
    """Raise UsageError for text in UTF-16 without a byte-order mark, and for text that is not valid in `encoding`."""
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
            f"looks like text in another encoding, such as {other}. Name it with `encoding`, or convert the file."
        ) from None


def conversation_keys(file: Path, encoding: str) -> set[str]:
    """The keys of the first conversation in a JSON file, or the columns of Parquet; empty without conversations."""
    if is_parquet(file):
        keys, complete = set(parquet_columns(file)), True
    else:
        keys, complete = _first_keys(first_text(file, encoding))
    return keys if has_chat_keys(keys, complete) else set()


def reject_json(file: Path, text: str, accepted_keys: Sequence[frozenset[str]] = ()) -> None:
    """Raise UsageError for JSON that would be read as plain text, except for conversations, and for objects with all of
    `accepted_keys`, if there are any.
    """
    found = _first_keys(text)[0] if accepted_keys else frozenset()
    is_accepted = any(keys <= found for keys in accepted_keys)
    if is_json(text) and not is_chat(text) and not is_accepted:
        raise UsageError(
            f"{display_name(file)} contains JSON, which would be read as plain text. Read its documents with "
            '`format="jsonl"` (and `text_key`), or the JSON itself with `format="text"`.'
        )
