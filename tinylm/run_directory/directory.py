"""Writing a run directory, and reading the state that a run is resumed from."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import safetensors
from torch import Tensor

from tinylm.config.run import RunConfig
from tinylm.errors import NotResumableError, SaveError
from tinylm.run_directory import metrics_log
from tinylm.run_directory.layout import FIRST_FILE, GENERATION_FILES, OPTIMIZER_FILE, staging_directory, weights_file
from tinylm.run_directory.loading import MAX_STATE_BYTES, config_digest
from tinylm.run_directory.lock_and_commit import commit, recover_last, remove_unfinished
from tinylm.run_directory.weights import (
    WHOLE,
    Shard,
    check_weights_file,
    read_layout,
    read_tensors,
    read_weights_files,
    write_tensors,
    write_weights,
)
from tinylm.system.files import (
    check_folder,
    check_regular,
    flush_folder,
    hash_file,
    read_json,
    remove_tree,
    replace_folder,
    write_text,
)
from tinylm.text.tokenizer import Tokenizer

MAX_MANIFEST_BYTES = 1 << 20  # about 250 bytes per rank that has written a part of the save


@dataclass(frozen=True)
class LastSave:
    """A verified `last/`, from which a run is resumed. Tensors are read on demand, all rows or those of a shard.

    weights, optimizer: the files of the tensors, one for each shard. state: the trainer's state, as JSON values.
    """

    weights: tuple[Path, ...]
    optimizer: tuple[Path, ...]
    state: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The save as JSON values, for the other ranks."""
        return {
            "weights": [str(file.absolute()) for file in self.weights],
            "optimizer": [str(file.absolute()) for file in self.optimizer],
            "state": self.state,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        weights, optimizer = (tuple(map(Path, values[name])) for name in ("weights", "optimizer"))
        return cls(weights, optimizer, values["state"])

    def read_weights(self, shard: Shard = WHOLE) -> dict[str, Tensor]:
        """The weights by name, all rows or those of a shard. Raises TinyLMError as `read_tensors` does."""
        return read_tensors(self.weights, shard)

    def read_optimizer(self, shard: Shard = WHOLE) -> dict[str, Tensor]:
        """The tensors of the optimizer, as for `read_weights`."""
        return read_tensors(self.optimizer, shard)


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
    def create(cls, path: Path, config: RunConfig, tokenizer: Tokenizer) -> "RunDirectory":
        """Prepare a new run in a hidden directory. Files at `path` are not replaced before the first save."""
        run = cls(path)
        run._current = staging_directory(path)
        with run._saving():
            run._current.mkdir(parents=True, exist_ok=True)
            check_folder(run._current)
            write_text(run._current / "tokenizer.json", tokenizer.to_str())
            run.write_config(config)
        return run

    def write_config(self, config: RunConfig) -> None:
        """Write or replace config.json."""
        values = config.to_json()
        text = json.dumps({**values, "digest": config_digest(values)}, indent=2) + "\n"
        with self._saving():
            write_text(self._current / "config.json", text)

    def save_for_inference(
        self, tensors: dict[str, Tensor], config: RunConfig, step: int, val_loss: float | None
    ) -> None:
        """Replace the weights for inference: the best or, if those are kept, the last. val_loss: nats per token."""
        with self._saving():
            write_weights(self._current / weights_file(config), tensors, config, step, val_loss)

    def write_first_weights(self, tensors: dict[str, Tensor], config: RunConfig) -> None:
        """Write the weights that training started from."""
        with self._saving():
            write_weights(self._current / FIRST_FILE, tensors, config, 0, None)

    def read_first_weights(self, config: RunConfig) -> dict[str, Tensor]:
        """The weights that training started from. Raises TinyLMError if they are missing or damaged."""
        return read_weights_files([self.path / FIRST_FILE], config).tensors

    def save_generation(
        self, index: int, tensors: dict[str, Tensor], config: RunConfig, step: int, val_loss: float
    ) -> None:
        """Write or replace the best weights of generation `index`, from 0. val_loss: nats per token"""
        with self._saving():
            write_weights(self._current / GENERATION_FILES[index], tensors, config.while_training, step, val_loss)

    def read_generation(self, index: int, config: RunConfig) -> dict[str, Tensor]:
        """The weights from `save_generation`. Raises TinyLMError if they are missing or damaged."""
        return read_weights_files([self._current / GENERATION_FILES[index]], config.while_training).tensors

    def save_copy(self, write: Callable[[Path], None]) -> None:
        """Call `write` with the folder of the run, to replace the best weights in the format of another tool."""
        with self._saving():
            write(self._current)

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
        check: called between files; an exception that it raises abandons this save
        """
        new = self.begin_last()
        try:
            hashes = self.write_last(new, tensors, optimizer, state, config, check=check)
        except BaseException:
            remove_tree(new)
            raise
        self.commit_last(new, hashes, state)

    # The parts of `save_last`, for ranks that write their rows of the tensors: rank 0 begins the save, every rank
    # writes, and rank 0 commits it.

    def begin_last(self) -> Path:
        """Create the folder of the next `last/`, beside the old one. Leftovers of an interrupted save are deleted."""
        with self._saving():
            recover_last(self._current)
            for name in ("last.new", "last.old"):
                remove_tree(self._current / name)
            new = self._current.absolute() / "last.new"
            new.mkdir()
            return new

    def write_last(
        self,
        new: Path,
        tensors: dict[str, Tensor],
        optimizer: dict[str, Tensor],
        state: dict[str, Any],
        config: RunConfig,
        shard: Shard = WHOLE,
        check: Callable[[], None] = lambda: None,
    ) -> dict[str, str]:
        """Write the weights and the tensors of the optimizer to `new`, and flush them. Returns the SHA-256 of each file
        by name. After an error, also one that `check` raises between files, the files are deleted.

        tensors, optimizer: only the rows of the shard
        """
        files = _shard_files(new, config, shard)
        try:
            with self._saving():
                write_weights(files[0], tensors, config.while_training, state["step"], state["val_loss"])
                check()
                write_tensors(files[1], optimizer, {"format": "pt"})
                hashes = {}
                for file in files:
                    check()
                    hashes[file.name] = hash_file(file)
                return hashes
        except BaseException:
            self.discard_last(new, config, shard)
            raise

    def discard_last(self, new: Path, config: RunConfig, shard: Shard) -> None:
        """Delete the files that `write_last` has written for a shard."""
        for file in _shard_files(new, config, shard):
            remove_tree(file)

    def commit_last(self, new: Path, hashes: dict[str, str], state: dict[str, Any]) -> None:
        """Complete the save in `new`, and replace `last/` by it. If it cannot be completed, `new` is deleted.

        hashes: SHA-256 of the files of all ranks, by name
        """
        old, last = self._current / "last.old", self._current / "last"
        with self._saving():
            try:
                write_text(new / "state.json", json.dumps(state))
                manifest = {**hashes, "state.json": hash_file(new / "state.json")}
                for name in manifest:
                    check_regular(new / name)
                write_text(new / "manifest.json", json.dumps(manifest))
                flush_folder(new)
            except BaseException:
                remove_tree(new)
                raise
            replace_folder(last, new, old)
            flush_folder(self._current)
            remove_tree(old)
            self._commit()

    def commit(self) -> None:
        """Move a prepared run to its path. A run at the path is replaced."""
        with self._saving():
            self._commit()

    def _commit(self) -> None:
        if not self.is_in_place:
            commit(self._current, self.path)
            self._current = self.path

    def load_last(self, config: RunConfig) -> LastSave:
        """Recover an interrupted replacement of `last/`, verify `last/`, and delete unfinished files of the run.

        Raises NotResumableError if `last/` is missing or damaged, and TinyLMError for damaged tensors.
        """
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
            size = max(1, len(manifest) // 2)  # two files of each rank, and state.json
            parts = [_shard_files(last, config, Shard(index, size)) for index in range(size)]
            for file in (*itertools.chain(*parts), last / "state.json"):
                if hash_file(file) != manifest[file.name]:
                    raise ValueError(f"{file.name} has changed since it was saved")
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
        weights, optimizer = zip(*parts, strict=True)
        for files in (weights, optimizer):
            read_layout(files)
        for file in weights:
            check_weights_file(file, config.while_training)
        return LastSave(weights, optimizer, state)

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Append a record to metrics.jsonl."""
        with self._saving():
            metrics_log.append_metrics(self._current, record)

    def append_sample(self, record: dict[str, Any]) -> None:
        """Append a record to samples.jsonl."""
        with self._saving():
            metrics_log.append_metrics(self._current, record, metrics_log.SAMPLES_FILE)

    def truncate_metrics(self, step: int, last_eval_step: int, joined_step: int = 0) -> None:
        """Delete the records of metrics.jsonl and samples.jsonl after `step`, which a resumed run logs again,
        evaluations after `last_eval_step`, and those of joined models after `joined_step`.
        """
        with self._saving():
            metrics_log.truncate_metrics(self.path, step, last_eval_step, joined_step)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Context manager that raises SaveError for an error of the file system or of safetensors."""
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


class ShardOnlyRun(RunDirectory):
    """The run directory on the ranks other than 0, which write only their shards of `last/`."""

    def write_last(self, new: Path, *arguments: Any, **options: Any) -> dict[str, str]:
        """Write the files of this rank's shard. Rank 0 moves the run to its path; `new` shows where it is now."""
        self._current = new.parent
        return super().write_last(new, *arguments, **options)

    # What rank 0 writes
    def write_config(self, config: RunConfig) -> None: ...
    def save_for_inference(
        self, tensors: dict[str, Tensor], config: RunConfig, step: int, val_loss: float | None
    ) -> None: ...
    def save_copy(self, write: Callable[[Path], None]) -> None: ...
    def append_metrics(self, record: dict[str, Any]) -> None: ...
    def append_sample(self, record: dict[str, Any]) -> None: ...
    def truncate_metrics(self, step: int, last_eval_step: int, joined_step: int = 0) -> None: ...


def _shard_files(folder: Path, config: RunConfig, shard: Shard) -> tuple[Path, Path]:
    return folder / shard.file_name(weights_file(config)), folder / shard.file_name(OPTIMIZER_FILE)
