"""The weights of a model folder in one safetensors file or several with an index, mapped without a copy, or written.

Functions that read raise OSError for a file that cannot be opened, and ValueError with a reason that completes a
sentence such as "Cannot import FOLDER: ". Links are followed only in the cache of huggingface_hub (see `inside`).
"""

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinylm.errors import TinyLMError
from tinylm.formats.family import rank_dtypes
from tinylm.run_directory.tensor_file import DTYPES, StoredTensor, open_file
from tinylm.system.files import is_link, parse_unicode_json, read_text, replacing, resolve_links

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin", "consolidated.00.pth")
_HEADER_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
MAX_SHARDS = 1024
MAX_CONFIG_BYTES = 1 << 24  # tokenizer_config.json of Gemma repeats its 6,000 added tokens
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")  # a file name without a folder
_ALIGNMENT = 8  # bytes; the header is padded to a multiple


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder, by name, from `model.safetensors` or from the shards that its index names."""
    if os.path.lexists(folder / WEIGHTS):
        return open_file(inside(folder, WEIGHTS), any_dtype=True).tensors
    if os.path.lexists(folder / INDEX):
        return _open_shards(folder)
    if any(os.path.lexists(folder / name) for name in PICKLES):
        raise ValueError(
            "its weights are pickles, which can run code and are never opened. Where you trust them, convert them by "
            'transformers: AutoModelForCausalLM.from_pretrained("FOLDER").save_pretrained("NEW_FOLDER")'
        )
    raise ValueError(f"it has neither {WEIGHTS} nor {INDEX}")


def read_object(folder: Path, name: str, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of the folder of at most `limit` bytes; an empty one if there is no such file."""
    if not os.path.lexists(folder / name):
        return {}
    try:
        value = parse_unicode_json(read_text(inside(folder, name), limit))
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def _open_shards(folder: Path) -> dict[str, StoredTensor]:
    index = parse_unicode_json(read_text(inside(folder, INDEX)))
    shard_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shard_of, dict) or not all(isinstance(name, str) for name in shard_of.values()):
        raise ValueError(f"{INDEX} has no weight_map of tensors to files")
    shards = sorted(set(shard_of.values()))
    if not 1 <= len(shards) <= MAX_SHARDS:
        raise ValueError(f"{INDEX} names {len(shards)} files; from 1 to {MAX_SHARDS} are supported")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        if not _SHARD.fullmatch(shard):
            raise ValueError(f"{INDEX} names {shard[:60]!r}, which is not the name of a safetensors file in the folder")
        found = open_file(inside(folder, shard), any_dtype=True).tensors
        for name in found:
            if shard_of.get(name) != shard:
                raise ValueError(f"{shard} has the tensor {name[:200]}, which {INDEX} does not place there")
        tensors |= found
    if missing := shard_of.keys() - tensors.keys():
        raise ValueError(f"{INDEX} names the tensor {min(missing)[:200]}, which is in none of its files")
    return tensors


def stored_dtypes(tensors: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """The dtype names of the tensors, by decreasing total number of elements; "another" for an unsupported dtype."""
    return rank_dtypes(
        (DTYPE_NAMES[tensor.dtype] if tensor.dtype else "another", math.prod(tensor.shape))
        for tensor in tensors.values()
    )


@contextlib.contextmanager
def reading(folder: Path, purpose: str) -> Iterator[None]:
    """Context manager that turns OSError and ValueError into TinyLMError("Cannot PURPOSE FOLDER: ...")."""
    try:
        yield
    except OSError as error:
        name = Path(str(error.filename)).name if error.filename else "a file"
        raise TinyLMError(f"Cannot {purpose} {folder}: {name} cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise TinyLMError(f"Cannot {purpose} {folder}: {error}.") from error


def inside(folder: Path, name: str) -> Path:
    """The path of a file in the folder. Raises ValueError for a link, except within the cache of huggingface_hub.

    In that cache, `models--OWNER--NAME/snapshots/REVISION/FILE` links to `models--OWNER--NAME/blobs/DIGEST`.
    """
    path = folder / name
    if not is_link(path):
        return path
    target, parent = resolve_links(path), resolve_links(folder).parent
    if parent.name == "snapshots" and target.parent == parent.parent / "blobs":
        return target
    raise ValueError(f"{name} is a link out of the folder, which is not followed")


def _bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor on the CPU, as bytes. Raises OSError on a big-endian machine."""
    if sys.byteorder != "little":
        raise OSError("safetensors files are written on little-endian machines only")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_file(
    path: Path, layout: Mapping[str, tuple[torch.dtype, Sequence[int]]], load: Callable[[str], Tensor]
) -> None:
    """Write or replace a safetensors file; only one tensor at a time is loaded, and converted to its dtype.

    layout: the dtype, one of `DTYPES`, and the shape of each tensor by name. load: returns the tensor of a name

    Raises OSError; the old file is then unchanged.
    """
    names = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))  # largest first: aligns all offsets
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = layout[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _HEADER_DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_bytes(load(name).to("cpu", layout[name][0])))
