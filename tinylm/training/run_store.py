"""Saving the model, replicated or sharded, and the state of a trainer into a run directory."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinylm.adapters.adapter import adapter_layers, adapter_tensors
from tinylm.config.run import RunConfig
from tinylm.distributed.ranks import Ranks
from tinylm.models.exporting import write_peft_copy
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.tensor_files import WHOLE, Shard
from tinylm.training.background_save import BackgroundSaver
from tinylm.training.sharded_tensors import full_tensors, local
from tinylm.training.state import TrainerState, optimizer_tensors
from tinylm.transformer.stack import Transformer

SIZE_WITH_OPTIMIZER = 3  # size of a save with Adam's two moments, relative to one before the first step


class RunStore:
    """Saves all weights, or only those of the adapter, and the optimizer's state.

    Rank 0 writes replicas. With shards, every rank writes its rows of the last save, and rank 0 commits the save in the
    first `check` or `finish` after all ranks have written theirs. The best weights are gathered on rank 0. All ranks
    call the methods together, except for `abandon` and `discard`.

    saved_step: the step of the last complete save, equal on all ranks; updated by the next `check` or `finish`
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: RunConfig,
        ranks: Ranks,
        shard: Shard,
        saver: BackgroundSaver,
        saved_step: int,
    ) -> None:
        self._directory = directory
        self._config = config
        self._ranks = ranks
        self._saver = saver
        self._shard = shard
        self._uncommitted: tuple[Path, dict[str, Any]] | None = None  # folder and state of a sharded save
        self._hashes: dict[str, str] | None = None  # of this rank's files in that folder; set by the saving thread
        self.saved_step = saved_step
        self._begun_step = saved_step  # of the last save that was started
        self._written_step = saved_step  # of the last save on disk, on rank 0 only; set by the saving thread

    def save_best(self, model: Transformer, step: int, val_loss: float) -> None:
        """Save the weights with the lowest validation loss so far: nats per token, at this step."""
        tensors = full_tensors(self._weights(model), self._ranks.is_first)
        self._directory.save_best(tensors, self._config, step, val_loss)
        if self._config.adapter is not None:
            self._directory.save_copy(lambda folder: write_peft_copy(folder, self._config, tensors))

    def save_last(self, model: Transformer, optimizer: torch.optim.Optimizer, state: TrainerState) -> float:
        """Start a save of everything that resuming needs. Returns the expected duration of the next save, in seconds.

        With shards, raises the error of an earlier save; with replicas, this save replaces one that failed.
        """
        weights, optimizer_state, values = self._weights(model), optimizer_tensors(optimizer, model), state.to_json()
        if self._shard != WHOLE:
            self._save_rows(weights, optimizer_state, values)
        else:
            self._begun_step = state.step
            if self._ranks.is_first:
                self._save_all(weights, optimizer_state, values)
            self.check()
        return self._saver.seconds if optimizer_state else SIZE_WITH_OPTIMIZER * self._saver.seconds

    def _save_all(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any]) -> None:
        def write(tensors: dict[str, Tensor]) -> None:
            own, others = ({name: tensors[name] for name in group} for group in (weights, optimizer))
            self._directory.save_last(own, others, state, self._config, self._saver.check_abandoned)
            self._written_step = state["step"]

        # Wait for the first save: it moves the run to its path, and training must not write to the run meanwhile.
        self._saver.write(write, weights | optimizer, wait=not self._directory.is_in_place)

    def _save_rows(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.finish()
        directory, first = self._directory, self._ranks.is_first
        begun = [str(directory.begin_last()), not directory.is_in_place] if first else None
        name, wait = self._ranks.first(begun)
        folder = Path(name)
        self._uncommitted, self._hashes = (folder, state), None

        def write(tensors: dict[str, Tensor]) -> None:
            own, others = ({name: tensors[name] for name in group} for group in (weights, optimizer))
            self._hashes = directory.write_last(
                folder, own, others, state, self._config, self._shard, self._saver.check_abandoned
            )

        self._saver.write(write, {name: local(tensor) for name, tensor in (weights | optimizer).items()}, wait)
        self.check()

    def check(self) -> None:
        """Raise the error of a failed save, commit a sharded save that all ranks have written, update `saved_step`."""
        self._saver.check()
        self._complete()

    def finish(self) -> None:
        """Wait until this rank's save is written, and raise its error if it failed; otherwise as `check`."""
        self._saver.finish()
        self._complete()

    def _complete(self) -> None:
        if self.saved_step != self._begun_step:
            self.saved_step = self._ranks.first(self._written_step)
        if self._uncommitted is None:
            return
        hashes = self._ranks.gather(self._hashes)
        if None in hashes:
            return
        (folder, state), self._uncommitted = self._uncommitted, None
        if self._ranks.is_first:
            self._directory.commit_last(folder, {name: found[name] for found in hashes for name in found}, state)
        self.saved_step = self._begun_step = state["step"]

    def abandon(self) -> None:
        """Abandon an uncommitted sharded save, which cannot be committed after an error of any rank."""
        if self._uncommitted is not None:
            self._saver.abandon()

    def discard(self) -> None:
        """Delete the files of an uncommitted sharded save that this rank has written."""
        if self._uncommitted is not None:
            self._directory.discard_last(self._uncommitted[0], self._config, self._shard)

    def _weights(self, model: Transformer) -> dict[str, Tensor]:
        if self._config.adapter is not None:
            return adapter_tensors(adapter_layers(model))
        return dict(model.state_dict())


@contextlib.contextmanager
def open_store(
    directory: RunDirectory, config: RunConfig, ranks: Ranks, shard: Shard, saved_step: int, save_seconds: float
) -> Iterator[RunStore]:
    """Context manager for the store of a training run.

    At its end, the last save is complete; after an error, an uncommitted sharded save is deleted. See BackgroundSaver.

    shard: the part of the saved tensors that this rank has
    saved_step: the step of the save from which the run is resumed, -1 for a new run
    save_seconds: the expected duration of a save, from an earlier session
    """
    saver = BackgroundSaver(save_seconds)
    store = RunStore(directory, config, ranks, shard, saver, saved_step)
    try:
        with saver:
            try:
                yield store
                store.finish()
            except BaseException:
                store.abandon()
                raise
    except BaseException:
        store.discard()
        raise
