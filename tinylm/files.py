"""Reading and writing files that a stranger may have prepared: regular files only, bounded, never through a link.

Functions that read raise OSError for what cannot be opened and ValueError for what cannot be understood; the caller
adds which run, adapter or cache entry it was and what to do next.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 1 << 26  # of a tokenizer; other files have smaller limits
# A file with holes is small to send and takes hours to read. File systems that compress store less than the size, too.
SPARSE_FROM, MOST_HOLES = 1 << 30, 64
_OPEN_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0)  # Windows has none of these but O_BINARY
    | getattr(os, "O_NONBLOCK", 0)  # opening a FIFO would wait for its other end
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def check_regular(path: Path) -> os.stat_result:
    """The status of a regular file. Raises OSError for a link, a folder, a FIFO, a socket and a device."""
    status = path.lstat()
    _require_regular(path, status)
    return status


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link, and links inside a run are not followed", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    stored = 512 * getattr(status, "st_blocks", status.st_size)  # Windows does not count blocks
    if status.st_size > SPARSE_FROM and MOST_HOLES * stored < status.st_size:
        raise OSError(errno.EFBIG, "it is almost empty for its size", str(path))


def check_folder(path: Path) -> None:
    """Raises OSError unless the path is a folder itself, not a link to one."""
    if is_link(path):
        raise OSError(errno.ELOOP, "it is a symbolic link, and links inside a run are not followed", str(path))
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(path))


def is_link(path: Path) -> bool:
    """Whether the path is a symbolic link or, on Windows, a junction."""
    return path.is_symlink() or bool(getattr(os.path, "isjunction", lambda path: False)(path))


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, without following a link and without waiting for a FIFO's writer."""
    check_regular(path)
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def open_append(path: Path) -> BufferedWriter:
    """Open a regular file for appending, or create it, without following a link."""
    with contextlib.suppress(FileNotFoundError):
        check_regular(path)
    return os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def _open(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | _OPEN_FLAGS, 0o666)
    try:
        _require_regular(path, os.fstat(descriptor))  # it may have been exchanged since it was checked
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it is larger than {limit >> 20} MB")
    return data


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    """The UTF-8 text of a regular file of at most `limit` bytes."""
    return read_bytes(path, limit).decode("utf-8")


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """The JSON value in a regular file of at most `limit` bytes."""
    return parse_json(read_text(path, limit))


def parse_json(text: str) -> Any:
    """Raises ValueError for what is not JSON: NaN and infinities, and nesting too deep for the parser, included."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def hash_file(path: Path) -> str:
    """SHA-256 of a regular file, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write, which replaces `path` once it is complete and on the disk; on an error nothing changes.

    Its name cannot be predicted, so that no link can wait there; a link at `path` itself is replaced, not followed.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    rights = path.parent.stat().st_mode & 0o666  # what is in a private folder is private; the umask takes away more
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, rights)
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    os.close(descriptor)
    try:
        yield unfinished
        unfinished.chmod(mode)  # safetensors keeps what it writes to its owner
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def is_unfinished(name: str, of: tuple[str, ...]) -> bool:
    """Whether a file name is one that `replacing` left after a kill, for one of the names in `of`."""
    return name.endswith(".tmp") and any(name.startswith(f".{file}.") for file in of)


def remove_tree(path: Path) -> None:
    """Delete a folder with all that is in it, a file, or a link itself; what cannot be deleted stays."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not is_link(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
