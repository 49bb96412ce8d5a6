"""Safe access to files that an attacker may have prepared: regular files only, of limited size, no symbolic links. Also
the user's cache folder.

Functions that read raise OSError for a file that cannot be opened and ValueError for invalid content. Callers turn
these into a message with the run, the adapter or the cache entry, and the remedy.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

from tinylm.errors import TinyLMError, UsageError
from tinylm.system.process_signals import temporary

_LONE_SURROGATE = re.compile(r"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]")
MAX_JSON_BYTES = 1 << 26  # default limit, enough for a large tokenizer; most other files have smaller limits
# A sparse file is small to send, and reading it takes hours. The ratio allows for file systems with compression.
SPARSE_FROM, MAX_SPARSITY = 1 << 30, 64  # bytes; ratio of a file's size to the bytes that are stored
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how a pointer of Git LFS begins
PLACEHOLDER_BYTES = 256  # at the start of a file, which show what stands in place of it
SETTLED_SECONDS = 2.0  # a file that changed more recently could change again without a new time
_OPEN_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0)  # Windows has none of these but O_BINARY
    | getattr(os, "O_NONBLOCK", 0)  # do not block on a FIFO
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def is_system_failure(error: Exception) -> bool:
    """Whether reading failed for a reason other than the file: too many open files, no memory, no permission.

    False for a missing, irregular or sparse file, and for an error that is not an OSError.
    """
    missing_or_irregular = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)
    return isinstance(error, OSError) and error.errno not in missing_or_irregular


def check_regular(path: Path) -> os.stat_result:
    """The status of a regular file.

    Raises OSError for a symbolic link, a folder, a FIFO, a socket, a device, or a large sparse file.
    """
    status = path.lstat()
    _require_regular(path, status)
    return status


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link, and links inside a run are not followed", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    stored = 512 * getattr(status, "st_blocks", status.st_size)  # Windows does not count blocks
    if status.st_size > SPARSE_FROM and MAX_SPARSITY * stored < status.st_size:
        raise OSError(errno.EFBIG, "it is a sparse file, almost empty for its size", str(path))


def file_state(status: os.stat_result) -> list[int]:
    """Device, inode, size, and times of modification and status change in ns: they differ after any change of a file.

    As in git's index. The system sets the time of the status change (ctime), so it cannot be chosen.
    """
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def is_settled(status: os.stat_result) -> bool:
    """Whether a further change of the file would change its `file_state`: its times are not too recent."""
    return max(status.st_mtime, status.st_ctime) <= time.time() - SETTLED_SECONDS


def check_folder(path: Path) -> None:
    """Raise OSError unless the path is a folder and not a symbolic link to a folder."""
    if is_link(path):
        raise OSError(errno.ELOOP, "it is a symbolic link, and links inside a run are not followed", str(path))
    if not stat.S_ISDIR(path.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(path))


def is_link(path: Path) -> bool:
    """Whether the path is a symbolic link or, on Windows, a junction."""
    return path.is_symlink() or bool(getattr(os.path, "isjunction", lambda path: False)(path))


def resolve_links(path: Path) -> Path:
    """The absolute path without symbolic links.

    Circular links are kept; `Path.resolve` raises RuntimeError for them before Python 3.13.
    """
    return Path(os.path.realpath(path))


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Follows no symbolic link and does not block on a FIFO. Raises OSError."""
    check_regular(path)
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def check_replaceable(path: Path, kind: str, mark: re.Pattern[bytes], setting: str = "out") -> None:
    """Raise UsageError if there is a file at `path` other than an earlier one of the same kind, or an empty one.

    kind: such as report. mark: matches near the beginning of such files. setting: the name of the setting of the path
    """
    if not os.path.lexists(path):
        return
    try:
        with open_regular(resolve_links(path)) as file:
            start = file.read(4096)
    except OSError as error:
        raise UsageError(f"{path} is not an earlier {kind}: {error.strerror}; choose another `{setting}`.") from error
    if start and not mark.search(start):
        raise UsageError(f"{path} is not an earlier {kind}; choose another `{setting}`.")


@contextlib.contextmanager
def unicode_path(path: Path) -> Iterator[Path]:
    """Context manager for a path of the same file that is valid UTF-8, for libraries that open no other.

    Linux has file names that are not. The caller checks that the file is a regular one. Raises OSError.
    """
    if is_unicode(str(path)):
        yield path
        return
    with path.open("rb") as file:
        yield Path(f"/proc/self/fd/{file.fileno()}")


