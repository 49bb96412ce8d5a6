"""Tensors in safetensors files: all rows in one file, or the rows of each shard in a separate file (see `Shard`).

Functions that read raise TinyLMError for a damaged file; `read_layout` and `read_tensors` also for a dtype that is not
in SAFETENSORS_DTYPES.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tinylm.errors import TinyLMError
from tinylm.machine.device import free_memory
from tinylm.system.files import describe_placeholder, read_start, replacing, unicode_path
from tinylm.system.process_signals import interruptible

SAFETENSORS_DTYPES = ("F32", "F16", "BF16")  # of files that can be read
MAX_ELEMENTS = 1 << 62


@dataclass(frozen=True)
class Shard:
    """One of `size` parts of tensors, divided by rows as in torch's FSDP2.

    Of R rows, part `index` has rows index * ceil(R / size) to (index + 1) * ceil(R / size); the last parts may have
    fewer rows or none. Tensors of dimension 0 belong to every part.
    """

    index: int = 0
    size: int = 1

    def bounds(self, rows: int) -> tuple[int, int]:
        """Index of the first row of this part, and of the row after its last one."""
        part = -(-rows // self.size)
        return min(self.index * part, rows), min((self.index + 1) * part, rows)

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of this part, as a view."""
        if not tensor.dim():
            return tensor
        start, end = self.bounds(len(tensor))
        return tensor[start:end]

    def file_name(self, name: str) -> str:
        """The name of the file of this part: `model.safetensors`, or `model-00002-of-00004.safetensors`."""
        stem, _, suffix = name.rpartition(".")
        return name if self.size == 1 else f"{stem}-{self.index + 1:05}-of-{self.size:05}.{suffix}"


WHOLE = Shard()
Layout = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Replace a safetensors file. Raises OSError and SafetensorError; the old file then stays intact."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as unfinished:
        interruptible(lambda: safetensors.torch.save_file(tensors, unfinished, metadata))


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Context manager that opens a safetensors file, as a memory-mapped `safetensors.safe_open`.

    Raises TinyLMError also for an OSError, ValueError or RuntimeError in its body.
    """
    try:
        if found := describe_placeholder(read_start(path)):
            raise ValueError(f"it is {found}")
        with unicode_path(path) as opened, safetensors.safe_open(opened, framework="pt") as file:
            yield file
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TinyLMError(
            f"{path} is damaged or not a safetensors file ({str(reason)[:200]}). If it was copied, copy it again; "
            "pickles are never opened."
        ) from error


def read_layout(files: Sequence[Path]) -> Layout:
    """The dtypes and shapes of the tensors in N files, of which file i has part i of N.

    Raises TinyLMError also if the files are not the N parts of the same tensors.
    """
    layouts = [_layout(file) for file in files]
    joined: Layout = {}
    for name, (dtype, shape) in layouts[0].items():
        rows = sum(sum(layout[name][1][:1]) for layout in layouts if name in layout)
        joined[name] = dtype, (rows, *shape[1:]) if shape else ()
    for index, (file, layout) in enumerate(zip(files, layouts, strict=True)):
        for name in joined.keys() | layout.keys():
            dtype, shape = joined.get(name, ("", ()))
            start, end = Shard(index, len(files)).bounds(shape[0] if shape else 0)
            if layout.get(name) != (dtype, (end - start, *shape[1:]) if shape else ()):
                raise TinyLMError(
                    f"{file} does not fit the other {len(files) - 1} files of this save: {name[:200]} has another "
                    "shape or dtype there. If it was copied, copy it again."
                )
    return joined


def _layout(path: Path) -> Layout:
    with open_tensors(path) as file:
        layout: Layout = {}
        names = file.keys()  # a safe_open object is not iterable
        for name in names:
            part = file.get_slice(name)
            dtype, shape = part.get_dtype(), tuple(part.get_shape())
            if dtype not in SAFETENSORS_DTYPES:
                raise ValueError(f"{name[:200]} is {dtype}, and weights are {', '.join(SAFETENSORS_DTYPES)}")
            if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:  # an empty tensor can have any other size
                raise ValueError(f"{name[:200]} has the shape {str(shape)[:100]}")
            layout[name] = dtype, shape
        return layout


def read_tensors(files: Sequence[Path], shard: Shard = WHOLE) -> dict[str, Tensor]:
    """Copies of the tensors in N files, of which file i has part i of N, by name.

    shard: the part that is read

    Raises TinyLMError also if the files are not the N parts of the same tensors, and if they need more than the free
    memory.
    """
    layout = read_layout(files)
    size, free = sum(file.stat().st_size for file in files) // shard.size, free_memory("cpu")
    if free is not None and size > free:
        raise TinyLMError(f"{files[0]} needs {size / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free.")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_tensors(file)) for file in files]
        return {name: _read(name, shape, opened, shard) for name, (_, shape) in layout.items()}


def _read(name: str, shape: tuple[int, ...], files: Sequence[Any], shard: Shard) -> Tensor:
    """A copy of the rows of `shard` of a tensor whose rows are distributed over `files`."""
    if not shape:
        return files[0].get_tensor(name).clone()
    start, end = shard.bounds(shape[0])
    found = []
    for index, file in enumerate(files):
        first, last = Shard(index, len(files)).bounds(shape[0])
        inside = (min(max(row, first), last) - first for row in (start, end))
        found.append(file.get_slice(name)[slice(*inside)])
    return torch.cat(found)
