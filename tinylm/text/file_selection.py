"""Find the files of the texts that a user names, recognise what they contain, and record why others are skipped."""

import errno
import fnmatch
import glob
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinylm.config.jobs import changed_settings
from tinylm.config.settings import TextSettings
from tinylm.config.validation import check_settings, convert_fields, declared_settings, describe_value, require
from tinylm.errors import TinyLMError, UsageError
from tinylm.system.files import resolve_links
from tinylm.text.files import (
    CHUNK_BYTES,
    SPOOL_FILE,
    STANDARD_INPUT,
    binary_format,
    content_suffix,
    decode_head,
    display_name,
    encoding_of,
    first_text,
    is_text,
    is_undecodable_text,
    no_progress,
    read_head,
    unmarked_utf16,
)
from tinylm.text.readers import SIGNATURE, decoded_chunks, is_json_file, is_parquet, parquet_columns, skip_blanks

Files = str | Path | Sequence[str | Path]
MAX_SHOWN = 200  # characters of a path in a message


@dataclass(frozen=True, kw_only=True)
class TextSource(TextSettings):
    """Texts and how they are read. `paths` are files, folders and glob patterns, or - for standard input.

    `format`, `text_key`, `encoding`, `exclude`, `skip_bad` and `unknown` are the settings of the same names in a
    DataConfig. The validation text is at the path `val_data`, or else the share `val_fraction` of the text (default:
    see `split_corpus`). Conversations are rendered by `chat_template` (chatml or the path of a file; default: that
    of the model) and scored according to `train_on`. A setting that does not apply to the text is an error, unless its
    name is in `ignorable`; then it is ignored.
    """

    paths: tuple[str, ...]
    ignorable: frozenset[str] = frozenset()

    @property
    def given(self) -> dict[str, Any]:
        """The settings that differ from their defaults, by name."""
        return changed_settings(self)

    def __post_init__(self) -> None:
        convert_fields(self)
        check_settings(TextSettings, {name: getattr(self, name) for name in declared_settings(TextSettings)})


def text_paths(files: Files) -> tuple[str, ...]:
    """The paths of a TextSource. Raises UsageError for an entry that is no path."""
    entries = (files,) if isinstance(files, str | Path) else tuple(files)
    for entry in entries:
        require(
            isinstance(entry, str | Path), f"{describe_value(entry)} is not the path of a text; name files or folders."
        )
    return tuple(map(str, entries))


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


def is_html(file: Path, encoding: str) -> bool:
    """Whether the suffix of a file, or the beginning of one without a suffix, is that of HTML."""
    suffix = content_suffix(file)
    return suffix in HTML_SUFFIXES or (not suffix and _HTML.match(first_text(file, encoding)) is not None)


def is_json(text: str) -> bool:
    """Whether a text begins with a non-empty JSON object, or with an array that begins with one."""
    return _JSON_OBJECT.match(text) is not None


def first_keys(text: str) -> tuple[set[str], bool]:
    """The keys of the first JSON object of a text, alone or in an array, and whether the object is complete."""
    start = _JSON_OBJECT.match(text)
    keys: set[str] = set()
    if start is None:
        return keys, True
    decoder = json.JSONDecoder()
    at = text.index("{") + 1
    try:
        while True:
            key, at = decoder.raw_decode(text, skip_blanks(text, at))
            keys.add(str(key))
            _, at = decoder.raw_decode(text, skip_blanks(text, skip_blanks(text, at) + 1))  # after the colon
            at = skip_blanks(text, at)
            if text[at] != ",":
                return keys, text[at] == "}"
            at += 1
    except (ValueError, IndexError, RecursionError):
        return keys, False


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


def has_chat_keys(keys: set[str], complete: bool = True) -> bool:
    """Whether these are the keys of a conversation: those of a layout in `tinylm.text.chat`, or of a preference, and no
    `text`. If they may not be all, since the object is not `complete`, `prompt`, `completion`, `instruction`, `chosen`
    or `rejected` is enough.
    """
    if "text" in keys:
        return False
    pairs = ({"prompt", "completion"}, {"instruction", "output"}, {"chosen", "rejected"})
    if not complete and keys & {"prompt", "completion", "instruction", "chosen", "rejected"}:
        return True
    return bool(keys & {"messages", "conversations"}) or any(pair <= keys for pair in pairs)


def conversation_keys(file: Path, encoding: str) -> set[str]:
    """The keys of the first conversation in a JSON file, or the columns of Parquet; empty without conversations."""
    found = (set(parquet_columns(file)), True) if is_parquet(file) else first_keys(first_text(file, encoding))
    return found[0] if has_chat_keys(*found) else set()


def reject_json(file: Path, text: str, accepted_keys: Sequence[frozenset[str]] = ()) -> None:
    """Raise UsageError for JSON that would be read as plain text, except for conversations, and for objects with all of
    `accepted_keys`, if there are any.
    """
    keys, is_complete = first_keys(text)
    is_accepted = has_chat_keys(keys, is_complete) or any(accepted <= keys for accepted in accepted_keys)
    if is_json(text) and not is_accepted:
        raise UsageError(
            f"{display_name(file)} contains JSON, which would be read as plain text. Read its documents with "
            '`format="jsonl"` (and `text_key`), or the JSON itself with `format="text"`.'
        )


