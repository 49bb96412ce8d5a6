"""Saves that are written in a thread while training continues (decision 003)."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from tinylm.errors import is_out_of_memory
from tinylm.machine.device import free_memory
from tinylm.planning import recipes

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

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
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
        try:
            if shapes != {name: (copy.shape, copy.dtype) for name, copy in self._copies.items()}:
                self._copies = {}
                free = free_memory("cpu")
                if size < MIN_BYTES or (free is not None and 2 * size > free):
                    return False
                self._copies = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
            for name, copy in self._copies.items():
                copy.copy_(tensors[name])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
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
