"""The process's standard streams: always open, always UTF-8, and safe to write to when nobody reads them."""

import errno
import io
import os
import select
import stat
import sys
from typing import Any

from tinylm.errors import ClosedOutputError, OutputError

CLOSED = {errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN}  # the reader has gone


def prepare_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams whose failures are handled here, for the whole process.

    Writing to stdout raises OutputError once, ClosedOutputError where its reader has gone; all that follows is dropped,
    so that Python's own flush at exit cannot fail. Writing to stderr never fails: what cannot be written is dropped.

    A stream that the shell closed (`2>&-`) becomes the null device; left closed, the next file opened would get its
    number. A path may hold bytes that are not UTF-8: stdout passes them on unchanged, stderr escapes them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    if hasattr(sys.stdout, "buffer"):  # a notebook's streams have none
        sys.stdout = _text(_Output(sys.stdout), "surrogateescape")
    if hasattr(sys.stderr, "buffer"):
        sys.stderr = _text(_Messages(sys.stderr), "backslashreplace")


def _text(raw: "_Output", errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors=errors, line_buffering=True)


class _Output(io.RawIOBase):
    """The bytes of a text stream, written to its file."""

    def __init__(self, stream: Any) -> None:
        stream.flush()
        self._stream = stream  # which would close the file when it is garbage
        self._file: Any = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer between
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
            if self._has_closed(error):
                raise ClosedOutputError("The reader of standard output has gone.") from error
            raise OutputError(
                f"Cannot write to standard output: {error.strerror or error}; free some space, or send the output "
                "elsewhere."
            ) from error

    def _write(self, data: Any) -> int:
        while (written := self._file.write(data)) is None:  # someone made the stream non-blocking, and it is full
            select.select([], [self._file], [])
        return int(written)

    def _has_closed(self, error: OSError) -> bool:
        if error.errno == errno.EIO:  # of a terminal that hung up, which isatty no longer calls one; or a disk's defect
            return stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return error.errno in CLOSED or (os.name == "nt" and error.errno == errno.EINVAL)


class _Messages(_Output):
    def write(self, data: Any) -> int:
        try:
            return self._write(data)
        except OSError:
            return len(data)  # the next message is tried again: a full disk may have space by then