# By suffix: a program that converts documents to plain text.
CONVERTERS = {
    ".pdf": "pdftotext",
    **dict.fromkeys((".docx", ".odt", ".rtf", ".epub", ".html", ".htm", ".xhtml"), "pandoc -t plain"),
    **dict.fromkeys((".doc", ".ppt", ".pptx", ".xls", ".xlsx"), "LibreOffice"),
}

# Reasons to skip a file or a subfolder, as they appear in messages.
BINARY, EMPTY, HIDDEN, NO_DOCUMENTS = "binary", "empty", "hidden", "JSON without documents"
RUNS = "run directories"
TWICE, EXCLUDED = "named twice", "excluded"
LINKS, SPECIAL = "linked to folders or to nothing", "of special kinds, such as pipes"
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


def find_files(
    paths: Iterable[str], rules: FileRules, spool: Path | None = None
) -> tuple[tuple[Path, ...], tuple[SkippedFile, ...]]:
    """The text files at `paths`, each once, and those that are skipped; see `tinylm.text.corpus.find_corpus`.

    Files that cannot be read are skipped with the reason BAD.
    """
    files: dict[Path, Path] = {}
    skipped: list[SkippedFile] = []
    for name in _without_patterns(paths):
        path, skip = Path(name), None
        require(_fits_path(path), f"Cannot read {_shown(name)}: File name too long; check the path.")
        if name == STANDARD_INPUT and spool is not None:
            path = _copy_standard_input(spool)
        if path.is_dir():
            found = _find_in_folder(path, rules, skipped)
        elif path.is_file():
            if name != STANDARD_INPUT and is_excluded(path, path.parent, rules.exclude):
                skip = SkippedFile(str(path.parent), path, EXCLUDED)
            else:
                skip = _skip_by_content(path.parent, path, rules, named=True)
            found = [path] if skip is None else []
            skipped += [] if skip is None else [skip]
        elif path.exists():
            raise UsageError(
                f"{name} is a pipe or a device, which cannot be read twice; read it as standard input (-)."
            )
        else:
            raise UsageError(f"There is no file or folder {_shown(name)}; check the path, or use - for standard input.")
        for file in found:
            if files.setdefault(resolve_links(file), file) is not file:
                skipped.append(SkippedFile(str(file.parent), file, TWICE))
    return tuple(files.values()), tuple(skipped)


def _shown(name: str) -> str:
    """A path for a message; of a text that was given in place of a path, the beginning."""
    return repr(name) if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]!r}..."


