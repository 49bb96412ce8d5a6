"""Weights as safetensors files, which are replaced atomically and verified by a digest when they are read.

All functions that read raise TinyLMError for a file that is damaged, was not written by tinylm, or does not fit its
configuration.
"""

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinylm.config.run import RunConfig
from tinylm.config.serialization import non_defaults
from tinylm.config.validation import COUNT_FROM_0
from tinylm.errors import TinyLMError
from tinylm.run_directory.tensor_files import open_tensors, read_tensors, write_tensors
from tinylm.system.files import parse_json


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights with the configuration that they belong to.

    tensors: tensors by name.
    step: the step of training at which they were saved.
    val_loss: the validation loss at that step, in nats per token; `None` if there was no evaluation.
    """

    tensors: dict[str, Tensor]
    config: RunConfig
    step: int = 0
    val_loss: float | None = None

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of these weights, as the function `digest` computes it. Computed at first use."""
        return digest(self.tensors, self.config, self.step, self.val_loss)


@dataclass(frozen=True)
class WeightsHeader:
    """The header of a weights file: the shapes of the tensors by name, and the metadata."""

    shapes: dict[str, tuple[int, ...]]
    step: int
    val_loss: float | None
    digest: str


FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def read_header(file: Path) -> WeightsHeader:
    """Read the header of a weights file, without its tensors."""
    with open_tensors(file) as opened:
        names = opened.keys()  # a safe_open object is not iterable
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        metadata = opened.metadata() or {}
    return WeightsHeader(shapes, *_read_metadata(file, metadata))


def _read_metadata(file: Path, metadata: dict[str, str]) -> tuple[int, float | None, str]:
    """The step, validation loss and digest in the metadata of a weights file. Step and loss are checked."""
    try:
        step, val_loss = int(metadata["step"]), parse_json(metadata["val_loss"])
        if not COUNT_FROM_0.contains(step):
            raise ValueError(f"its step is {str(step)[:40]}")
        if val_loss is not None and (type(val_loss) not in (int, float) or not math.isfinite(val_loss)):
            raise ValueError(f"its validation loss is {str(val_loss)[:40]}")
        return step, val_loss, metadata["digest"]
    except KeyError as error:
        raise TinyLMError(f"{file} was not written by tinylm: it has no {error}.") from error
    except (ValueError, OverflowError) as error:
        raise TinyLMError(f"{file} is damaged ({str(error)[:200]}). If it was copied, copy it again.") from error


def read_weights_files(files: Sequence[Path], config: RunConfig) -> Weights:
    """All tensors of the weights in N files, of which file i has part i of N, verified by their digests.

    The digest proves that the file is complete and belongs to `config`. It does not prove who wrote the file.
    """
    tensors, header = read_tensors(files), read_header(files[0])
    weights = Weights(tensors, config, header.step, header.val_loss)
    if len(files) == 1:
        _check_digest(weights, header, files[0])
    else:
        for file in files:
            check_weights_file(file, config)
    return weights


def check_weights_file(file: Path, config: RunConfig) -> None:
    """Verify the digest of a weights file as `read_weights_files` does, with its tensors memory-mapped, not copied."""
    header = read_header(file)
    with open_tensors(file) as opened:
        names = opened.keys()
        mapped = {name: opened.get_tensor(name) for name in names}
        _check_digest(Weights(mapped, config, header.step, header.val_loss), header, file)


def _check_digest(weights: Weights, header: WeightsHeader, file: Path) -> None:
    if weights.digest != header.digest:
        raise TinyLMError(
            f"{file} is damaged, or belongs to another config.json: its content does not match its digest. "
            "If it was copied, copy it again."
        )


def require_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: Path, *, any_float: bool = False
) -> None:
    """Raise TinyLMError unless `found` has the names, shapes and dtypes of `expected`, and only finite values.

    source: where the tensors come from, for the message. any_float: a tensor may be fp32, fp16 or bf16.
    """
    for kind, names in (("lacks", expected.keys() - found.keys()), ("has the unknown", found.keys() - expected.keys())):
        if names:
            raise TinyLMError(f"{source} does not fit its config.json: it {kind} tensor {min(names)[:200]}.")
    for name, tensor in found.items():
        shape = tuple(expected[name].shape)
        dtype = tensor.dtype if any_float and tensor.dtype in FLOAT_DTYPES else expected[name].dtype
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise TinyLMError(
                f"{source} does not fit its config.json: {name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} "
                f"{shape}."
            )
        if tensor.numel() and not is_finite(tensor):
            raise TinyLMError(f"{source} cannot be used: {name} has values that are not finite numbers.")


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor, which must not be empty, are finite.

    `torch.isfinite` takes 20 times as long, and more memory than the tensor has.
    """
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor.detach()))  # aminmax propagates NaN


def digest(tensors: dict[str, Tensor], config: RunConfig, step: int, val_loss: float | None) -> str:
    """SHA-256, in hexadecimal, of the tensors with their names, dtypes and shapes, and of the configurations of model
    and adapter, the tokenizer, the step and the validation loss.
    """
    adapter = None if config.adapter is None else non_defaults(config.adapter)
    identity = [non_defaults(config.model), config.tokenizer.sha256, adapter, step, val_loss]
    result = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        result.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


def write_weights(path: Path, tensors: dict[str, Tensor], config: RunConfig, step: int, val_loss: float | None) -> None:
    """Replace a weights file: tensors and, in its metadata, step, validation loss and digest.

    Raises OSError and SafetensorError; the old file then stays intact.
    """
    metadata = {
        "format": "pt",
        "step": str(step),
        "val_loss": json.dumps(val_loss),
        "digest": digest(tensors, config, step, val_loss),
    }
    write_tensors(path, tensors, metadata)
