"""Tensors and texts on disk: in place as a whole or not at all, and verified to the bit when read."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tinylm.config import RunConfig
from tinylm.device import free_memory
from tinylm.errors import TinyLMError
from tinylm.files import check_regular, parse_json, replacing
from tinylm.records import chosen


@dataclass(frozen=True)
class Weights:
    """Verified tensors with the step and validation loss they were saved at."""

    tensors: dict[str, Tensor]
    step: int
    val_loss: float | None
    digest: str


@dataclass(frozen=True)
class Header:
    """What a weights file says of itself: the shape of each tensor, and the step, loss and digest it was saved with."""

    shapes: dict[str, tuple[int, ...]]
    step: int
    val_loss: float | None
    digest: str


LARGEST_STEP = 1 << 53
DTYPES = ("F32", "F16", "BF16")  # safetensors' names for what a run is saved in


def read_header(file: Path) -> Header:
    """Read the header alone. Raises TinyLMError for a file that is damaged or not a weights file of tinylm."""
    try:
        check_regular(file)
        with safetensors.safe_open(file, framework="pt") as tensors:
            names = tensors.keys()  # the file itself cannot be iterated over
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
            metadata = tensors.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(file, error) from error
    return Header(shapes, *_identity(file, metadata))


def _identity(file: Path, metadata: dict[str, str]) -> tuple[int, float | None, str]:
    """The step, validation loss and digest in a file's metadata."""
    try:
        step, val_loss = int(metadata["step"]), parse_json(metadata["val_loss"])
        if not 0 <= step < LARGEST_STEP:
            raise ValueError(f"its step is {str(step)[:40]}")
        if val_loss is not None and (type(val_loss) not in (int, float) or not math.isfinite(val_loss)):
            raise ValueError(f"its validation loss is {str(val_loss)[:40]}")
        return step, val_loss, metadata["digest"]
    except KeyError as error:
        raise TinyLMError(f"{file} was not written by tinylm: it has no {error}.") from error
    except (ValueError, OverflowError) as error:
        raise TinyLMError(f"{file} is damaged ({str(error)[:200]}). Copy the run again.") from error


def read_weights_file(file: Path, config: RunConfig) -> Weights:
    """All tensors of a weights file, with every bit checked. Raises TinyLMError when any of it is not as it was saved.

    The digest proves that the file is whole and belongs to its configuration, not who made it.
    """
    tensors, metadata = read_tensors(file)
    step, val_loss, recorded = _identity(file, metadata)
    if digest(tensors, config, step, val_loss) != recorded:
        raise TinyLMError(
            f"{file} is damaged, or belongs to another config.json: its content does not match its digest. "
            "Copy the run again."
        )
    return Weights(tensors, step, val_loss, recorded)


def require_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: Path) -> None:
    """Raises TinyLMError unless there is a tensor of each expected name with its shape and number format, no other
    tensor, and every value is finite.
    """
    for kind, names in (("lacks", expected.keys() - found.keys()), ("has the unknown", found.keys() - expected.keys())):
        if names:
            raise TinyLMError(f"{where} does not fit its config.json: it {kind} tensor {min(names)[:200]}.")
    for name, tensor in found.items():
        shape, dtype = tuple(expected[name].shape), expected[name].dtype
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise TinyLMError(
                f"{where} does not fit its config.json: {name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} "
                f"{shape}."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise TinyLMError(f"{where} cannot be used: {name} has values that are not finite numbers.")


def digest(tensors: dict[str, Tensor], config: RunConfig, step: int, val_loss: float | None) -> str:
    """SHA-256 over the tensors, their names and shapes, and what they need to mean anything: model and tokenizer."""
    adapter = None if config.adapter is None else chosen(config.adapter)
    identity = [chosen(config.model), config.tokenizer.sha256, adapter, step, val_loss]
    result = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        result.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


def write_weights(path: Path, tensors: dict[str, Tensor], config: RunConfig, step: int, val_loss: float | None) -> None:
    metadata = {
        "format": "pt",
        "step": str(step),
        "val_loss": json.dumps(val_loss),
        "digest": digest(tensors, config, step, val_loss),
    }
    write_tensors(path, tensors, metadata)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as unfinished:
        safetensors.torch.save_file(tensors, unfinished, metadata)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of a safetensors file, by name, and its metadata.

    Raises TinyLMError for a damaged file, and for one that needs more memory than is free.
    """
    try:
        size, free = check_regular(path).st_size, free_memory("cpu")
        if free is not None and size > free:
            raise TinyLMError(f"{path} needs {size / 2**30:.1f} GB of memory, and {free / 2**30:.1f} GB are free.")
        with safetensors.safe_open(path, framework="pt") as file:
            names = file.keys()  # the file itself cannot be iterated over
            for name in names:
                if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                    raise ValueError(f"{name[:200]} is {dtype}, and weights are {', '.join(DTYPES)}")
            return {name: file.get_tensor(name).clone() for name in names}, file.metadata() or {}
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> TinyLMError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return TinyLMError(
        f"{path} is damaged or not a safetensors file ({str(reason)[:200]}). Copy the run again; pickles are never "
        "opened."
    )


def flush_folder(path: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
