"""Reading and verifying a run, which may be damaged or made by an attacker, and the weights that a run trains.

The functions raise UsageError for a path that is not a run, and TinyLMError for a file of a run that is damaged, does
not belong to the other files, or has the format of another version.
"""

import hashlib
import importlib
import json
import math
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tinylm.config.run import ADAPTER_KINDS, LAST, TRAINED_SECONDS, AdapterConfig, RunConfig, run_of
from tinylm.config.validation import COUNT_FROM_0
from tinylm.errors import AdapterNotModelError, NoRunError, TinyLMError, UsageError
from tinylm.run_directory.layout import ADAPTER_FILE, MODEL_FILE, PEFT_WEIGHTS, weights_file
from tinylm.run_directory.lock_and_commit import recover_run
from tinylm.run_directory.weights import Weights, read_header, read_layout, read_weights_files, require_tensors
from tinylm.system.files import check_folder, describe_placeholder, read_json, read_start, resolve_links
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import build_empty_model

MAX_SHARDS = 4096
MAX_CONFIG_BYTES, MAX_STATE_BYTES = 1 << 24, 1 << 22  # a config.json may list many corpus files
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


def read_config(path: Path) -> RunConfig:
    """The configuration of the run at `path`, or of the run whose `last/` is at `path`.

    Recovers an interrupted replacement of the run first.
    """
    recover_run(path)
    if not path.exists():
        raise NoRunError(f"There is no run at {path}.")
    if path.is_file():
        if found := describe_placeholder(read_start(resolve_links(path))):
            raise UsageError(f"{path} is {found}.")
        if path.suffix == ".gguf":
            raise UsageError(f"{path} is a GGUF file, and only a run directory of tinylm can be used here.")
        raise UsageError(
            f"{path} is a file, and a model is a run directory. Pickled checkpoints are never opened, since opening "
            "one can execute its author's code."
        )
    run = run_of(path)
    file = run / "config.json"
    try:
        if run != path:
            check_folder(path)
        values = read_json(file, MAX_CONFIG_BYTES)
        recorded = values.pop("digest", None) if isinstance(values, dict) else None
        config = RunConfig.from_json(values)
        if recorded != config_digest(values):
            raise TinyLMError("it has changed since it was saved; copy the run again")
        return config if run == path else config.while_training
    except FileNotFoundError:
        raise NoRunError(f"{path} is not a run directory: it has no config.json.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TinyLMError(f"{file} is damaged ({reason}). If it was copied, copy it again.") from error
    except TinyLMError as error:
        raise TinyLMError(f"Cannot use {file}: {error}.") from error


def read_model_config(path: Path) -> RunConfig:
    """The configuration of the model whose weights are at `path`: that of `read_config` or, of a run that has not
    joined its generations, that of one of them.
    """
    config, file = read_config(path), path / MODEL_FILE
    if config.training is None or config.training.join == 1 or not file.exists():
        return config
    _, shape = read_layout([file]).get("embedding.weight", (None, ()))
    return config if shape[-1:] == (config.model.width,) else config.while_training


def config_digest(values: dict[str, Any]) -> str:
    """SHA-256, in hexadecimal, of the values of config.json without its `digest`."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_tokenizer(path: Path, config: RunConfig) -> Tokenizer:
    """The tokenizer of a run, verified by its digest in the configuration."""
    file = run_of(path) / "tokenizer.json"
    if not file.exists():
        raise TinyLMError(f"{path} has no tokenizer.json; copy the whole run directory.")
    tokenizer = Tokenizer.load(file, config.tokenizer.special)
    # The embedding of an imported model may have rows beyond the vocabulary, which pad its size.
    fits = operator.le if config.family else operator.eq
    if tokenizer.sha256 != config.tokenizer.sha256 or not fits(tokenizer.vocab_size, config.model.vocab_size):
        raise TinyLMError(f"{file} is not the tokenizer that these weights were trained with; restore the run's own.")
    return tokenizer


def read_weights(path: Path, config: RunConfig) -> Weights:
    """The weights of a run, verified by their digest; see `read_weights_files`. Of its `last/`, the last weights."""
    file = path / weights_file(config)
    if not file.exists() and (shards := _shards(path, config)):
        return read_weights_files(shards, config)
    if not file.exists():
        if file.name == ADAPTER_FILE and (path / PEFT_WEIGHTS).exists():
            raise TinyLMError(
                f"{path} has no {ADAPTER_FILE}. Copy the whole run directory; if an older tinylm wrote the adapter, "
                "fine-tune the base again."
            )
        pickles = [entry.name for entry in path.iterdir() if entry.suffix in PICKLE_SUFFIXES]
        hint = f"; {pickles[0]} is not opened, since a pickle can execute its author's code" if pickles else ""
        raise TinyLMError(f"{path} has no {file.name}{hint}. Copy the whole run directory.")
    return read_weights_files([file], config)


def _shards(path: Path, config: RunConfig) -> list[Path]:
    """The shard files of the weights in a sharded `last/`; [] otherwise."""
    is_last = run_of(path) != path
    stem, _, suffix = weights_file(config).rpartition(".")
    return sorted(path.glob(f"{stem}-*-of-*.{suffix}"))[:MAX_SHARDS] if is_last else []


class LoadedModel(NamedTuple):
    """A model in evaluation mode, with its configuration, its tokenizer and the weights that were read."""

    network: Transformer
    config: RunConfig
    tokenizer: Tokenizer
    weights: Weights

    @property
    def digest(self) -> str:
        """The digest by which an adapter that is trained on the model records it: of the weights or, if these were
        recovered by undoing a merge, of those before the merge.
        """
        return self.config.recovered_digest or self.weights.digest


def load_model(path: Path, device: str = "cpu") -> LoadedModel:
    """The model of a run with its best weights. Raises AdapterNotModelError for the run of an adapter."""
    config = read_model_config(path)
    if config.adapter is not None:
        raise AdapterNotModelError(path, config.adapter.kind)
    tokenizer = read_tokenizer(path, config)
    weights = read_weights(path, config)
    network = restore_model(config, weights.tensors, path).to(device).eval()
    return LoadedModel(network, config, tokenizer, weights)


def restore_model(config: RunConfig, tensors: dict[str, Tensor], source: Path) -> Transformer:
    """A model with the given weights, which are not copied.

    source: path of the weights, for error messages. Raises TinyLMError if the weights do not fit the configuration or
        are not finite.
    """
    model = build_empty_model(config.model)
    require_tensors(tensors, model.state_dict(), source, any_float=config.family is not None)
    model.load_state_dict(tensors, assign=True)
    return model


def summarise(path: Path) -> dict[str, Any]:
    """The entry of a run in a list of runs, made without reading the tensors.

    kind: model or adapter. parameters: number of parameters. step, best_step: of the last save and of these weights,
    which are the best of the run, or the last ones (of its `last/`, or if its validation data are few).
    val_loss, val_bits_per_byte: of these weights, in nats per token and in bits per byte; `None` if not recorded.
    saved: modification time of the file of these weights (Unix time). seconds: of training until the last save;
    `None` if not recorded.
    """
    config = read_config(path)
    files = _shards(path, config) or [path / weights_file(config)]
    header, last = read_header(files[0]), run_of(path) / LAST
    # A LoRA B that the layers of one name and shape share is stored for each of them, and counts once.
    shares_b = config.adapter is not None and config.adapter.share_b
    counts = {
        (name.split(".")[-3], shape) if shares_b and ".lora_B." in name else name: math.prod(shape)
        for name, (_, shape) in read_layout(files).items()
    }
    step, seconds = header.step, None
    try:
        if os.path.lexists(last):
            check_folder(last)
            state = read_json(last / "state.json", MAX_STATE_BYTES)
            step, seconds = state["step"], state.get("seconds")
            if type(step) is not int or not COUNT_FROM_0.contains(step):
                raise ValueError(f"its step is {str(step)[:40]}")
            if seconds is not None and (type(seconds) is not float or not TRAINED_SECONDS.contains(seconds)):
                raise ValueError(f"its seconds are {str(seconds)[:40]}")
        saved = files[0].stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TinyLMError(f"{last} is damaged ({error}). If it was copied, copy it again.") from error
    return {
        "kind": "model" if config.adapter is None else "adapter",
        "parameters": sum(counts.values()),
        "step": step,
        "best_step": header.step,
        "val_loss": header.val_loss,
        "val_bits_per_byte": config.bits_per_byte(header.val_loss),
        "saved": saved,
        "seconds": seconds,
    }


class TrainedWeights:
    """The weights that a run trains and saves. The methods here are those for all weights of a model."""

    def add(self, model: Transformer, seed: int = 0) -> None:
        """Add what is trained to the model, in place, and freeze the rest. Its outputs do not change yet."""

    def tensors(self, model: Transformer) -> dict[str, Tensor]:
        """The tensors that are saved, by name."""
        return dict(model.state_dict())

    def restore(self, run: Path, config: RunConfig, tensors: dict[str, Tensor], base: Path | None) -> Transformer:
        """The model of a run with these tensors, on the CPU. base: the frozen model that an adapter was trained on

        Raises TinyLMError if the tensors do not fit, and UsageError for a base that is missing or another one.
        """
        return restore_model(config, tensors, run)

    @contextmanager
    def disabled(self, model: Transformer) -> Iterator[None]:
        """Context manager in which the layers that were added to the model have no effect."""
        yield

    def write_copy(self, folder: Path, config: RunConfig, tensors: dict[str, Tensor]) -> None:
        """Write the saved tensors again in the format of another tool, if there is one for them. Raises OSError."""


def trained_weights(adapter: AdapterConfig | None) -> TrainedWeights:
    """What is trained by a run with this adapter, or without one."""
    return TrainedWeights() if adapter is None else adapter_kind(adapter.kind)(adapter)


def adapter_kind(kind: str) -> Any:
    """The subclass of TrainedWeights of a kind of adapter, with its `configure`, whose code is imported now."""
    module, name = ADAPTER_KINDS[kind].split(":")
    return getattr(importlib.import_module(module), name)
