"""A run folder on disk: written so that a kill or a full disk leaves the last complete save, and verified when read.

    config.json  tokenizer.json  metrics.jsonl
    model.safetensors          the best weights by validation loss (an adapter's: adapter_model.safetensors)
    last/                      weights, optimizer.safetensors, state.json, and manifest.json with the hash of each

JSON and safetensors only: reading a folder runs no code of its author's.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from tinylm.config import RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.files import check_folder, hash_file, open_append, open_regular, parse_json, read_json, remove_tree
from tinylm.model.build import build_empty_model
from tinylm.model.stack import Transformer
from tinylm.place import (
    ADAPTER_FILE,
    MODEL_FILE,
    hidden,
    preparation_folder,
    recover_last,
    recover_run,
    refuse_strangers,
    remove_run,
    remove_unfinished,
    resume_command,
)
from tinylm.text.tokenizer import Tokenizer
from tinylm.weights import (
    LARGEST_STEP,
    Weights,
    flush_folder,
    read_header,
    read_tensors,
    read_weights_file,
    require_tensors,
    write_tensors,
    write_text,
    write_weights,
)

CONFIG_BYTES, STATE_BYTES, MANIFEST_BYTES = 1 << 24, 1 << 22, 1 << 16  # a configuration may list many files


@dataclass(frozen=True)
class LastSave:
    """The state a run can be resumed from."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


