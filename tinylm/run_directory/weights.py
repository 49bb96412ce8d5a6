"""Weights and other tensors as safetensors files, which are replaced atomically and verified by a digest when read.

All rows of a tensor are in one file, or the rows of each shard in a separate file (see `Shard`).

All functions that read raise TinyLMError for a file that is damaged, was not written by tinylm, has a dtype that is
not in DTYPES, or does not fit its configuration.
"""

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tinylm.config.run import RunConfig
from tinylm.config.validation import COUNT_FROM_0, non_defaults
from tinylm.errors import TinyLMError
from tinylm.machine.device import free_memory
from tinylm.run_directory.tensor_file import DTYPES, StoredTensor, TensorFile, open_file
from tinylm.system.files import parse_json, replacing
from tinylm.system.process_signals import interruptible


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
Layout = dict[str, tuple[torch.dtype | None, tuple[int, ...]]]  # dtype and shape by name


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Replace a safetensors file. Raises OSError and SafetensorError; the old file then stays intact."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as unfinished:
        interruptible(lambda: safetensors.torch.save_file(tensors, unfinished, metadata))


def _open(path: Path) -> TensorFile:
    with _reading(path):
        return open_file(path)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    remedy = "If it was copied, copy it again; pickles are never opened."
    try:
        yield
    except ValueError as error:
        raise TinyLMError(f"{error}. {remedy}") from error
    except FileNotFoundError as error:
        raise TinyLMError(f"{path} is missing. Copy the whole run directory.") from error
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)[:200]
        raise TinyLMError(f"{path} is damaged or not a safetensors file ({reason}). {remedy}") from error


def read_layout(files: Sequence[Path]) -> Layout:
    """The dtypes and shapes of the tensors. files: the files of all shards, in order.

    Raises TinyLMError also if the files are not the shards of the same tensors.
    """
    return _join(files, [_open(file).tensors for file in files])


def _join(files: Sequence[Path], opened: Sequence[Mapping[str, StoredTensor]]) -> Layout:
    layouts: list[Layout] = [{name: (part.dtype, part.shape) for name, part in parts.items()} for parts in opened]
    joined: Layout = {}
    for name, (dtype, shape) in layouts[0].items():
        rows = sum(sum(layout[name][1][:1]) for layout in layouts if name in layout)
        joined[name] = dtype, (rows, *shape[1:]) if shape else ()
    for index, (file, layout) in enumerate(zip(files, layouts, strict=True)):
        for name in joined.keys() | layout.keys():
            dtype, shape = joined.get(name, (None, ()))
            start, end = Shard(index, len(files)).bounds(shape[0] if shape else 0)
            if layout.get(name) != (dtype, (end - start, *shape[1:]) if shape else ()):
                raise TinyLMError(
                    f"{file} does not fit the other {len(files) - 1} files of this save: {name[:200]} has another "
                    "shape or dtype there. If it was copied, copy it again."
                )
    return joined


def read_tensors(
    files: Sequence[Path], shard: Shard = WHOLE, free_memory: Callable[[str], int | None] = free_memory
) -> dict[str, Tensor]:
    """Copies of the tensors by name.

    files: the files of all shards, in order. shard: the part that is read, whatever the number of files.
    free_memory: returns the free bytes of a device

    Raises TinyLMError also if the files are not the shards of the same tensors, and if they need more than the free
    memory.
    """
    opened = [_open(file).tensors for file in files]
    layout = _join(files, opened)
    size, free = sum(file.stat().st_size for file in files) // shard.size, free_memory("cpu")
    if free is not None and size > free:
        raise TinyLMError(f"{files[0]} needs {size / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free.")
    with _reading(files[0]):
        return {name: _read(shape, [tensors[name] for tensors in opened], shard) for name, (_, shape) in layout.items()}


def _read(shape: tuple[int, ...], parts: Sequence[StoredTensor], shard: Shard) -> Tensor:
    """A copy of the rows of `shard` of a tensor of this shape, whose rows are distributed over `parts`."""
    if not shape:
        return parts[0].load().clone()
    start, end = shard.bounds(shape[0])
    found = []
    for index, part in enumerate(parts):
        first, last = Shard(index, len(parts)).bounds(shape[0])
        inside = (min(max(row, first), last) - first for row in (start, end))
        found.append(part.rows(*inside))
    return torch.cat(found)


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

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the tensors by name."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of these weights, as the function `digest` computes it. Computed at first use."""
        return digest(self.tensors, self.config, self.step, self.val_loss)


@dataclass(frozen=True)
class WeightsHeader:
    """The metadata of a weights file."""

    step: int
    val_loss: float | None
    digest: str


def read_header(file: Path) -> WeightsHeader:
    """Read the header of a weights file, without its tensors."""
    return _header(file, _open(file).metadata)


def _header(file: Path, metadata: Mapping[str, str]) -> WeightsHeader:
    try:
        step, val_loss = int(metadata["step"]), parse_json(metadata["val_loss"])
        if not COUNT_FROM_0.contains(step):
            raise ValueError(f"its step is {str(step)[:40]}")
        if val_loss is not None and (type(val_loss) not in (int, float) or not math.isfinite(val_loss)):
            raise ValueError(f"its validation loss is {str(val_loss)[:40]}")
        return WeightsHeader(step, val_loss, metadata["digest"])
    except KeyError as error:
        raise TinyLMError(f"{file} was not written by tinylm: it has no {error}.") from error
    except (ValueError, OverflowError) as error:
        raise TinyLMError(f"{file} is damaged ({str(error)[:200]}). If it was copied, copy it again.") from error


def read_weights_files(files: Sequence[Path], config: RunConfig) -> Weights:
    """All tensors of the weights, verified by their digests. files: the files of all shards, in order.

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
    opened = _open(file)
    header = _header(file, opened.metadata)
    with _reading(file):
        mapped = {name: tensor.load() for name, tensor in opened.tensors.items()}
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
        dtype = tensor.dtype if any_float and tensor.dtype in DTYPES.values() else expected[name].dtype
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
