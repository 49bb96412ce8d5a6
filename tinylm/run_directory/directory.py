"""Writing a run directory, and reading the state that a run is resumed from."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from tinylm.errors import NotResumableError, SaveError
from tinylm.files import check_folder, flush_folder, hash_file, read_json, remove_tree, write_text
from tinylm.run_config import RunConfig
from tinylm.run_directory import metrics_log
from tinylm.run_directory.commit import commit, recover_last, remove_unfinished
from tinylm.run_directory.layout import PEFT_FILE, staging_directory, weights_file
from tinylm.run_directory.loading import MAX_STATE_BYTES, config_digest
from tinylm.run_directory.weights import read_tensors, read_weights_file, write_tensors, write_weights
from tinylm.text.tokenizer import Tokenizer

MAX_MANIFEST_BYTES = 1 << 16


@dataclass(frozen=True)
class LastSave:
    """The content of `last/`, from which a run is resumed.

    weights, optimizer: tensors by name. state: the trainer's state, as JSON values.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


class RunDirectory:
    """A run that is being written, at its `path` or, until its first save, in a hidden directory beside it.

    Methods that write raise SaveError if they fail; the previous save stays intact.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._current = path  # where the files are now: `path` or the hidden directory

    @property
    def is_in_place(self) -> bool:
        """Whether the run is at its `path`, and no longer in the hidden directory."""
        return self._current == self.path

    @classmethod
    def create(
        cls, path: Path, config: RunConfig, tokenizer: Tokenizer, adapter_config: dict[str, Any] | None = None
    ) -> "RunDirectory":
        """Prepare a new run in a hidden directory. Files at `path` are not replaced before the first save.

        adapter_config: content of PEFT's adapter_config.json, for a LoRA adapter.
        """
        run = cls(path)
        run._current = staging_directory(path)
        with run._saving():
            run._current.mkdir(parents=True, exist_ok=True)
            check_folder(run._current)
            write_text(run._current / "tokenizer.json", tokenizer.to_str())
            run.write_config(config)
            if adapter_config is not None:
                write_text(run._current / PEFT_FILE, json.dumps(adapter_config, indent=2) + "\n")
        return run

    def write_config(self, config: RunConfig) -> None:
        """Replace config.json."""
        values = config.to_json()
        text = json.dumps({**values, "digest": config_digest(values)}, indent=2) + "\n"
        with self._saving():
            write_text(self._current / "config.json", text)

    def save_best(self, tensors: dict[str, Tensor], config: RunConfig, step: int, val_loss: float | None) -> None:
        """Replace the best weights, which are loaded for inference. val_loss: nats per token."""
        with self._saving():
            write_weights(self._current / weights_file(config), tensors, config, step, val_loss)

    def save_last(
        self,
        tensors: dict[str, Tensor],
        optimizer: dict[str, Tensor],
        state: dict[str, Any],
        config: RunConfig,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace `last/` as one unit: the new one is written and flushed beside the old one, then renamed.

        state: the trainer's state, with `step` and `val_loss`. The first save moves a prepared run to `path`.
        check: called between files; what it raises abandons this save
        """
        new, old, last = (self._current / name for name in ("last.new", "last.old", "last"))
        with self._saving():
            recover_last(self._current)
            remove_tree(new)
            remove_tree(old)
            try:
                new.mkdir()
                write_weights(new / weights_file(config), tensors, config, state["step"], state["val_loss"])
                check()
                # Before the first step there are no tensors; safetensors then reads the file only if it has metadata.
                write_tensors(new / "optimizer.safetensors", optimizer, {"format": "pt"})
                write_text(new / "state.json", json.dumps(state))
                manifest = {}
                for file in sorted(new.iterdir()):
                    check()
                    manifest[file.name] = hash_file(file)
                write_text(new / "manifest.json", json.dumps(manifest))
                flush_folder(new)
            except BaseException:
                remove_tree(new)
                raise
            if last.exists():
                last.rename(old)
            new.rename(last)
            flush_folder(self._current)
            remove_tree(old)
            self._commit()

    def commit(self) -> None:
        """Move a prepared run to its path. A run that is there is replaced."""
        with self._saving():
            self._commit()

    def _commit(self) -> None:
        if not self.is_in_place:
            commit(self._current, self.path)
            self._current = self.path

    def load_last(self, config: RunConfig) -> LastSave:
        """Read `last/`. Raises NotResumableError if it is missing or damaged, and TinyLMError for damaged tensors."""
        last = recover_last(self.path)
        if not last.is_dir():
            raise NotResumableError(
                f"{self.path} has no last/ folder, so it cannot be resumed; its best weights can still be used.",
                self.path,
                is_adapter=config.adapter is not None,
            )
        try:
            check_folder(last)
            manifest = read_json(last / "manifest.json", MAX_MANIFEST_BYTES)
            for name in (weights_file(config), "optimizer.safetensors", "state.json"):
                if hash_file(last / name) != manifest[name]:
                    raise ValueError(f"{name} has changed since it was saved")
            state = read_json(last / "state.json", MAX_STATE_BYTES)
            if not isinstance(state, dict) or type(state["step"]) is not int:
                raise ValueError("state.json has no step")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NotResumableError(
                f"{last} is damaged ({error}), so the run cannot be resumed; its best weights can still be used.",
                self.path,
                is_adapter=config.adapter is not None,
            ) from error
        remove_unfinished(self.path)
        weights = read_weights_file(last / weights_file(config), config)
        optimizer, _ = read_tensors(last / "optimizer.safetensors")
        return LastSave(weights.tensors, optimizer, state)

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Append a record to metrics.jsonl."""
        with self._saving():
            metrics_log.append_metrics(self._current, record)

    def append_sample(self, record: dict[str, Any]) -> None:
        """Append a record to samples.jsonl."""
        with self._saving():
            metrics_log.append_metrics(self._current, record, metrics_log.SAMPLES_FILE)

    def truncate_metrics(self, step: int) -> None:
        """Delete the records of metrics.jsonl and samples.jsonl after `step`, which a resumed run logs again."""
        with self._saving():
            metrics_log.truncate_metrics(self.path, step)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Context manager that turns an error of the file system into a SaveError."""
        try:
            yield
        except (OSError, safetensors.SafetensorError) as error:
            if self.is_in_place and not self.path.exists():
                raise SaveError(
                    f"{self.path} was deleted or moved during training, with everything that was saved in it. If it "
                    "was moved, resume it at its new path.",
                    self.path,
                    resumable=False,
                ) from error
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            resumable = self.is_in_place
            remedy = "the last save is intact" if resumable else "remove the cause, or choose another `out`"
            raise SaveError(f"Cannot write {self.path}: {reason}; {remedy}.", self.path, resumable) from error


class UnwrittenRun(RunDirectory):
    """The run directory of a rank other than the first one: its methods that write do nothing."""

    def write_config(self, config: RunConfig) -> None:
        """Do nothing."""

    def save_best(self, tensors: dict[str, Tensor], config: RunConfig, step: int, val_loss: float | None) -> None:
        """Do nothing."""

    def save_last(
        self,
        tensors: dict[str, Tensor],
        optimizer: dict[str, Tensor],
        state: dict[str, Any],
        config: RunConfig,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Do nothing."""

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Do nothing."""

    def append_sample(self, record: dict[str, Any]) -> None:
        """Do nothing."""

    def truncate_metrics(self, step: int) -> None:
        """Do nothing."""