class RunFolder:
    """One run on disk. A new run is prepared under a hidden name and appears at its path with its first save."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._home = path

    @classmethod
    def create(
        cls, path: Path, config: RunConfig, tokenizer: Tokenizer, adapter_config: dict[str, Any] | None = None
    ) -> "RunFolder":
        """Prepare a new run. Whatever is at `path` stays until the first save (see `check_free`).

        `adapter_config` is what PEFT wants to know of an adapter.
        """
        run = cls(path)
        run._home = preparation_folder(path)
        with run._saving():
            run._home.mkdir(parents=True, exist_ok=True)
            check_folder(run._home)
            write_text(run._home / "tokenizer.json", tokenizer.to_str())
            run.write_config(config)
            if adapter_config is not None:
                write_text(run._home / "adapter_config.json", json.dumps(adapter_config, indent=2) + "\n")
        return run

    def write_config(self, config: RunConfig) -> None:
        values = config.to_json()
        with self._saving():
            write_text(
                self._home / "config.json", json.dumps({**values, "digest": _config_digest(values)}, indent=2) + "\n"
            )

    def save_best(self, tensors: dict[str, Tensor], config: RunConfig, step: int, val_loss: float | None) -> None:
        """Replace the weights that `sample` and `eval` read."""
        with self._saving():
            write_weights(self._home / weights_file(config), tensors, config, step, val_loss)

    def save_last(
        self, tensors: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any], config: RunConfig
    ) -> None:
        """Replace `last/` as one unit: written whole beside the old one, flushed, then swapped."""
        new, old, last = (self._home / name for name in ("last.new", "last.old", "last"))
        with self._saving():
            recover_last(self._home)
            remove_tree(new)
            remove_tree(old)
            try:
                new.mkdir()
                write_weights(new / weights_file(config), tensors, config, state["step"], state["val_loss"])
                # Without metadata, safetensors cannot read back a file without tensors, as it is before the first step.
                write_tensors(new / "optimizer.safetensors", optimizer, {"format": "pt"})
                write_text(new / "state.json", json.dumps(state))
                manifest = {file.name: hash_file(file) for file in sorted(new.iterdir())}
                write_text(new / "manifest.json", json.dumps(manifest))
                flush_folder(new)
            except BaseException:
                remove_tree(new)
                raise
            if last.exists():
                last.rename(old)
            new.rename(last)
            flush_folder(self._home)
            remove_tree(old)
            self.publish()

    def publish(self) -> None:
        """Let a prepared run appear at its path, in the place of one that may be given up there."""
        if self._home == self.path:
            return
        replaced = hidden(self.path, "old")
        if self.path.exists() and any(self.path.iterdir()):
            refuse_strangers(self.path)
            self.path.rename(replaced)
        self._home.rename(self.path)
        self._home = self.path
        with contextlib.suppress(
            OSError
        ):  # the run is in its place; only a loss of power could still undo the renaming
            flush_folder(self.path.parent)
        if replaced.exists():
            with contextlib.suppress(OSError):  # the new run is in place; the next --force deletes what is left
                remove_run(replaced)

    def load_last(self, config: RunConfig) -> LastSave:
        """Raises TinyLMError when there is nothing to resume from, or it is damaged."""
        last = recover_last(self.path)
        if not last.is_dir():
            raise TinyLMError(
                f"{self.path} has no last/ folder, so it cannot be resumed; its best weights still sample, and tinylm "
                f"train --init-from {self.path} goes on from those."
            )
        try:
            check_folder(last)
            manifest = read_json(last / "manifest.json", MANIFEST_BYTES)
            for name in (weights_file(config), "optimizer.safetensors", "state.json"):
                if hash_file(last / name) != manifest[name]:
                    raise ValueError(f"{name} has changed since it was saved")
            state = read_json(last / "state.json", STATE_BYTES)
            if not isinstance(state, dict) or type(state["step"]) is not int:
                raise ValueError("state.json names no step")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TinyLMError(
                f"{last} is damaged ({error}), so the run cannot be resumed; its best weights still sample, and "
                f"tinylm train --init-from {self.path} goes on from those."
            ) from error
        remove_unfinished(self.path)
        weights = read_weights_file(last / weights_file(config), config)
        optimizer, _ = read_tensors(last / "optimizer.safetensors")
        return LastSave(weights.tensors, optimizer, state)

    def append_metrics(self, record: dict[str, Any]) -> None:
        with self._saving(), open_append(self._home / "metrics.jsonl") as file:
            file.write(json.dumps(record).encode() + b"\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The logged records; a line that a kill cut short, or that is damaged, is left out."""
        return list(_read_metrics(self.path / "metrics.jsonl"))

    def read_curve(self) -> list[dict[str, Any]]:
        """The records of evaluations alone."""
        return [record for record in _read_metrics(self.path / "metrics.jsonl") if record.get("val_loss") is not None]

    def cut_metrics(self, step: int) -> None:
        """Drop what was logged after a step, which a resumed run will log again."""
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        with self._saving():
            write_text(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except (OSError, safetensors.SafetensorError) as error:
            if self._home == self.path and not self.path.exists():
                raise TinyLMError(
                    f"{self.path} was deleted or moved during training, with all that was saved in it; if it was "
                    "moved, go on from where it is now with --resume."
                ) from error
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            next_step = "free some space, or choose another --out"
            if self._home == self.path:  # there is a save to go on from
                next_step = f"free some space, and go on with: {resume_command(self.path)}"
            raise TinyLMError(
                f"Cannot save to {self.path}: {reason}. What was saved there before is intact; {next_step}."
            ) from error

    @property
    def tokens(self) -> Path:
        """Where a run keeps its own encoded text, when it was read from standard input."""
        return self._home / "tokens"


METRICS_LINES, METRICS_LINE_BYTES = 1 << 21, 1 << 16
LARGEST_LOSS = 1e300


def _read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records whose numbers are numbers. Raises TinyLMError for what is no file of metrics at all."""
    try:
        with open_regular(path) as file:
            for _ in range(METRICS_LINES):
                if not (line := file.readline(METRICS_LINE_BYTES)):
                    return
                with contextlib.suppress(ValueError):
                    record = parse_json(line.decode("utf-8", "replace"))
                    if isinstance(record, dict) and _is_step(record.get("step")) and _is_loss(record.get("val_loss")):
                        yield record
    except FileNotFoundError:
        return
    except OSError as error:
        raise TinyLMError(f"{path} is damaged ({error}); delete it, which loses the run's curve alone.") from error
    raise TinyLMError(f"{path} has more than {METRICS_LINES} lines; delete it, which loses the run's curve alone.")


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST_STEP


def _is_loss(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < LARGEST_LOSS)


def weights_file(config: RunConfig) -> str:
    return MODEL_FILE if config.adapter is None else ADAPTER_FILE


def read_config(path: Path) -> RunConfig:
    """Raises TinyLMError, or UsageError for a path that is no run folder, saying what is missing and what to do."""
    recover_run(path)
    if not path.exists():
        raise UsageError(f"There is no run at {path}; tinylm runs lists what there is.")
    if path.is_file():
        raise UsageError(
            f"{path} is a file, and a model is a run folder; pickled checkpoints are never opened, since "
            "opening one can run its author's code."
        )
    try:
        values = read_json(path / "config.json", CONFIG_BYTES)
        recorded = values.pop("digest", None) if isinstance(values, dict) else None
        config = RunConfig.from_json(values)
        if recorded != _config_digest(values):
            raise TinyLMError("it has changed since it was saved; copy the run again")
        return config
    except FileNotFoundError:
        raise UsageError(
            f"{path} is not a run folder: it has no config.json; tinylm runs lists what there is."
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TinyLMError(f"{path / 'config.json'} is damaged ({reason}). Copy the run again.") from error
    except TinyLMError as error:
        raise TinyLMError(f"Cannot use {path / 'config.json'}: {error}.") from error


def _config_digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_tokenizer(path: Path, config: RunConfig) -> Tokenizer:
    """The run's tokenizer, checked to be the one its weights were trained with."""
    file = path / "tokenizer.json"
    if not file.exists():
        raise TinyLMError(f"{path} has no tokenizer.json; copy the whole folder of the run.")
    tokenizer = Tokenizer.load(file)
    if tokenizer.sha256 != config.tokenizer.sha256 or tokenizer.vocab_size != config.model.vocab_size:
        raise TinyLMError(f"{file} is not the tokenizer that these weights were trained with; restore the run's own.")
    return tokenizer


def read_weights(path: Path, config: RunConfig) -> Weights:
    """The best weights of a run, with every bit checked. Raises TinyLMError when any of it is not as it was saved."""
    file = path / weights_file(config)
    if not file.exists():
        pickles = [entry.name for entry in path.iterdir() if entry.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl")]
        hint = f"; {pickles[0]} is not opened, since a pickle can run its author's code" if pickles else ""
        raise TinyLMError(f"{path} has no {file.name}{hint}. Copy the whole folder of the run.")
    return read_weights_file(file, config)


def load_model(path: Path, device: str = "cpu") -> tuple[Transformer, RunConfig, Tokenizer, Weights]:
    """A run's model with its best weights, in evaluation mode. Raises as the readers above do."""
    config = read_config(path)
    if config.adapter is not None:
        raise UsageError(
            f"{path} is an adapter, not a model; give its base as --model and this as --adapter, or merge them with "
            "tinylm merge-lora."
        )
    tokenizer = read_tokenizer(path, config)
    weights = read_weights(path, config)
    return restore_model(config, weights.tensors, path).to(device).eval(), config, tokenizer, weights


def restore_model(config: RunConfig, tensors: dict[str, Tensor], where: Path) -> Transformer:
    """A model with these weights, without first drawing random ones. Raises TinyLMError when they do not fit it."""
    model = build_empty_model(config.model)
    require_tensors(tensors, model.state_dict(), where)
    model.load_state_dict(tensors, assign=True)
    return model


def summarise(path: Path) -> dict[str, Any]:
    """What a list of runs shows, without reading the weights. Raises as `read_config` does, and for damaged files."""
    config = read_config(path)
    file = path / weights_file(config)
    header = read_header(file)
    step = header.step
    try:
        if os.path.lexists(path / "last"):
            check_folder(path / "last")
            step = read_json(path / "last" / "state.json", STATE_BYTES)["step"]
            if type(step) is not int or not 0 <= step < LARGEST_STEP:
                raise ValueError(f"its step is {str(step)[:40]}")
        saved = file.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TinyLMError(f"{path / 'last'} is damaged ({error}). Copy the run again.") from error
    return {
        "kind": "model" if config.adapter is None else "adapter",
        "parameters": _count(header.shapes, shared_b=config.adapter is not None and config.adapter.share_b),
        "step": step,
        "best_step": header.step,
        "val_loss": header.val_loss,
        "saved": saved,
    }


def _count(shapes: dict[str, tuple[int, ...]], shared_b: bool) -> int:
    """Numbers in the tensors of a file, in which a B that several matrices of a name and size share stands for each."""
    different = {
        (name.split(".")[-3], shape) if shared_b and ".lora_B." in name else name: math.prod(shape)
        for name, shape in shapes.items()
    }
    return sum(different.values())
