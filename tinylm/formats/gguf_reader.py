"""Read GGUF files: first as a config and tensors with Hugging Face's names, then as a model of tinylm.

The file is untrusted; its header is checked before anything else is read (gguf_header.py).
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinylm.config.model import MAX_BLOCKS
from tinylm.errors import TinyLMError
from tinylm.formats.families import convert
from tinylm.formats.family import ForeignModel, rank_dtypes
from tinylm.formats.gguf_architectures import ARCHITECTURES, ROPE_FACTORS, Architecture, ConfigReader
from tinylm.formats.gguf_header import GGUFFile, Metadata, TensorInfo, parse_header
from tinylm.formats.gguf_tensors import Change
from tinylm.formats.gguf_tokenizer import read_tokenizer
from tinylm.run_directory.tensor_file import DTYPES
from tinylm.system.files import open_regular, resolve_links
from tinylm.text.tokenizer_file import short_repr

CHUNK = 1 << 22  # numbers that are dequantized at a time


def read_gguf(path: Path) -> ForeignModel:
    """Open the model in a GGUF file. Its tensors are mapped; quantized tensors become float32 when they are looked up.

    Raises TinyLMError for a file that is damaged, or whose architecture, tensor types, tokenizer or any other setting
    is not supported.
    """
    try:
        file = open_gguf(path)
        values, tensors = read_model(file)
        family, config, converted = convert(values, tensors, "metadata")
        tokenizer = read_tokenizer(file.metadata, values["model_type"], config.vocab_size)
    except OSError as error:
        raise TinyLMError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise TinyLMError(f"Cannot read {path} as GGUF: {error}.") from error
    dtypes = rank_dtypes((info.type.name, info.elements) for info in file.tensors.values())
    return ForeignModel(family, config, converted, tokenizer.text, tokenizer.special, tokenizer.chat_template, dtypes)


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


def read_model(file: GGUFFile) -> tuple[dict[str, Any], dict[str, "GGUFTensor"]]:
    """The fields of a Hugging Face config.json, and the tensors under Hugging Face's names.

    Raises ValueError for metadata that is missing or not supported, and for tensors that are unknown or do not fit.
    """
    metadata, infos, data = file
    metadata.require("general.type", "model")
    if metadata.integer("split.count", 0, low=0) > 1:
        raise ValueError("it is a part of a model; join the parts first, by llama-gguf-split")
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(f"its architecture is {short_repr(name)}; tinylm reads {', '.join(sorted(ARCHITECTURES))}")
    architecture = ARCHITECTURES[name]
    values = read_config(architecture, metadata, infos, lambda name: load_tensor(data, infos[name]))
    experts = values.get("num_experts", values.get("num_local_experts", 0))
    layers = values.get("num_hidden_layers", values.get("n_layer", 0))
    if layers > len(infos) or layers * experts > MAX_BLOCKS:
        of_experts = f" of {experts:,} experts" if experts else ""
        raise ValueError(f"it claims {layers:,} layers{of_experts} and has {len(infos):,} tensors")
    tensors: dict[str, GGUFTensor] = {}
    unknown = set(infos) - {ROPE_FACTORS}
    for place in architecture.places(layers, experts):
        if place.stored in infos:
            heads = values[place.change.heads] if place.change.heads else 0
            tensors[place.foreign] = GGUFTensor(data, infos[place.stored], place.change, heads, place.expert)
            tensors[place.foreign].check(experts)
            unknown.discard(place.stored)
    if unknown:
        raise ValueError(f"it has the tensor {short_repr(min(unknown))}, which its architecture does not have")
    return values, tensors


def read_config(
    architecture: Architecture, metadata: Metadata, tensors: Mapping[str, TensorInfo], load: Any
) -> dict[str, Any]:
    """The fields of a Hugging Face config.json. load: reads the tensor of a name in the file.

    Raises ValueError for metadata that is missing or not supported.
    """
    reader = ConfigReader(metadata, architecture.name, tensors, load)
    values = architecture.read_config(reader)
    reader.check_all_read()
    return values


class GGUFTensor:
    """A LazyTensor in a mapped file, with Hugging Face's layout.

    heads: argument of `change`; 0 if it needs none. expert: index in a tensor of all experts; `None` for other tensors.
    """

    def __init__(
        self, data: mmap.mmap | bytes, info: TensorInfo, change: Change, heads: int, expert: int | None
    ) -> None:
        self._data, self._info, self._change, self._heads, self._expert = data, info, change, heads, expert
        shape = info.shape if expert is None else info.shape[1:]
        self.shape = shape[::-1] if change.transposes else shape
        self.dtype = DTYPES.get(info.type.name, torch.float32)

    def check(self, experts: int) -> None:
        """Raise ValueError for a shape that `change` cannot convert, or that does not hold this number of experts."""
        name, shape = short_repr(self._info.name), self._info.shape
        if self._expert is not None and (len(shape) != 3 or shape[0] != experts):
            raise ValueError(f"its tensor {name} has the shape {list(shape)}; it must hold {experts} matrices")
        multiple = 3 * self._heads if self._change.fused else 2 * self._heads
        if self._heads and shape[0] % multiple:
            raise ValueError(f"its tensor {name} has {shape[0]} rows, which {self._heads} heads cannot share")

    def load(self) -> Tensor:
        """The tensor: a view of the mapped file if it is not quantized and its layout needs no copy."""
        return self._change.read(load_tensor(self._data, self._info, self._expert), self._heads)


def load_tensor(data: mmap.mmap | bytes, info: TensorInfo, index: int | None = None) -> Tensor:
    """A tensor in the layout of the file; with `index`, only that entry of its first dimension.

    Floating-point tensors are views of `data`; quantized tensors become float32.
    """
    shape, offset, size = info.shape, info.offset, info.size
    if index is not None:
        size //= shape[0]
        shape, offset = shape[1:], offset + index * size
    if info.type.name in DTYPES:
        dtype = DTYPES[info.type.name]
        return torch.frombuffer(data, dtype=dtype, count=size // dtype.itemsize, offset=offset).view(shape)
    row_size = shape[-1] // info.type.elements * info.type.size
    rows = np.frombuffer(data, dtype=np.uint8, count=size, offset=offset).reshape(-1, row_size)
    return _dequantize(rows, info).view(shape)


def _dequantize(rows: np.ndarray, info: TensorInfo) -> Tensor:
    """Dequantize rows (rows, bytes per row) to a float32 matrix (rows, numbers per row)."""
    import gguf  # takes a tenth of a second

    kind = gguf.GGMLQuantizationType[info.type.name]
    numbers = torch.empty(len(rows), info.shape[-1])
    step = max(1, CHUNK // info.shape[-1])
    with np.errstate(all="ignore"):  # a forged scale may be infinite; the weights are checked where they are used
        for start in range(0, len(rows), step):
            part = gguf.quants.dequantize(rows[start : start + step], kind)
            numbers[start : start + step] = torch.from_numpy(part)
    return numbers