def open_append(path: Path) -> BufferedWriter:
    """Open or create a regular file for appending. Follows no symbolic link. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        check_regular(path)
    return os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def _open(path: Path, flags: int, name: str | None = None, folder: int | None = None) -> int:
    """Open `path`, or `name` in the open folder `folder`."""
    descriptor = os.open(name or path, flags | _OPEN_FLAGS, 0o666, dir_fd=folder)
    try:
        _require_regular(path, os.fstat(descriptor))  # it may have been replaced since the check
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class FolderHandle:
    """A folder whose files can be opened even after it was renamed (not on Windows).

    Raises OSError for a symbolic link, and for a path that is not a folder.
    """

    def __init__(self, path: Path) -> None:
        check_folder(path)
        self._path = path
        self._descriptor: int | None = None
        if os.open in os.supports_dir_fd:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN_FLAGS)
            weakref.finalize(self, os.close, self._descriptor)

    def open(self, name: str) -> BufferedReader:
        """Open a regular file of the folder for reading. Raises OSError."""
        if self._descriptor is None:
            return open_regular(self._path / name)
        path = self._path / name
        _require_regular(path, os.stat(name, dir_fd=self._descriptor, follow_symlinks=False))
        return os.fdopen(_open(path, os.O_RDONLY, name, self._descriptor), "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file. Raises OSError, and ValueError for a file of more than `limit` bytes."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it is larger than {limit >> 20} MB")
    return data


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    """The text of a regular file. Raises OSError, and ValueError for more than `limit` bytes or invalid UTF-8."""
    return read_bytes(path, limit).decode("utf-8")


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """The JSON value in a regular file. Raises OSError, and ValueError for more than `limit` bytes or invalid JSON."""
    return parse_json(read_text(path, limit))


def parse_json(text: str) -> Any:
    """The JSON value of a text. Numbers beyond float64, such as 1e999, become infinite.

    Raises ValueError for invalid JSON, the constants NaN and Infinity, and nesting that is too deep.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError:
        if found := describe_placeholder(text[:PLACEHOLDER_BYTES].encode("utf-8", "replace")):
            raise ValueError(f"it is {found}") from None
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_unicode_json(text: str) -> Any:
    """As `parse_json`, and raises ValueError for half of a surrogate pair ("\\ud800"), which cannot be encoded."""
    value = parse_json(text)
    if _LONE_SURROGATE.search(text):
        try:
            is_encodable = is_unicode(json.dumps(value, ensure_ascii=False))  # the backslash may itself be escaped
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not is_encodable:
            raise ValueError("it has half of a surrogate pair, which is not a character")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def describe_placeholder(start: bytes) -> str | None:
    """What a file is that stands in place of a model's file, by its first bytes: a Git LFS pointer or an HTML page.

    Completes a sentence such as "it is ". `None` for any other file.
    """
    if start.startswith(LFS_POINTER):
        return "a Git LFS pointer in place of the file, which git lfs pull fetches"
    if start.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page in place of the file; download the file itself, by its download link"
    return None


def read_start(path: Path) -> bytes:
    """The first bytes of a regular file, for `describe_placeholder`. Raises OSError."""
    with open_regular(path) as file:
        return file.read(PLACEHOLDER_BYTES)


def hash_file(path: Path) -> str:
    """SHA-256 of a regular file, in hexadecimal. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that replaces `path` atomically: yields a new file to write, flushes it and renames it to `path`.

    On an error, `path` is unchanged. The name of the new file is random, so that nobody can prepare a symbolic link
    there; a link at `path` is replaced, not followed. Raises OSError.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    permissions = path.parent.stat().st_mode & 0o666  # private in a private folder; the umask applies, too
    try:
        with temporary(unfinished):
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            os.close(descriptor)
            yield unfinished
            unfinished.chmod(mode)  # safetensors creates files that only their owner can read
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Context manager for a new folder among the system's temporary files, which only this user can open."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, temporary(Path(folder)):
        yield Path(folder)


def write_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text, atomically as with `replacing`. Raises OSError."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def flush_folder(path: Path) -> None:
    """fsync a folder, so that the renames in it are on disk. Does nothing on Windows. Raises OSError."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_folder(path: Path, new: Path, old: Path) -> None:
    """Rename the folder `new` to `path`, after a folder at `path` to `old`. On any exception, `path` is restored.

    A kill between the two renames leaves nothing at `path`. The caller flushes `new` before, the parent folder
    afterwards, and deletes `old`. Raises OSError.
    """
    try:
        if path.exists():
            path.rename(old)
        new.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8. False for surrogates, with which Python represents invalid file names."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_unfinished(name: str, of: tuple[str, ...]) -> bool:
    """Whether `name` is the name of a temporary file that `replacing` writes for one of the file names `of`."""
    return name.endswith(".tmp") and any(name.startswith(f".{file}.") for file in of)


