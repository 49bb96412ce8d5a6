"""Untrusted GGUF headers: they are read, or refused quickly with one kind of error."""

import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.gguf_files import save_peer
from tests.formats.refusals import assert_refused
from tinylm.errors import TinyLMError
from tinylm.formats.gguf_file import parse_header
from tinylm.formats.gguf_model import read_gguf

LIMIT = 5.0  # seconds, on a busy machine


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's description; the shape as in the file, rows last."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    data: int = 256,
) -> bytes:
    """A file with zeros for tensors. counts: of tensors and of keys; default: as many as there are."""
    keys, tensors = keys or [], tensors or []
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


ARRAY, UINT32, STRING = 9, 4, 8
FORGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"GG", "does not end before the end of the file"),
    "other letters": (b"GGML" + bytes(64), "does not begin with the letters GGUF"),
    "version 1": (header(version=1), "has version 1"),
    "version 4": (header(version=4), "has version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "is big-endian"),
    "many tensors": (header(counts=(1 << 60, 0)), "claims 1,152,921,504,606,846,976 tensors"),
    "many keys": (header(counts=(0, 1 << 62)), "keys of metadata"),
    "keys that are not there": (header(counts=(0, 4000), data=100), "does not end before|string of|unknown type|twice"),
    "a key of gigabytes": (header([struct.pack("<Q", 1 << 33) + b"x"]), "a string of 8,589,934,592 bytes"),
    "a string of gigabytes": (header([text("a") + struct.pack("<IQ", STRING, 1 << 40)]), "a string of"),
    "a string as long as can be": (header([text("a") + struct.pack("<IQ", STRING, 2**64 - 1)]), "a string of"),
    "a string beyond the file": (header([text("a") + struct.pack("<IQ", STRING, 9999)]), "does not end before"),
    "an array of many items": (header([key("a", ARRAY, struct.pack("<IQ", UINT32, 1 << 50))]), "arrays of 1,125,899"),
    "many arrays of many items": (
        header([key(str(i), ARRAY, struct.pack("<IQ", 0, 1 << 20) + bytes(1 << 20)) for i in range(3)]),
        "arrays of 3,145,728 items",
    ),
    "an array beyond the file": (header([key("a", ARRAY, struct.pack("<IQ", UINT32, 1 << 20))]), "does not end before"),
    "an array of long strings": (
        header([key("a", ARRAY, struct.pack("<IQ", STRING, 2) + struct.pack("<Q", 1 << 30))]),
        "string of|does not end",
    ),
    "arrays of arrays": (
        header([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 1000)], data=0),
        "array of the unsupported type 9",
    ),
    "an unknown type of value": (header([key("a", 77, bytes(8))]), "unknown type 77"),
    "a key that is not UTF-8": (header([key("a", UINT32, bytes(4)), text(b"\xff\xfe") + bytes(12)]), "not valid UTF-8"),
    "a key twice": (header([key("a", UINT32, bytes(4))] * 2), "the key 'a' twice"),
    "a tensor twice": (header(tensors=[tensor("t", (2,)), tensor("t", (2,), offset=32)]), "the tensor 't' twice"),
    "tensors that overlap": (header(tensors=[tensor("t", (16,)), tensor("u", (2,), offset=32)]), "overlaps"),
    "no dimension": (header(tensors=[tensor("t", ())]), "0 dimensions"),
    "many dimensions": (header(tensors=[tensor("t", (1,) * 5)]), "5 dimensions"),
    "billions of dimensions": (header(tensors=[text("t") + struct.pack("<I", 2**32 - 1)]), "4294967295 dimensions"),
    "an empty tensor": (header(tensors=[tensor("t", (4, 0))]), "the shape"),
    "sizes whose product wraps around": (header(tensors=[tensor("t", (1 << 33, 1 << 33))]), "the shape"),
    "a tensor beyond the file": (header(tensors=[tensor("t", (1 << 20,))]), "after the end of the file"),
    "an offset beyond the file": (header(tensors=[tensor("t", (2,), offset=1 << 40)]), "after the end of the file"),
    "an offset that wraps around": (
        header(tensors=[tensor("t", (2,), offset=2**64 - 32)]),
        "after the end of the file",
    ),
    "an odd offset": (header(tensors=[tensor("t", (2,), offset=3)]), "not a multiple of 32"),
    "an unknown type of tensor": (header(tensors=[tensor("t", (2,), kind=200)]), "the type number 200"),
    "a removed type of tensor": (header(tensors=[tensor("t", (32,), kind=4)]), "the type number 4"),
    "part of a block": (header(tensors=[tensor("t", (33,), kind=8)]), "which Q8_0 cannot store"),
    "an alignment of zero": (header([key("general.alignment", UINT32, bytes(4))]), "general.alignment"),
    "an alignment of a string": (header([key("general.alignment", STRING, text("32"))]), "general.alignment"),
    "no metadata": (header(tensors=[tensor("t", (2,))]), "lacks general.architecture"),
}


def test_forged_headers_are_refused_quickly_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def attempt(name: str) -> None:
        path.write_bytes(FORGED[name][0])
        start = time.monotonic()
        try:
            read_gguf(path)
        finally:
            assert time.monotonic() - start < LIMIT, name

    rows = [(name, f"Cannot read .* as GGUF: .*({message})") for name, (_, message) in FORGED.items()]
    assert_refused(rows, attempt)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    save_peer("qwen2", path)
    return path.read_bytes()


@given(st.data())
@settings(max_examples=120)
def test_a_file_with_other_numbers_and_bytes_in_its_header_is_read_or_refused(
    valid: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    forged = bytearray(valid)
    sizes = ["block_count", "embedding_length", "context_length", "attention.head_count"]
    for name in data.draw(st.lists(st.sampled_from(sizes), max_size=2)):
        position = valid.index(f"qwen2.{name}".encode()) + len(f"qwen2.{name}") + 4
        number = data.draw(st.sampled_from([0, 1, 2, 7, 300, 2**31, 2**32 - 1]))
        forged[position : position + 4] = struct.pack("<I", number)
    length = len(valid) - sum(info.size for info in parse_header(valid).tensors.values())
    values = [b"\xff" * 8, b"\0" * 8, b"\x01", b"\x80", struct.pack("<Q", 1 << 40), b"\n"]
    for _ in range(data.draw(st.integers(0, 4))):
        position, value = data.draw(st.integers(0, length)), data.draw(st.sampled_from(values))
        forged[position : position + len(value)] = value
    path = tmp_path_factory.getbasetemp() / "forged.gguf"
    path.write_bytes(forged)
    start = time.monotonic()
    try:
        model = read_gguf(path)
        for name in model.tensors:
            model.tensors[name].sum()
    except TinyLMError:
        pass
    assert time.monotonic() - start < LIMIT


def test_a_file_that_was_cut_off_is_refused(valid: bytes, tmp_path: Path) -> None:
    def attempt(length: int) -> None:
        (tmp_path / "cut.gguf").write_bytes(valid[:length])
        read_gguf(tmp_path / "cut.gguf")

    lengths = {*range(30), *range(0, len(valid), len(valid) // 40), len(valid) - 1}
    assert_refused([(length, "Cannot read") for length in lengths], attempt)
