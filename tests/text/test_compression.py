"""Judge: the standard library's compressors and the zstandard package, and the text that went into them."""

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
from tinylm.text.compression import PIECE_BYTES, content_stem, content_suffix, read_bytes

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
each = pytest.mark.parametrize("suffix", COMPRESSORS)


def content(path: Path) -> bytes:
    return b"".join(read_bytes(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compressed")


@each
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_joined_members_are_read_back_equal(suffix: str, folder: Path, parts: list[bytes]) -> None:
    path = folder / f"a{suffix}"
    path.write_bytes(b"".join(map(COMPRESSORS[suffix], parts)))
    assert content(path) == b"".join(parts)


@each
def test_compression_is_found_by_the_first_bytes_where_the_name_is_silent(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "standard input"
    path.write_bytes(COMPRESSORS[suffix](b"some text\n" * 9))
    assert content(path) == b"some text\n" * 9


@each
@given(data=st.data())
def test_a_member_that_is_cut_off_anywhere_is_an_error_that_names_the_file(
    suffix: str, folder: Path, data: st.DataObject
) -> None:
    whole = COMPRESSORS[suffix](b"the first member " * 30)
    second = COMPRESSORS[suffix](b"and the second one " * 30)
    cut = data.draw(st.integers(1, len(second) - 1))
    path = folder / f"cut{suffix}"
    for before in (b"", whole):
        path.write_bytes(before + second[:cut])
        with pytest.raises(UsageError, match=rf"cut\{suffix} is damaged or not \w+ data \(.+\)\. Copy or compress"):
            content(path)


@each
def test_what_follows_a_member_and_is_none_is_not_lost_in_silence(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(COMPRESSORS[suffix](b"text") + b"no member")
    with pytest.raises(UsageError, match=rf"a\{suffix} is damaged"):
        content(path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])  # a frame of Zstandard has a checksum only if asked for
@given(data=st.data())
def test_a_flipped_bit_is_an_error_or_changes_nothing(suffix: str, folder: Path, data: st.DataObject) -> None:
    text = bytes(range(256)) * 4
    damaged = bytearray(COMPRESSORS[suffix](text))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = folder / f"flipped{suffix}"
    path.write_bytes(bytes(damaged))
    try:
        assert content(path) == text
    except UsageError as error:
        assert str(path) in str(error)


@each
def test_plain_text_with_the_name_of_compressed_text_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(b"plain text")
    with pytest.raises(UsageError, match=r"is damaged or not \w+ data"):
        content(path)


@pytest.mark.parametrize("suffix", ["", *COMPRESSORS])
def test_an_empty_file_is_empty_whatever_its_name(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"a{suffix}").touch()
    assert content(tmp_path / f"a{suffix}") == b""


def test_zeros_between_members_of_xz_are_padding(tmp_path: Path) -> None:
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"one ") + bytes(8) + lzma.compress(b"two") + bytes(4))
    assert content(tmp_path / "a.xz") == b"one two"


def test_skippable_frames_of_zstandard_are_skipped(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    (tmp_path / "a.zst").write_bytes(skippable + COMPRESSORS[".zst"](b"text") + skippable)
    assert content(tmp_path / "a.zst") == b"text"


@each
def test_many_zeros_in_a_small_file_takes_little_memory(suffix: str, tmp_path: Path) -> None:
    """100 MB, in members that are up to ten thousand times smaller."""
    path = tmp_path / f"a{suffix}"
    path.write_bytes(COMPRESSORS[suffix](bytes(1 << 25)) * 3)
    total = 0
    tracemalloc.start()
    try:
        for piece in read_bytes(path):
            total += len(piece)
            del piece
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 3 << 25
    assert peak < 1 << 26


@pytest.mark.parametrize("suffix", ["", *COMPRESSORS])
def test_progress_counts_the_bytes_on_the_disk(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    text = b"".join(bytes([i % 251, i // 251 % 251]) for i in range(PIECE_BYTES // 4))
    path.write_bytes(COMPRESSORS[suffix](text) if suffix else text)
    told: list[int] = []
    assert b"".join(read_bytes(path, told.append)) == text
    size = path.stat().st_size
    assert all(step >= 0 for step in told)
    assert 0.9 * size <= sum(told) <= size


def test_without_its_package_zstandard_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.zst").write_bytes(COMPRESSORS[".zst"](b"text"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r"a\.zst is compressed with Zstandard.*pip install zstandard"):
        content(tmp_path / "a.zst")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Cannot read .*absent\.gz: No such file or directory\."):
        content(tmp_path / "absent.gz")


@pytest.mark.parametrize(
    ("name", "suffix", "stem"),
    [
        ("a.jsonl.gz", ".jsonl", "a"),
        ("A.JSON.BZ2", ".json", "A"),
        ("a.xz", "", "a"),
        ("a.txt", ".txt", "a"),
        ("a", "", "a"),
        ("v1.2.txt.zst", ".txt", "v1.2"),
        (".hidden", "", ".hidden"),
    ],
)
def test_a_name_says_what_a_file_holds_beneath_its_compression(name: str, suffix: str, stem: str) -> None:
    assert (content_suffix(Path(name)), content_stem(name)) == (suffix, stem)
