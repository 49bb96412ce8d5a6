"""Decompression of files that the standard library and `zstandard` compressed."""

import bz2
import gzip
import lzma
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tinylm.errors import UsageError
from tinylm.text.compression import CHUNK_BYTES, content_stem, content_suffix, decompressed_chunks

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
every_suffix = pytest.mark.parametrize("suffix", COMPRESSORS)


def content(path: Path) -> bytes:
    return b"".join(decompressed_chunks(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compressed")


@every_suffix
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_concatenated_streams_are_decompressed(suffix: str, folder: Path, parts: list[bytes]) -> None:
    path = folder / f"a{suffix}"
    path.write_bytes(b"".join(map(COMPRESSORS[suffix], parts)))
    assert content(path) == b"".join(parts)


def test_compression_is_detected_by_the_first_bytes_without_a_suffix(tmp_path: Path) -> None:
    for compress in COMPRESSORS.values():
        (tmp_path / "standard input").write_bytes(compress(b"some text\n" * 9))
        assert content(tmp_path / "standard input") == b"some text\n" * 9


@every_suffix
@given(data=st.data())
def test_an_error_about_an_incomplete_stream_names_the_file(suffix: str, folder: Path, data: st.DataObject) -> None:
    whole = COMPRESSORS[suffix](b"the first member " * 30)
    second = COMPRESSORS[suffix](b"and the second one " * 30)
    cut = data.draw(st.integers(1, len(second) - 1))
    path = folder / f"cut{suffix}"
    for before in (b"", whole):
        path.write_bytes(before + second[:cut])
        with pytest.raises(UsageError, match=rf"cut\{suffix} is damaged or not \w+ data \(.+\)\. Copy or compress"):
            content(path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])  # checksums are optional in Zstandard
@given(data=st.data())
def test_a_flipped_bit_is_an_error_or_does_not_change_the_text(suffix: str, folder: Path, data: st.DataObject) -> None:
    text = bytes(range(256)) * 4
    damaged = bytearray(COMPRESSORS[suffix](text))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = folder / f"flipped{suffix}"
    path.write_bytes(bytes(damaged))
    try:
        assert content(path) == text
    except UsageError as error:
        assert str(path) in str(error)


def test_what_is_not_compressed_is_refused_unless_it_is_empty(tmp_path: Path) -> None:
    for suffix, compress in COMPRESSORS.items():
        path = tmp_path / f"a{suffix}"
        for data in (b"plain text", compress(b"text") + b"no stream"):
            path.write_bytes(data)
            with pytest.raises(UsageError, match=rf"a\{suffix} is damaged or not \w+ data"):
                content(path)
        path.write_bytes(b"")
        assert content(path) == b""


def test_padding_between_streams_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"one ") + bytes(8) + lzma.compress(b"two") + bytes(4))
    assert content(tmp_path / "a.xz") == b"one two"
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    (tmp_path / "a.zst").write_bytes(skippable + COMPRESSORS[".zst"](b"text") + skippable)
    assert content(tmp_path / "a.zst") == b"text"


@every_suffix
def test_decompressing_many_zeros_takes_little_memory(suffix: str, tmp_path: Path) -> None:
    """100 MB in three streams, which are 1,000 (gzip) to 700,000 times (bzip2) smaller."""
    path = tmp_path / f"a{suffix}"
    path.write_bytes(COMPRESSORS[suffix](bytes(1 << 25)) * 3)
    total = 0
    tracemalloc.start()
    try:
        for chunk in decompressed_chunks(path):
            total += len(chunk)
            del chunk
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 3 << 25
    assert peak < 1 << 26


@pytest.mark.parametrize("suffix", ["", *COMPRESSORS])
def test_progress_counts_the_bytes_read_from_the_disk(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    text = b"".join(bytes([i % 251, i // 251 % 251]) for i in range(CHUNK_BYTES // 4))
    path.write_bytes(COMPRESSORS[suffix](text) if suffix else text)
    progress: list[int] = []
    assert b"".join(decompressed_chunks(path, progress.append)) == text
    size = path.stat().st_size
    assert all(step >= 0 for step in progress)
    assert 0.9 * size <= sum(progress) <= size


def test_a_missing_file_or_package_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"Cannot read .*absent\.gz: No such file or directory\."):
        content(tmp_path / "absent.gz")
    (tmp_path / "a.zst").write_bytes(COMPRESSORS[".zst"](b"text"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r"a\.zst is compressed with Zstandard.*pip install zstandard"):
        content(tmp_path / "a.zst")


def test_suffix_and_stem_ignore_the_compression_suffix() -> None:
    expected = {
        "a.jsonl.gz": (".jsonl", "a"),
        "A.JSON.BZ2": (".json", "A"),
        "a.xz": ("", "a"),
        "a.txt": (".txt", "a"),
        "a": ("", "a"),
        "v1.2.txt.zst": (".txt", "v1.2"),
        ".hidden": ("", ".hidden"),
    }
    assert {name: (content_suffix(Path(name)), content_stem(name)) for name in expected} == expected