def remove_tree(path: Path) -> None:
    """Delete a folder with its content, a file, or a symbolic link (not its target). Errors are ignored."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not is_link(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# Of the user's cache. What is in them is executed or trusted, so only this user may have write permission on them.
SUBFOLDERS = {
    "tokens": "encoded texts",
    "texts": "statistics and tokenizers of long texts",
    "gguf": "models converted for llama.cpp",
    "torch": "code compiled by torch",
    "bases": "places of the base models of adapters",
    "machine": "measurements of this machine",
}


class DiskUsage(NamedTuple):
    """The number of files in a folder, and their total size in bytes."""

    files: int
    bytes: int


def cache_root() -> Path:
    """The folder $TINYLM_CACHE, or tinylm/ in the user's cache folder ($XDG_CACHE_HOME, %LOCALAPPDATA% or ~/.cache).

    A relative $XDG_CACHE_HOME is ignored, as the XDG Base Directory Specification demands. Raises TinyLMError if none
    of the variables is set and the user has no home folder.
    """
    if own := os.environ.get("TINYLM_CACHE"):
        return Path(own).absolute()
    bases = (Path(os.environ.get(name, "")) for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"))
    try:
        return (next(filter(Path.is_absolute, bases), None) or Path.home() / ".cache") / "tinylm"
    except RuntimeError as error:
        raise TinyLMError("There is no home folder for the cache; set TINYLM_CACHE to a folder.") from error


def private_folder(name: str) -> Path:
    """The subfolder `name` of the cache, created with mode 0700.

    Raises TinyLMError if it cannot be created, is a symbolic link, or other users can write to it.
    """
    path = cache_root() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise TinyLMError(f"Cannot create {path}: {error.strerror}; set TINYLM_CACHE to another folder.") from error
    if not is_private(path):
        elsewhere = "set TINYLM_CACHE to a folder of your own"
        if path.is_symlink():
            raise TinyLMError(f"The cache folder {path} is a symbolic link, so it is not trusted; {elsewhere}.")
        next_step = f"chmod 700 {path}" if path.stat().st_uid == os.getuid() else elsewhere
        raise TinyLMError(f"Other users can write to the cache folder {path}, so it is not trusted; {next_step}.")
    return path


def is_private(path: Path) -> bool:
    """Whether a file or folder exists, is not a symbolic link, belongs to this user, and no other user can write to it.

    On Windows, the owner and the permissions are not checked.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    if stat.S_ISLNK(status.st_mode):
        return False
    if not hasattr(os, "getuid"):  # on Windows, the cache folder is in the user's private profile by default
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_private_entry(path: Path, name: str) -> bool:
    """Whether `path` is an entry of the subfolder `name` of the cache, and `is_private` holds for both.

    False if there is no cache folder.
    """
    with contextlib.suppress(TinyLMError):
        return path.parent == cache_root() / name and is_private(path.parent) and is_private(path)
    return False


def measure_usage(name: str) -> DiskUsage:
    """Number and bytes of the files in the subfolder `name`; zero if it does not exist. Links in it are not followed.

    Raises the error of `cache_root`.
    """
    sizes = []
    for folder, _, names in os.walk(cache_root() / name):
        for file in names:
            with contextlib.suppress(OSError):  # deleted meanwhile
                sizes.append(Path(folder, file).lstat().st_size)
    return DiskUsage(len(sizes), sum(sizes))


def clear_cache(name: str) -> DiskUsage:
    """Delete the subfolder `name` of the cache, and return its disk usage before that.

    Raises TinyLMError if it cannot be deleted, is a link, or other users can write to it.
    """
    path = cache_root() / name
    if not os.path.lexists(path):
        return DiskUsage(0, 0)
    path, usage = private_folder(name), measure_usage(name)
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise TinyLMError(f"Cannot delete {error.filename or path}: {error.strerror}.") from error
    return usage
