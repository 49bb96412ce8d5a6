"""Files as pieces of bytes; gzip, bzip2, xz and Zstandard data is decompressed on the way.

The decompressed pieces are of bounded size, whatever the ratio, so that no file needs more memory than another.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from tinylm.errors import UsageError

PIECE_BYTES = 1 << 20
SPOOL_FILE = "standard input"  # the name of the file in which standard input is kept
_SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
# A frame of Zstandard cannot be decompressed in parts of a limited size; 1 KiB of input gives at most 32 MiB.
_ZSTANDARD_INPUT = 1 << 10

Advance = Callable[[int], None]


def ignore(size: int) -> None:
    """The progress callback of those who want none."""


def shown(file: Path) -> str:
    """The file's name in messages."""
    return file.name if file.name == SPOOL_FILE else str(file)


def content_suffix(file: Path) -> str:
    """The suffix that says what a file holds once it is decompressed: `.jsonl` of `a.JSONL.gz`."""
    return Path(file.stem).suffix.lower() if file.suffix.lower() in _SUFFIXES else file.suffix.lower()


def content_stem(name: str) -> str:
    """A file's name without what says how it is compressed and what it holds: `a` of `a.jsonl.gz`."""
    path = Path(name)
    return Path(path.stem).stem if path.suffix.lower() in _SUFFIXES else path.stem


def read_bytes(file: Path, advance: Advance = ignore, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The content in pieces of at most `piece_bytes` (Zstandard: 32 MiB); `advance` is called with the bytes read from
    the disk.

    A suffix such as .gz says that a file is compressed, and so does the beginning of a file of any other name. Raises
    UsageError for a file that cannot be read, and for compressed data that is damaged, incomplete or needs a package
    that is not installed.
    """
    kind: str | None = None
    try:
        with file.open("rb") as raw:
            kind = _SUFFIXES.get(file.suffix.lower()) or _kind_of(raw.peek(16))
            before = 0
            for piece in _pieces(raw, kind, piece_bytes):
                after = raw.tell()
                advance(after - before)
                before = after
                yield piece
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, ValueError) as error:
        raise _damaged(file, kind, error) from None
    except OSError as error:
        if error.errno is None:  # what bz2 raises
            raise _damaged(file, kind, error) from None
        raise UsageError(f"Cannot read {shown(file)}: {error.strerror}.") from error
    except ImportError:
        raise UsageError(
            f"{shown(file)} is compressed with Zstandard, which needs a package: pip install zstandard. Or decompress "
            f"it first, with zstd -d."
        ) from None


def _damaged(file: Path, kind: str | None, error: Exception) -> UsageError:
    what = "it ends too early" if isinstance(error, EOFError) else str(error).rstrip(".")
    return UsageError(
        f"{shown(file)} is damaged or not {kind} data ({what}). Copy or compress it again, or give the text itself."
    )


def _kind_of(head: bytes) -> str | None:
    if head.startswith(b"\x1f\x8b\x08"):
        return "gzip"
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bzip2"
    if head.startswith(b"\xfd7zXZ\0"):
        return "xz"
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return "Zstandard"
    return None


def _pieces(raw: BufferedReader, kind: str | None, size: int) -> Iterator[bytes]:
    match kind:
        case None:
            yield from iter(lambda: raw.read(size), b"")
        case "gzip":
            if raw.peek(1):  # an empty file is no damage, as gzip itself has it
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield from iter(lambda: stream.read(size), b"")
        case "bzip2":
            yield from _members(raw, bz2.BZ2Decompressor, size)
        case "xz":
            yield from _members(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), size)
        case _:
            yield from _members(raw, _ZstandardFrame, _ZSTANDARD_INPUT)


def _members(raw: BufferedReader, new: Callable[[], Any], size: int) -> Iterator[bytes]:
    """What several compressed streams hold, one after another, as `cat` and parallel compressors join them.

    BZ2File and LZMAFile ignore what they cannot read after the first stream, and would lose a damaged second one.
    """
    data = raw.read(size)
    while data:
        member = new()
        while not member.eof:
            if member.needs_input and not data and not (data := raw.read(size)):
                raise EOFError
            piece, data = member.decompress(data, PIECE_BYTES), b""
            if piece:
                yield piece
        data = member.unused_data.lstrip(b"\0")  # xz pads with zeros
        while not data and (more := raw.read(size)):
            data = more.lstrip(b"\0")


class _ZstandardFrame:
    """A frame of Zstandard, with the interface of bz2.BZ2Decompressor.

    The package's own stream reader ends quietly where a file was cut off.
    """

    needs_input = True

    def __init__(self) -> None:
        import zstandard

        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._error = zstandard.ZstdError

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """All that the data holds; the caller limits it by the data's size."""
        try:
            return bytes(self._frame.decompress(data))
        except self._error as error:
            raise ValueError(str(error)) from None
