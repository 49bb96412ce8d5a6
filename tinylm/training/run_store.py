"""Saving the weights, replicated or sharded, and the state of a trainer into a run, beside training."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from tinylm.config.run import RunConfig
from tinylm.errors import memory_errors
from tinylm.machine.device import free_memory
from tinylm.planning import recipes
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import trained_weights
from tinylm.run_directory.weights import WHOLE, Shard
from tinylm.system.ranks import Ranks
from tinylm.training.parallel import full_tensors, local
from tinylm.training.state import TrainerState, optimizer_tensors
from tinylm.transformer.architectures import Transformer

MIN_BYTES = recipes.MIN_COPIED_SAVE  # smaller saves take less than a second, and are written without the thread


class AbandonedSaveError(Exception):
    """Raised by `check_abandoned` to end an abandoned save."""


class BackgroundSaver:
    """Writes one save at a time, in a thread, from copies of the tensors.

    At the end of its `with` block, the saver waits for the current save and raises its error, if it failed. If the
    block has raised an error, the error of the save is added to that one as a note. After an interrupt (an exception
    such as KeyboardInterrupt) in the block or in the wait, the save is abandoned at its next `check_abandoned`. The
    thread writes nothing after the end of the block.

    seconds: duration of the last write; during a write in the thread, its expected duration, in proportion to its size.
        The initial value is from an earlier session.
    """

    def __init__(self, seconds: float = 0.0, free: Callable[[str], int | None] = free_memory) -> None:
        """free: returns the free bytes of a device"""
        self.seconds = seconds
        self._free = free
        self._bytes = 0  # size of the write that took `seconds`; 0 if unknown
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._pending: Future[None] | None = None
        self._abandoned = threading.Event()
        self._copies: dict[str, Tensor] = {}  # reused by each save: filling new memory takes several times as long

    def write(self, write: Callable[[dict[str, Tensor]], None], tensors: Mapping[str, Tensor], wait: bool) -> None:
        """Call `write` in the thread, with copies of the tensors on the CPU.

        With `wait`, for small tensors, and without memory for copies, `write` is called with the tensors themselves
        before this method returns. Waits for the previous save first. If the previous save failed, its error is
        dropped, and this save is also written before this method returns.
        """
        try:
            self.finish()
        except Exception:
            self._run(write, dict(tensors))
            return
        if wait or not self._copy(tensors):
            self._run(write, dict(tensors))
            return
        size = _size(tensors)
        if self._bytes:
            self.seconds *= size / self._bytes
        self._bytes = size
        self._pending = self._thread.submit(self._run, write, self._copies)

    def check(self) -> None:
        """Raise the error of a save that has failed in the thread. Does not wait for a save that is being written."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def abandon(self) -> None:
        """Abandon the save that is being written, at its next `check_abandoned`."""
        self._abandoned.set()

    def check_abandoned(self) -> None:
        """Raise AbandonedSaveError after an interrupt or `abandon`. The `write` function calls it between files."""
        if self._abandoned.is_set():
            raise AbandonedSaveError

    def finish(self) -> None:
        """Wait until the save that is being written has ended, and raise its error if it failed."""
        if self._pending is not None:
            error = self._pending.exception()  # an interrupt of this wait leaves `_pending` for `__exit__`
            self._pending = None
            if error is not None:
                raise error

    def _run(self, write: Callable[[dict[str, Tensor]], None], tensors: dict[str, Tensor]) -> None:
        start = time.monotonic()
        write(tensors)
        self.seconds, self._bytes = time.monotonic() - start, _size(tensors)

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> bool:
        """Copy the tensors to `_copies`. Returns False for small tensors, and if memory is short: new copies need twice
        their size in free memory.
        """
        size = _size(tensors)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if shapes != {name: (copy.shape, copy.dtype) for name, copy in self._copies.items()}:
            self._copies = {}
            free = self._free("cpu")
            if size < MIN_BYTES or (free is not None and 2 * size > free):
                return False
        try:
            with memory_errors():
                for name, tensor in tensors.items():
                    if name not in self._copies:
                        self._copies[name] = torch.empty_like(tensor, device="cpu")
                    self._copies[name].copy_(tensor)
        except MemoryError:
            self._copies = {}
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        interrupt: BaseException | None = None
        if error is not None and not isinstance(error, Exception):
            self._abandoned.set()
        # Not `shutdown()`: if its join is interrupted, Python 3.11 regards the thread as ended.
        while self._pending is not None and not self._pending.done():
            try:
                self._pending.exception()
            except BaseException as new:
                self._abandoned.set()
                interrupt = new
        self._thread.shutdown(wait=False)
        failed = None if self._pending is None else self._pending.exception()
        if isinstance(failed, AbandonedSaveError):
            failed = None
        raised = interrupt or error
        if failed is not None and raised is None:
            raise failed
        if failed is not None and raised is not None:
            raised.add_note(str(failed))
        if interrupt is not None:
            raise interrupt


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class RunStore:
    """Saves the trained weights and the optimizer's state.

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
        self._trained = trained_weights(config.adapter)
        self._ranks = ranks
        self._saver = saver
        self._shard = shard
        self._uncommitted: tuple[Path, dict[str, Any]] | None = None  # folder and state of a sharded save
        self._hashes: dict[str, str] | None = None  # of this rank's files in that folder; set by the saving thread
        self.saved_step = saved_step
        self._begun_step = saved_step  # of the last save that was started
        self._written_step = saved_step  # of the last save on disk, on rank 0 only; set by the saving thread

    def save_for_inference(self, model: Transformer, step: int, val_loss: float | None) -> None:
        """Save the weights for inference: the best, or the last. val_loss: nats per token; `None` if not evaluated."""
        tensors = full_tensors(self._trained.tensors(model), self._ranks.is_first)
        is_joined = model.width == self._config.model.width  # otherwise it is one of the generations to join
        config = self._config if is_joined else self._config.while_training
        self._directory.save_for_inference(tensors, config, step, val_loss)
        self._directory.save_copy(lambda folder: self._trained.write_copy(folder, self._config, tensors))

    def save_for_resuming(self, model: Transformer, optimizer: torch.optim.Optimizer, state: TrainerState) -> float:
        """Start a save of everything that resuming needs. Returns the expected duration of the next save, in seconds.

        With shards, raises the error of an earlier save; with replicas, this save replaces one that failed.
        """
        weights, optimizer_state = self._trained.tensors(model), optimizer_tensors(optimizer, model)
        values = state.to_json()
        if self._shard != WHOLE:
            self._save_rows(weights, optimizer_state, values)
        else:
            self._begun_step = state.step
            if self._ranks.is_first:
                self._save_all(weights, optimizer_state, values)
            self.check()
        return self._saver.seconds

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
