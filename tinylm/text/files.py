"""Text files: their names in messages, their decompressed bytes, and their encoding.

Compressed data is read in chunks of bounded size, so memory use does not depend on the compression ratio. The first
bytes of a file show whether it is text, text in another encoding, or binary.
"""

import bz2
import codecs
import contextlib
import functools
import gzip
import itertools
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from tinylm.errors import BadFilesError, UsageError
from tinylm.system.files import LFS_POINTER

CHUNK_BYTES = 1 << 20
STANDARD_INPUT = "-"  # a path that stands for it
SPOOL_FILE = "standard input"  # name of the file that standard input is copied to
_SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
_COMPRESSED = {  # the first bytes
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh.(1AY&SY|\x17\x72\x45\x38\x50\x90)", re.DOTALL),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "Zstandard": re.compile(rb"\x28\xb5\x2f\xfd"),
}
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
            found = (name for name, signature in _COMPRESSED.items() if signature.match(raw.peek(16)))
            compression = _SUFFIXES.get(file.suffix.lower()) or next(found, None)
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


HEAD_BYTES = 8192
# Signatures of common binary formats. Valid text may begin with a printable one, such as "GIF8".
_SIGNATURES = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"%PDF-", "a PDF document"),
    (b"{\\rtf", "an RTF document"),
    (b"PK\x03\x04", "a zip archive or an office document"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"PAR1", "a Parquet file"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3\0", "a SQLite database"),
    (b"\xd0\xcf\x11\xe0", "an office document"),
    (LFS_POINTER, "a Git LFS pointer (git lfs pull fetches the file)"),
)
_ALWAYS_BINARY = (b"%PDF-", b"{\\rtf", LFS_POINTER)  # formats that can be entirely printable but are not plain text
_TAR = slice(257, 262)  # position of the signature of a tar archive
_BYTE_ORDER_MARKS = (  # longer ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Control characters (C0 and DEL) that do not occur in text, unlike form feeds, backspaces and terminal escapes.
_CONTROL = re.compile("[\\x00-\\x07\\x0e-\\x1a\\x1c-\\x1f\\x7f]")
_MAX_CONTROL_SHARE = 0.03  # of the characters or bytes; 10 % of random bytes are controls
_MIN_UTF16_BYTES = 8  # in fewer, zeros at every second position, or none, may be chance


def encoding_of(file: Path, named: str) -> str:
    """The encoding of a text file: that of its byte-order mark, else UTF-8, else `named`.

    Text is UTF-8 if its first chunk that is not ASCII is, up to fewer invalid bytes than valid characters. A file is
    read once for this, until it changes. Raises UsageError as `decompressed_chunks`.
    """
    state = None
    with contextlib.suppress(OSError):  # reading it raises an error that says which
        status = file.stat()
        state = status.st_size, status.st_mtime_ns
    return _encoding_of(file, named, state)


@functools.lru_cache(maxsize=1 << 16)
def _encoding_of(file: Path, named: str, state: tuple[int, int] | None) -> str:
    head = read_head(file)
    for mark, name in _BYTE_ORDER_MARKS:
        if head.startswith(mark) and is_text(head, name):
            return name
    if codecs.lookup(named).name.startswith("utf-8"):
        return named
    if codecs.lookup(named).name.startswith(("utf-16", "utf-32")):  # their text may consist of ASCII bytes
        return "utf-8" if len(head) >= _MIN_UTF16_BYTES and is_text(head, "utf-8") else named
    decoder = codecs.getincrementaldecoder("utf-8")()
    with closing(decompressed_chunks(file)) as chunks:
        for chunk in itertools.chain(chunks, [b""]):
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:  # damaged UTF-8, which `named` would garble, or another encoding
                text = error.object.decode("utf-8", "replace")
                valid = sum(character > "\x7f" for character in text) - text.count("\ufffd")
                return "utf-8" if valid > text.count("\ufffd") else named
            if not text.isascii():
                return "utf-8"
    return named


def read_head(file: Path) -> bytes:
    """The first HEAD_BYTES of the decompressed content of a file. Raises UsageError as `decompressed_chunks`."""
    head = b""
    with closing(decompressed_chunks(file, chunk_bytes=HEAD_BYTES)) as chunks:
        for chunk in chunks:
            head += chunk
            if len(head) >= HEAD_BYTES:
                break
    return head[:HEAD_BYTES]


def first_text(file: Path, named: str) -> str:
    """The beginning of a file, without a byte-order mark; "" if it is not text. named: see `encoding_of`."""
    return (decode_head(read_head(file), encoding_of(file, named)) or "").lstrip("\ufeff")


def binary_format(head: bytes) -> str | None:
    """The name of the binary format whose signature `head` has, such as "a PNG image", or `None`."""
    if head[_TAR] == b"ustar":
        return "a tar archive"
    return next((name for start, name in _SIGNATURES if head.startswith(start)), None)


def decode_head(head: bytes, encoding: str) -> str | None:
    """Decode the first bytes of a file, without an incomplete last character; `None` if they are not valid."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeError:
        return None


def is_text(head: bytes, encoding: str) -> bool:
    """Whether the first bytes of a file are valid in the encoding, without NULs and with few control characters."""
    text = decode_head(head, encoding)
    if text is None or "\0" in text or head.startswith(_ALWAYS_BINARY):
        return False
    return len(_CONTROL.findall(text)) <= _MAX_CONTROL_SHARE * len(text)


def is_undecodable_text(head: bytes, encoding: str) -> bool:
    """Whether the bytes are not valid in the encoding but look like text: damaged, or in another encoding."""
    if decode_head(head, encoding) is not None or binary_format(head) or 0 in head:
        return False
    return len(_CONTROL.findall(head.decode("latin-1"))) <= _MAX_CONTROL_SHARE * len(head)


def unmarked_utf16(head: bytes) -> str | None:
    """The encoding of text in UTF-16 without a byte-order mark, if most of its characters are ASCII, or `None`."""
    for name in ("utf-16-le", "utf-16-be") if len(head) >= _MIN_UTF16_BYTES else ():
        text = decode_head(head, name) or ""
        # Unlike in text, there are zeros and control characters in arrays of small 16-bit numbers.
        if sum(map(str.isascii, text)) > 0.7 * len(text) and not _CONTROL.search(text):
            return name
    return None


def code_points(text: str) -> np.ndarray:
    """The code points of a text, (len(text),) of uint32."""
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
