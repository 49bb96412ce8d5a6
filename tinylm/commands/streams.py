"""The standard streams of the process: open, in UTF-8, and safe to write after their reader has closed them."""

import errno
import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from typing import Any

from tinylm.errors import ClosedOutputError, OutputError, UsageError

CLOSED_ERRNOS = {errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN}  # the reader has closed the stream
MAX_STDIN_BYTES = 1 << 28  # of a prompt
READ_BYTES, MAX_LINE_BYTES = 1 << 18, 1 << 24


def silence_stream(name: str) -> None:
    """Replace `sys.stdout` or `sys.stderr` by the null device. Called on ranks other than 0."""
    setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def prepare_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr`, and `sys.stdin` if it is closed, for the whole process.

    1. A failed write to stdout raises OutputError, or ClosedOutputError if its reader has closed it, once. Later writes
       are dropped, so that Python's flush at exit cannot fail.
    2. A failed write to stderr is dropped.
    3. A stream that the shell closed (`2>&-`) becomes the null device; otherwise the next file opened would get its
       file descriptor.
    4. Bytes of paths that are not UTF-8 are written to stdout unchanged, and escaped on stderr.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    if hasattr(sys.stdout, "buffer"):  # a notebook's streams have none
        sys.stdout = _text_stream(_RawStdout(sys.stdout), "surrogateescape")
    if hasattr(sys.stderr, "buffer"):
        sys.stderr = _text_stream(_RawStderr(sys.stderr), "backslashreplace")


def has_piped_input() -> bool:
    """Whether standard input is a pipe, or a file at its start.

    A file that is not at its start has another reader, such as the loop in `while read x; do tinylm sample; done < f`.
    A socket may have no end: some programs connect one to every process that they start.
    """
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
        return stat.S_ISFIFO(mode) or (stat.S_ISREG(mode) and os.lseek(descriptor, 0, os.SEEK_CUR) == 0)
    except (OSError, ValueError):  # it is closed, or not a file of the operating system
        return False


def read_stdin() -> bytes:
    """Standard input up to its end. Raises UsageError for more than MAX_STDIN_BYTES."""
    data = bytearray()
    while len(data) <= MAX_STDIN_BYTES:
        chunk = sys.stdin.buffer.read(1 << 20)
        if chunk is None:  # it is non-blocking, and nothing has arrived yet
            select.select([sys.stdin], [], [])
        elif not chunk:
            return bytes(data)
        else:
            data += chunk
    raise UsageError(f"Standard input has more than {MAX_STDIN_BYTES >> 20} MB, too much for prompts; split it.")


def arriving_lines(stream: Any, name: str, errors: str = "strict") -> Iterator[list[str]]:
    """Yield the lines of a binary stream, each time those that have arrived. errors: as for `bytes.decode`.

    Raises UsageError, after the lines before it, for a line that cannot be decoded and for one of more than
    MAX_LINE_BYTES.
    """
    number, rest = 0, b""
    while True:
        chunk = stream.read1(READ_BYTES)
        if chunk is None:  # it is non-blocking, and nothing has arrived yet
            select.select([stream], [], [])
            continue
        *complete, rest = (rest + chunk).split(b"\n")
        if not chunk and rest:
            complete, rest = [rest], b""
        lines = []
        for line in complete:
            number += 1
            try:
                lines.append(line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8", errors))
            except UnicodeDecodeError as error:
                yield lines
                raise UsageError(
                    f"{name}, line {number}: byte 0x{line[error.start]:02X} at offset {error.start} is not UTF-8; "
                    "convert the text."
                ) from None
        if lines:
            yield lines
        if not chunk:
            return
        if len(rest) > MAX_LINE_BYTES:
            raise UsageError(
                f"{name}, line {number + 1}, has more than {MAX_LINE_BYTES >> 20} MB, too much for a text."
            )


def _text_stream(raw: "_RawStdout", errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors=errors, line_buffering=True)


class _RawStdout(io.RawIOBase):
    """The raw stream below stdout: writes to the raw file of the original text stream."""

    def __init__(self, stream: Any) -> None:
        stream.flush()
        self._stream = stream  # a reference, since the finalizer of the stream would close the file
        self._file: Any = getattr(stream.buffer, "raw", stream.buffer)  # with python -u, the buffer is the raw file
        self._failed = False

    @property
    def name(self) -> Any:
        return self._file.name

    def fileno(self) -> int:
        return int(self._file.fileno())

    def isatty(self) -> bool:
        return bool(self._file.isatty())

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._failed:
            return len(data)
        try:
            return self._write(data)
        except OSError as error:
            self._failed = True
            closed = error.errno in CLOSED_ERRNOS or (os.name == "nt" and error.errno == errno.EINVAL)
            if error.errno == errno.EIO:  # a terminal that hung up (isatty is false by then), or a defective disk
                closed = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
            if closed:
                raise ClosedOutputError("The reader of standard output has closed it.") from error
            raise OutputError(
                f"Cannot write to standard output: {error.strerror or error}; free some space, or redirect the output."
            ) from error

    def _write(self, data: Any) -> int:
        while (written := self._file.write(data)) is None:  # the stream is non-blocking and full
            select.select([], [self._file], [])
        return int(written)


class _RawStderr(_RawStdout):
    def write(self, data: Any) -> int:
        try:
            return self._write(data)
        except OSError:
            return len(data)  # dropped; later messages are still written, since a full disk may have space by then
