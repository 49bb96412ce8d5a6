"""Read a file in chunks of bytes, decompressing gzip, bzip2, xz and Zstandard data.

The size of the chunks of decompressed data is bounded, so memory use does not depend on the compression ratio.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from tinylm.errors import BadFilesError, UsageError

CHUNK_BYTES = 1 << 20
STANDARD_INPUT = "-"  # a path that stands for it
SPOOL_FILE = "standard input"  # name of the file that standard input is copied to
_SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
_SIGNATURES = {"gzip": b"\x1f\x8b\x08", "xz": b"\xfd7zXZ\0", "Zstandard": b"\x28\xb5\x2f\xfd"}  # and that of bzip2
# `zstandard.decompressobj` cannot limit the size of its output; 1 KiB of input expands to at most 32 MiB.
_ZSTANDARD_INPUT_BYTES = 1 << 10

Progress = Callable[[int], None]  # called with the number of bytes or characters processed since the last call


def no_progress(size: int) -> None:
    """A progress callback that does nothing."""


def display_name(file: Path) -> str:
    """The path of a file in messages; "standard input" for a copy of standard input."""
    return file.name if file.name == SPOOL_FILE else str(file)


def content_suffix(file: Path) -> str:
    """The suffix of a file's name, in lower case, without a compression suffix: `.jsonl` for `a.JSONL.gz`."""
    return Path(file.stem).suffix.lower() if file.suffix.lower() in _SUFFIXES else file.suffix.lower()


def content_stem(name: str) -> str:
    """A file's name without its suffix and without a compression suffix after it: `a` for `a.jsonl.gz` and `a.txt`."""
    path = Path(name)
    return Path(path.stem).stem if path.suffix.lower() in _SUFFIXES else path.stem


def decompressed_chunks(
    file: Path, progress: Progress = no_progress, chunk_bytes: int = CHUNK_BYTES
) -> Generator[bytes, None, None]:
    """Yield the decompressed content of a file in chunks of at most `chunk_bytes` (Zstandard: 32 MiB).

    The compression is determined by the suffix, such as .gz, or else by the first bytes. `progress` receives the number
    of bytes read from the file. Raises BadFilesError for a file that cannot be read and for damaged or incomplete
    compressed data, and UsageError for Zstandard data if the package `zstandard` is not installed.
    """
    compression: str | None = None
    try:
        with file.open("rb") as raw:
            compression = _SUFFIXES.get(file.suffix.lower()) or _detect_compression(raw.peek(16))
            before = 0
            for chunk in _decompress(raw, compression, chunk_bytes):
                after = raw.tell()
                progress(after - before)
                before = after
                yield chunk
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not those of gzip and bz2
            raise BadFilesError(f"Cannot read {display_name(file)}: {error.strerror}.") from error
        reason = "it ends too early" if isinstance(error, EOFError) else str(error).rstrip(".")
        raise BadFilesError(
            f"{display_name(file)} is damaged or not {compression} data ({reason}). Copy or compress it again, or give "
            "the uncompressed text."
        ) from None
    except ImportError:
        raise UsageError(
            f"{display_name(file)} is compressed with Zstandard. To read it, install a package (pip install "
            "zstandard), or decompress it with zstd -d."
        ) from None


def _detect_compression(head: bytes) -> str | None:
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bzip2"
    return next((name for name, signature in _SIGNATURES.items() if head.startswith(signature)), None)


def _decompress(raw: BufferedReader, compression: str | None, chunk_bytes: int) -> Iterator[bytes]:
    match compression:
        case None:
            yield from iter(lambda: raw.read(chunk_bytes), b"")
        case "gzip":
            if raw.peek(1):  # an empty file is valid, as for `gzip -d`
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield from iter(lambda: stream.read(chunk_bytes), b"")
        case "bzip2":
            yield from _decompress_streams(raw, bz2.BZ2Decompressor, chunk_bytes)
        case "xz":
            yield from _decompress_streams(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), chunk_bytes)
        case _:
            import zstandard

            new_decompressor = zstandard.ZstdDecompressor().decompressobj
            try:
                yield from _decompress_streams(raw, new_decompressor, _ZSTANDARD_INPUT_BYTES)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from None


def _decompress_streams(raw: BufferedReader, new_decompressor: Callable[[], Any], size: int) -> Iterator[bytes]:
    """Decompress concatenated compressed streams, `size` bytes of input and (except Zstandard) of output at a time.

    `cat` and parallel compressors write such files. `new_decompressor` returns an object with the interface of
    bz2.BZ2Decompressor, or that of Zstandard, which cannot limit its output. BZ2File and LZMAFile ignore a damaged
    second stream, and `zstandard.stream_reader` an incomplete frame.
    """
    data = raw.read(size)
    while data:
        stream = new_decompressor()
        limit = (size,) if hasattr(stream, "needs_input") else ()
        while not stream.eof:
            if (not limit or stream.needs_input) and not data and not (data := raw.read(size)):
                raise EOFError
            chunk, data = stream.decompress(data, *limit), b""
            if chunk:
                yield chunk
        data = stream.unused_data.lstrip(b"\0")  # xz pads with zeros
        while not data and (more := raw.read(size)):
            data = more.lstrip(b"\0")
