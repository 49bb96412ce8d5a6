import contextlib
import errno
import io
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinylm.errors import ClosedOutputError, OutputError
from tinylm.streams import prepare_streams

posix = pytest.mark.skipif(os.name != "posix", reason="pipes, terminals and devices as POSIX has them")
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")


class Disk(io.BytesIO):
    """Fails as it is told to, one write after another; `None` is a write that works."""

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
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """prepare_streams replaces these, and they come back."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))


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


def opened(descriptor: int) -> io.FileIO:
    return io.FileIO(descriptor, "w", closefd=False)


def test_text_arrives_in_utf_8_and_bytes_of_a_path_as_they_were() -> None:
    out, err = Disk(), Disk()
    prepared(out, err)
    print("é \udcff")
    print("é \udcff", file=sys.stderr)
    assert out.getvalue() == "é ".encode() + b"\xff" + os.linesep.encode()
    assert err.getvalue() == "é \\udcff".encode() + os.linesep.encode()


@full
def test_a_full_disk_is_an_error_once_and_then_silence() -> None:
    """Otherwise Python's flush at exit would fail again, and end the process with code 120."""
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
def test_a_closed_pipe_is_no_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    prepared(opened(pipe[1]))
    with pytest.raises(ClosedOutputError) as caught:
        print("result", flush=True)
    assert caught.value.exit_code == 0
    sys.stdout.flush()


@posix
def test_a_terminal_that_has_gone_is_no_error() -> None:
    ours, theirs = os.openpty()
    prepared(opened(theirs))
    os.close(ours)
    with pytest.raises(ClosedOutputError):
        print("result", flush=True)
    os.close(theirs)


def test_a_disk_that_cannot_be_written_is_an_error_where_a_terminal_would_have_gone(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        prepared(Disk(errno.EIO, descriptor=file.fileno()))
        with pytest.raises(OutputError) as caught:
            print("result", flush=True)
    assert not isinstance(caught.value, ClosedOutputError)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF])
def test_messages_that_cannot_be_written_are_dropped_and_later_ones_are_tried(number: int) -> None:
    err = Disk(None, number, number, None)
    prepared(Disk(), err)
    for message in ("one", "two", "three", "four"):
        print(message, file=sys.stderr)
    assert err.getvalue().split() == [b"one", b"four"]


@posix
def test_a_pipe_that_does_not_block_gets_all_of_the_output(pipe: tuple[int, int]) -> None:
    """A terminal program in the same pipeline may have made it so; Python's own streams lose what does not fit."""
    os.set_blocking(pipe[1], False)
    prepared(opened(pipe[1]))
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


def test_a_stream_without_bytes_beneath_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook's."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    prepare_streams()
    print("text")
    assert sys.stdout.getvalue() == "text\n"
