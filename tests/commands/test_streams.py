"""The standard streams: failed writes to stdout are one error, and failed writes to stderr are dropped."""

import contextlib
import errno
import io
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinylm.commands.streams import prepare_streams
from tinylm.errors import ClosedOutputError, OutputError

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX pipes and terminals")
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


class Disk(io.BytesIO):
    """A raw stream whose writes raise the given errors in turn; `None` is a write that succeeds."""

    def __init__(self, *failures: int | None, descriptor: int = -1) -> None:
        super().__init__()
        self.failures = list(failures)
        self.descriptor = descriptor

    def fileno(self) -> int:
        return self.descriptor

    def write(self, data: object) -> int:
        if self.failures and (number := self.failures.pop(0)) is not None:
            raise OSError(number, os.strerror(number))
        return super().write(data)


@pytest.fixture(autouse=True)
def streams() -> Iterator[None]:
    """Restore the streams that prepare_streams replaces."""
    with contextlib.redirect_stdout(sys.stdout), contextlib.redirect_stderr(sys.stderr):
        yield


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def prepared(stdout: io.RawIOBase | io.BytesIO, stderr: io.RawIOBase | io.BytesIO | None = None) -> None:
    sys.stdout, sys.stderr = io.TextIOWrapper(stdout), io.TextIOWrapper(stderr or io.BytesIO())
    prepare_streams()


def test_text_is_written_in_utf_8_and_bytes_of_a_path_unchanged() -> None:
    out, err = Disk(), Disk()
    prepared(out, err)
    print("é \udcff")
    print("é \udcff", file=sys.stderr)
    assert out.getvalue() == "é ".encode() + b"\xff" + os.linesep.encode()
    assert err.getvalue() == "é \\udcff".encode() + os.linesep.encode()


@full
def test_a_full_disk_is_one_error_and_later_writes_are_dropped() -> None:
    """Otherwise Python's flush at exit would fail, too, and the process would end with exit code 120."""
    with Path("/dev/full").open("wb", buffering=0) as device:
        prepared(device)
        with pytest.raises(
            OutputError, match="Cannot write to standard output: No space left on device; free"
        ) as caught:
            print("result", flush=True)
        assert caught.value.exit_code == 1
        print("more", flush=True)
        sys.stdout.flush()


@posix
def test_a_closed_pipe_or_terminal_is_a_closed_output_and_a_failing_disk_an_error(tmp_path: Path) -> None:
    for ours, theirs in (os.pipe(), os.openpty()):
        os.close(ours)
        prepared(io.FileIO(theirs, "w", closefd=False))
        with pytest.raises(ClosedOutputError) as caught:
            print("result", flush=True)
        assert caught.value.exit_code == 0
        sys.stdout.flush()
        os.close(theirs)
    with (tmp_path / "out").open("wb") as file:
        prepared(Disk(errno.EIO, descriptor=file.fileno()))
        with pytest.raises(OutputError) as caught:
            print("result", flush=True)
    assert not isinstance(caught.value, ClosedOutputError)


def test_messages_that_cannot_be_written_are_dropped_and_later_ones_are_written() -> None:
    for number in (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF):
        err = Disk(None, number, number, None)
        prepared(Disk(), err)
        for message in ("one", "two", "three", "four"):
            print(message, file=sys.stderr)
        assert err.getvalue().split() == [b"one", b"four"]


@posix
def test_a_non_blocking_pipe_receives_all_output(pipe: tuple[int, int]) -> None:
    """Another program of a pipeline may make the pipe non-blocking; Python's own streams then lose output."""
    os.set_blocking(pipe[1], False)
    prepared(io.FileIO(pipe[1], "w", closefd=False))
    text = "0123456789" * 50_000  # more than a pipe holds
    found: list[int] = []

    def read() -> None:
        size = 0
        while size < len(text):
            size += len(os.read(pipe[0], 1 << 16))
        found.append(size)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    sys.stdout.write(text)
    sys.stdout.flush()
    reader.join(timeout=60)
    assert found == [len(text)]


def test_a_stream_without_a_buffer_is_not_replaced() -> None:
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    prepare_streams()
    print("text")
    assert sys.stdout.getvalue() == "text\n"
