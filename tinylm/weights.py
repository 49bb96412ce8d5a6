"""Tensors and texts on disk: in place as a whole or not at all, and verified to the bit when read."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tinylm.config import RunConfig
from tinylm.errors import TinyLMError
from tinylm.records import chosen


@dataclass(frozen=True)
class Weights:
    """Verified tensors with the step and validation loss they were saved at."""

    tensors: dict[str, Tensor]
    step: int
    val_loss: float | None
    digest: str


def read_weights_file(file: Path, config: RunConfig) -> Weights:
    tensors, metadata = read_tensors(file)
    try:
        step, val_loss = int(metadata["step"]), json.loads(metadata["val_loss"])
        recorded = metadata["digest"]
    except (KeyError, ValueError) as error:
        raise TinyLMError(f"{file} was not written by tinylm: it carries no digest.") from error
    if digest(tensors, config, step, val_loss) != recorded:
        raise TinyLMError(
            f"{file} is damaged, or belongs to another config.json: its content does not match its digest. "
            "Copy the run again."
        )
    return Weights(tensors, step, val_loss, recorded)


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
    with _replacing(path) as unfinished:
        safetensors.torch.save_file(tensors, unfinished, metadata)


def write_text(path: Path, text: str) -> None:
    with _replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write instead of `path`, which takes its place when it is complete and on the disk."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        yield unfinished
        unfinished.chmod(path.parent.stat().st_mode & 0o666)  # safetensors would keep it to its owner
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise TinyLMError(
            f"{path} is damaged or not a safetensors file ({error}). Copy the run again; pickles are never opened."
        ) from error


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_folder(path: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
