"""The header of a GGUF file, read and checked: its metadata, and where its tensors are.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is untrusted, so lengths,
offsets and sizes are checked against the size of the file, and counts against limits. All errors are ValueErrors with a
reason that completes the sentence "Cannot read PATH as GGUF: ".
"""

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tinylm.system.files import PLACEHOLDER_BYTES, describe_placeholder, open_regular, resolve_links
from tinylm.text.tokenizer_file import short_repr

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 has 32-bit lengths
MAX_HEADER = 1 << 28  # bytes; the header of Gemma 3, with 262,144 tokens, has 7 MB
MAX_KEYS = 1 << 12
MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 21  # sum over all arrays; most are the tokens and the merges of a tokenizer
MAX_NAME = 256  # bytes of a key or of the name of a tensor
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 40
MAX_ALIGNMENT = 1 << 16
MAX_INTEGER = 1 << 40

STRING, ARRAY = 8, 9  # types of metadata values
_SCALARS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")))  # numpy dtypes of the other types
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
FLOAT32, BOOL = 6, 7


class TensorType(NamedTuple):
    """A number format of tensors: each block of `elements` numbers takes `size` bytes."""

    name: str
    elements: int
    size: int


TENSOR_TYPES = {  # those that tinylm reads, by number in the file
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the file. shape: in torch's order, rows first. offset: of its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.elements // self.type.elements * self.type.size


_REQUIRED: Final = object()


class Metadata:
    """The key/value pairs of a GGUF file. Records which keys are read; see `unread`.

    Each method that reads a value raises ValueError for a value of another type or out of range, and for a missing key
    unless there is a default. The default is not checked.
    """

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        """prefix: of all keys that methods get without it."""
        self.values, self._prefix = values, prefix
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.values

    def key(self, name: str) -> str:
        """The key with the prefix."""
        return self._prefix + name

    def unread(self) -> list[str]:
        """The keys with the prefix that were not read, sorted."""
        return sorted(key for key in self.values.keys() - self._read if key.startswith(self._prefix))

    def ignore(self, *names: str) -> None:
        """Mark these keys as read."""
        self._read.update(map(self.key, names))

    def integer(self, name: str, default: Any = _REQUIRED, low: int = 1, high: int = MAX_INTEGER) -> Any:
        """An integer from `low` to `high`, or the default."""
        return self._checked(
            name, default, lambda v: type(v) is int and low <= v <= high, f"an integer from {low} to {high}"
        )

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite number as a float, or the default."""
        value = self._checked(name, default, lambda v: type(v) in (int, float) and math.isfinite(v), "a finite number")
        return float(value) if type(value) is int else value

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        """A boolean, or the default."""
        return self._checked(name, default, lambda v: type(v) is bool, "a boolean")

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A string, or the default."""
        return self._checked(name, default, lambda v: type(v) is str, "a string")

    def texts(self, name: str) -> Any:
        """A list of strings."""
        return self._checked(name, _REQUIRED, lambda v: type(v) is list, "an array of strings")

    def numbers(self, name: str, default: Any = _REQUIRED) -> Any:
        """A numpy array of numbers or booleans, or the default."""
        return self._checked(name, default, lambda v: isinstance(v, np.ndarray), "an array of numbers")

    def layers_integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """An integer from 1 that is the same in all layers: a single value, or an array of equal values."""
        key = self.key(name)
        value = self.values.get(key)
        if isinstance(value, np.ndarray):
            self._read.add(key)
            if value.dtype.kind not in "iu" or not len(value) or value.min() < 1:
                raise ValueError(f"its metadata has {key} = {short_repr(value)}; it must have integers from 1")
            if (value != value[0]).any():
                raise ValueError(f"{key} differs from layer to layer; tinylm builds models whose layers are alike")
            return int(value[0])
        return self.integer(name, default)

    def require(self, name: str, *allowed: Any) -> None:
        """Raise ValueError if the key exists and its value is not one of `allowed`."""
        key = self.key(name)
        if key not in self.values:
            return
        self._read.add(key)
        value = self.values[key]
        if isinstance(value, np.ndarray) or value not in allowed:
            expected = " or ".join(map(short_repr, allowed))
            raise ValueError(f"its metadata has {key} = {short_repr(value)}; tinylm supports {expected}")

    def _checked(self, name: str, default: Any, is_valid: Any, expected: str) -> Any:
        key = self.key(name)
        self._read.add(key)
        if key not in self.values:
            if default is _REQUIRED:
                raise ValueError(f"its metadata lacks {key}")
            return default
        value = self.values[key]
        if not is_valid(value):
            raise ValueError(f"its metadata has {key} = {short_repr(value)}; it must be {expected}")
        return value


class GGUFFile(NamedTuple):
    """A GGUF file with a checked header. data: content of the whole file, usually mapped."""

    metadata: Metadata
    tensors: dict[str, TensorInfo]
    data: mmap.mmap | bytes


def parse_header(data: mmap.mmap | bytes) -> GGUFFile:
    """Parse and check the header of a GGUF file. data: content of the whole file. Raises ValueError."""
    cursor = _Cursor(data)
    if cursor.take(4) != MAGIC:
        found = describe_placeholder(data[:PLACEHOLDER_BYTES])
        raise ValueError(f"it is {found}" if found else "it does not begin with the letters GGUF")
    version = cursor.integer("<I")
    if version not in VERSIONS:
        is_big_endian = version & 0xFFFF == 0 and version > 0
        what = "is big-endian" if is_big_endian else f"has version {version}"
        raise ValueError(f"it {what}; tinylm reads little-endian files of versions 2 and 3")
    n_tensors, n_keys = cursor.integer("<Q"), cursor.integer("<Q")
    if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
        raise ValueError(
            f"it claims {n_tensors:,} tensors and {n_keys:,} keys of metadata; at most {MAX_TENSORS:,} and "
            f"{MAX_KEYS:,} are supported"
        )
    values: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.text(MAX_NAME)
        if key in values:
            raise ValueError(f"its metadata has the key {short_repr(key)} twice")
        values[key] = cursor.value(cursor.integer("<I"))
    metadata = Metadata(values)
    alignment = int(metadata.integer("general.alignment", 32, high=MAX_ALIGNMENT))
    if alignment % 8 or alignment & (alignment - 1):
        raise ValueError(f"its metadata has general.alignment = {alignment}; it must be a power of two, at least 8")

    # The tensors, whose data begin after all descriptions
    stored = [_read_tensor(cursor, alignment) for _ in range(n_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in stored:
        if info.name in tensors:
            raise ValueError(f"it has the tensor {short_repr(info.name)} twice")
        tensors[info.name] = replace(info, offset=start + info.offset)
    end = start
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if info.offset < end:
            raise ValueError(f"its tensor {short_repr(info.name)} overlaps another one")
        end = info.offset + info.size
        if end > len(data):
            raise ValueError(
                f"its tensor {short_repr(info.name)} ends after the end of the file; the file is damaged or incomplete"
            )
    return GGUFFile(metadata, tensors, data)


class _Cursor:
    """Reads values in sequence. Raises ValueError for a value that ends beyond the file or beyond MAX_HEADER."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._end = min(len(data), MAX_HEADER)
        self._items = 0
        self.position = 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > self._end - self.position:
            limit = "the end of the file" if self._end == len(self._data) else f"{MAX_HEADER >> 20} MB"
            raise ValueError(f"its header does not end before {limit}")
        start, self.position = self.position, self.position + size
        return self._data[start : self.position]

    def integer(self, layout: str) -> int:
        """An integer in a format of the `struct` module."""
        return int(struct.unpack(layout, self.take(struct.calcsize(layout)))[0])

    def text(self, limit: int = MAX_HEADER) -> str:
        """A UTF-8 string of at most `limit` bytes, after its length."""
        size = self.integer("<Q")
        if size > limit:
            raise ValueError(f"it has a string of {size:,} bytes where at most {limit:,} are supported")
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("it has a string that is not valid UTF-8") from None

    def value(self, kind: int) -> Any:
        """A metadata value of the type `kind`: bool, int, float, str, list of str, or numpy array."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array(self.integer("<I"), self.integer("<Q"))
        if kind not in _SCALARS:
            raise ValueError(f"its metadata has a value of the unknown type {kind}")
        number = self._numbers(kind, 1)
        if kind == BOOL:
            return bool(number.view(np.uint8)[0])
        # The shortest decimal number: 1e-6 stored as float32 is read as 1e-6, not as 9.999999974752427e-07.
        return float(str(number[0])) if kind == FLOAT32 else number[0].item()

    def _array(self, kind: int, count: int) -> list[str] | np.ndarray:
        self._items += count
        if self._items > MAX_ITEMS:
            raise ValueError(f"its metadata has arrays of {self._items:,} items; at most {MAX_ITEMS:,} are supported")
        if kind == STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"its metadata has an array of the unsupported type {kind}")
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)


def _read_tensor(cursor: _Cursor, alignment: int) -> TensorInfo:
    """The description of a tensor, whose offset is still counted from the start of the data.

    Raises ValueError for a type that is not supported, and for a shape or an offset that it cannot have.
    """
    full_name = cursor.text(MAX_NAME)
    name = short_repr(full_name)
    n_dimensions = cursor.integer("<I")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"its tensor {name} has {n_dimensions} dimensions; from 1 to {MAX_DIMENSIONS} are supported")
    shape = tuple(cursor.integer("<Q") for _ in range(n_dimensions))[::-1]
    number, offset = cursor.integer("<I"), cursor.integer("<Q")
    if number not in TENSOR_TYPES:
        import gguf  # takes a tenth of a second

        found = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}.get(number, f"number {number}")
        supported = ", ".join(kind.name for kind in TENSOR_TYPES.values())
        raise ValueError(f"its tensor {name} has the type {found}; tinylm reads {supported}")
    kind = TENSOR_TYPES[number]
    if min(shape) < 1 or math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(
            f"its tensor {name} has the shape {list(shape)}; it must have from 1 to {MAX_ELEMENTS:,} elements"
        )
    if shape[-1] % kind.elements:
        raise ValueError(f"its tensor {name} has rows of {shape[-1]} numbers, which {kind.name} cannot store")
    if offset % alignment:
        raise ValueError(f"its tensor {name} begins at an offset that is not a multiple of {alignment}")
    return TensorInfo(full_name, shape, kind, offset)


def open_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file and check its header. The mapping is private: writing to a tensor does not change the file.

    A link is followed: the path is one that the user named, such as one in the cache of the hub. Raises OSError for a
    file that cannot be opened, and ValueError for a file that is damaged.
    """
    with open_regular(resolve_links(path)) as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:
            raise ValueError("it is empty") from None
    return parse_header(data)