def _fits_path(path: Path) -> bool:
    """Whether the system allows paths and names of this length."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    except ValueError:  # a NUL or half of a surrogate pair, which is in no name
        pass
    return True


def _without_patterns(paths: Iterable[str]) -> Iterator[str]:
    """Replace each glob pattern, such as texts/*.txt, by its matches in sorted order.

    The name of an existing file is not a pattern. Raises UsageError for a pattern without a match.
    """
    for name in paths:
        if not glob.has_magic(name) or os.path.lexists(name):
            yield name
            continue
        matches = sorted(map(Path, glob.glob(name, recursive=True)))  # noqa: PTH207
        if not matches:
            raise UsageError(f"No file matches the pattern {_shown(name)}; check it, or name the files.")
        yield from map(str, matches)


def _copy_standard_input(folder: Path) -> Path:
    """Copy standard input to a file in `folder`, so that it can be read more than once. Raises TinyLMError."""
    file = folder / SPOOL_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as target:  # "x" does not follow a link
            shutil.copyfileobj(sys.stdin.buffer, target, CHUNK_BYTES)
    except OSError as error:
        raise TinyLMError(f"Cannot copy standard input to {folder}: {error.strerror}; free some space.") from error
    return file


def _find_in_folder(folder: Path, rules: FileRules, skipped: list[SkippedFile]) -> list[Path]:
    """The text files of a folder and its subfolders, sorted. The others are added to `skipped`.

    Raises UsageError for a folder without text files, if none is BAD.
    """
    # All files, and the folders that are not searched: those that are skipped whatever their content is
    entries: dict[Path, SkippedFile | None] = {}

    def skip(path: Path, reason: str, problem: str = "") -> None:
        entries[path] = SkippedFile(str(folder), path, reason, problem=problem)

    def cannot_read(error: OSError) -> None:
        skip(Path(error.filename), BAD, f"Cannot read {error.filename}: {error.strerror}.")

    for parent, folders, names in os.walk(folder, onerror=cannot_read):
        if "config.json" in names and {"last", "model.safetensors", "adapter.safetensors"} & {*names, *folders}:
            skip(Path(parent), RUNS)  # its JSON files are not training text
            folders.clear()
            continue
        entries |= {Path(parent, name): None for name in names}
        subfolders = set(folders)
        for path in [Path(parent, name) for name in (*folders, *names)]:
            try:
                if is_excluded(path, folder, rules.exclude):
                    skip(path, EXCLUDED)
                elif path.name.startswith("."):
                    skip(path, HIDDEN)
                elif path.name in subfolders:
                    if path.is_symlink():
                        skip(path, LINKS)
                elif not stat.S_ISREG(path.stat().st_mode):
                    skip(path, SPECIAL)
            except FileNotFoundError:
                skip(path, LINKS)
            except OSError as error:
                cannot_read(error)
        folders[:] = [name for name in folders if Path(parent, name) not in entries]

    # The files by their content
    entries = {path: entry or _skip_by_content(folder, path, rules) for path, entry in sorted(entries.items())}
    others = [entry for entry in entries.values() if entry is not None]
    if len(others) == len(entries) and all(file.reason != BAD for file in others):
        reasons = f" (skipped: {describe_skipped(others)})" if others else ""
        raise UsageError(
            f"The folder {folder} contains no text files{reasons}; name another folder, or a file."
            f"{conversion_advice(others)}"
        )
    skipped += others
    return [path for path, entry in entries.items() if entry is None]


def _skip_by_content(folder: Path, file: Path, rules: FileRules, *, named: bool = False) -> SkippedFile | None:
    """Why a file is skipped because of its content; `None` if it is read, as one that the user named if it can be."""
    try:
        reason = _reason_by_content(file, rules, named=named)
    except UsageError as error:
        return SkippedFile(str(folder), file, BAD, problem=str(error))
    if reason is None or named:
        return None
    return SkippedFile(str(folder), file, reason, file.stat().st_size if reason in (BINARY, NO_DOCUMENTS) else 0)


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
    if not is_text(head, encoding):
        if other := unmarked_utf16(head):
            raise UsageError(
                f"{display_name(file)} is text in {other.upper()}, not in {encoding.upper()}. Name its encoding "
                f'(`encoding="{other}"`), or convert it.'
            )
        if is_undecodable_text(head, encoding):
            next(decoded_chunks(file, encoding, no_progress))  # raises an error with the place of the invalid byte
        if named and (kind := binary_format(head)):
            tool = CONVERTERS.get(file.suffix.lower())
            raise UsageError(
                f"{display_name(file)} is {kind}, not text. Leave it out, or convert it to text"
                f"{f', for example with {tool}' if tool else ''}."
            )
        return None if named else BINARY  # reading a named file raises an error if it has an invalid byte
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


def is_excluded(path: Path, folder: Path, patterns: Iterable[str]) -> bool:
    """Whether a pattern, such as *.log, matches the name of a file or subfolder, its path, or its path in `folder`."""
    names = (path.name, path.as_posix(), path.relative_to(folder).as_posix())
    return any(fnmatch.fnmatchcase(name, pattern.rstrip("/")) for name in names for pattern in patterns)


def describe_problems(bad: Sequence[SkippedFile]) -> str:
    """The problems of the first files that cannot be read, and the number of the others, without a full stop."""
    problems = []
    for file in bad[:_MAX_LISTED_PROBLEMS]:  # each up to the first full stop or semicolon after the name of the file
        before, name, after = file.problem.partition(display_name(file.path))
        problems.append(f"{before}{name}{re.split('[.;]( |$)', after, maxsplit=1)[0]}")
    problems += [f"and {len(bad) - _MAX_LISTED_PROBLEMS:,} more"] * (len(bad) > _MAX_LISTED_PROBLEMS)
    return "; ".join(problems)


def describe_skipped(skipped: Iterable[SkippedFile]) -> str:
    """Count files by reason, with some names: 9 binary (1.2 MB: a.png, b.zip, c.pdf, ...), 2 empty (d.txt, e.txt).

    The reasons with most bytes come first, then those with most files.
    """
    by_reason: dict[str, list[SkippedFile]] = {}
    for file in skipped:
        by_reason.setdefault(file.reason, []).append(file)
    parts = []
    for reason, files in by_reason.items():
        names = [str(file.path.relative_to(file.folder)) for file in files[:_MAX_LISTED_NAMES]]
        names += ["..."] * (len(files) > _MAX_LISTED_NAMES)
        size = sum(file.size for file in files)
        words = f"{len(files)} {reason} ({f'{format_size(size)}: ' if size else ''}{', '.join(names)})"
        parts.append((-size, -len(files), words))
    return ", ".join(words for *_, words in sorted(parts, key=lambda part: part[:2]))


def conversion_advice(skipped: Iterable[SkippedFile]) -> str:
    """A sentence, after a space, that names programs for the documents among binary files; "" without any."""
    suffixes = sorted({file.path.suffix.lower() for file in skipped if file.reason == BINARY} & CONVERTERS.keys())
    tools = {tool: ", ".join(end for end in suffixes if CONVERTERS[end] == tool) for tool in CONVERTERS.values()}
    named = [f"{tool} ({ends})" for tool, ends in tools.items() if ends]
    return f" To read such documents, convert them to text, for example with {' and '.join(named)}." if named else ""


def format_size(size: int) -> str:
    """A number of bytes for a message: "1.2 MB", or "300 bytes" below 50 kB."""
    return f"{size / 1e6:,.1f} MB" if size >= 50_000 else f"{size:,} bytes"
