"""The reader of safetensors files, which may be damaged or made by an attacker: of runs and of other tools' models."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from tinylm.system.files import describe_placeholder, read_start, unicode_path

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as safetensors and GGUF name them
MAX_TENSORS = 1 << 20  # the largest model of ModelConfig has 2^17, and its optimizer four for each
MAX_ELEMENTS = 1 << 62


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open safetensors file. `dtype` is `None` if it is not one of `DTYPES`."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def load(self) -> Tensor:
        """The tensor: a private mapping of the file's bytes, which are read when they are used."""
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def rows(self, start: int, end: int) -> Tensor:
        """Some rows of the tensor, mapped as by `load`. Its dimension must not be 0."""
        tensor: Tensor = self.file.get_slice(self.name)[start:end]
        return tensor


@dataclass(frozen=True)
class TensorFile:
    """The tensors of a safetensors file by name, and its metadata."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def open_file(path: Path, *, any_dtype: bool = False) -> TensorFile:
    """Open a safetensors file and check its header; safetensors itself checks that the tensors fill the file.

    any_dtype: accept tensors with other dtypes than `DTYPES`, which must not be loaded

    Raises OSError for a file that cannot be opened, is irregular or a link, and ValueError for any other content.
    """
    try:
        if found := describe_placeholder(read_start(path)):
            raise ValueError(f"it is {found}")
        with unicode_path(path) as opened:
            file = safetensors.safe_open(opened, framework="pt")
        names = file.keys()
        if len(names) > MAX_TENSORS:
            raise ValueError(f"it has {len(names)} tensors; at most {MAX_TENSORS} are supported")
        tensors = {}
        for name in names:
            view = file.get_slice(name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if dtype not in DTYPES and not any_dtype:
                raise ValueError(f"{name[:200]} is {dtype}, and weights are {', '.join(DTYPES)}")
            if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:  # an empty tensor can have any other size
                raise ValueError(f"{name[:200]} has the shape {str(shape)[:100]}")
            tensors[name] = StoredTensor(file, name, shape, DTYPES.get(dtype))
        return TensorFile(tensors, file.metadata() or {})
    except (ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({str(error)[:200]})") from error
