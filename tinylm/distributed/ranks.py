"""The ranks of a run in several processes: how they find each other, and what they exchange.

Rendezvous: each rank connects to the store of its launch, and rank 0 chooses a prefix of keys. torchrun keeps its
store, with all keys, when it restarts the processes, and its restart counts differ between machines: a machine counts
only failures of its own processes. Rank 0 therefore chooses a new prefix at each rendezvous, and the other ranks ask
for it with a random number, which no earlier process has used.

Tensors and small values are exchanged through torch.distributed. If one rank fails, all others raise PeerError with
the message and the exit code of its error.
"""

import contextlib
import itertools
import json
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinylm.errors import JoinError, PeerError, TinyLMError, UsageError, first_line, is_out_of_memory
from tinylm.reporter import LogReporter, Reporter
from tinylm.system.machine_profile import physical_cores, usable_cores
from tinylm.system.process_signals import Interrupted
from tinylm.system.ranks import MAX_SUM_BYTES, AnyBatch, Launch, Ranks

MEETING_TIMEOUT = timedelta(minutes=5)  # torchrun starts all processes at once; the slowest import of torch is shorter
QUIET_SECONDS = 10.0  # before rank 0 reports that it waits
_numbers = itertools.count()  # of the rendezvous of this process; equal on all ranks


@dataclass(frozen=True)
class Rendezvous:
    """The values that all ranks agree on.

    store: key-value store of this rendezvous alone
    job: random id of the n-th rendezvous of a torchrun command, which stays the same when torchrun restarts the
        processes; `None` without torchrun
    restarts: number of restarts by torchrun since rank 0 first reached this rendezvous
    """

    store: Any
    job: str | None
    restarts: int


def meet(
    launch: Launch,
    note: Callable[[str], None],
    number: int,
    timeout: timedelta,
    now: Callable[[], float] = time.monotonic,
) -> Rendezvous:
    """Connect to the store and wait for the other ranks.

    note: receives a sentence if rank 0 waits for more than QUIET_SECONDS
    number: of the rendezvous in this process, equal on all ranks

    Raises JoinError if the store cannot be reached, or some ranks do not connect within `timeout`.
    """
    address = f"{launch.host}:{launch.port}"
    try:
        shared = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # absent in builds without it
            launch.host,
            launch.port,
            is_master=launch.rank == 0 and not launch.has_store,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        # Several torchrun commands may share one store.
        store = torch.distributed.PrefixStore(f"tinylm/{launch.run_id}", shared)  # type: ignore[attr-defined]
        if launch.rank == 0:
            agreed = _invite(launch, store, number, note, timeout, now)
        else:  # ask rank 0, and confirm the answer
            own = secrets.token_hex(8)
            store.set(f"ask/{launch.rank}", own)
            agreed = json.loads(store.get(f"answer/{own}"))  # waits for at most `timeout`
            store.set(f"{agreed['prefix']}/here/{launch.rank}", "")
    except (RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise JoinError(
            f"Rank {launch.rank} of {launch.size} found no rank 0 at {address} within {timeout.total_seconds():.0f} s "
            f"({lines[0][:200]}). {_ADVICE}"
        ) from error
    job = agreed["job"] if launch.has_store else None
    prefixed = torch.distributed.PrefixStore(agreed["prefix"], store)  # type: ignore[attr-defined]  # as above
    return Rendezvous(prefixed, job, agreed["restarts"])


_ADVICE = (
    "Start all processes with torchrun, with an address that each machine reaches; to run a single process, unset "
    "MASTER_ADDR, RANK and WORLD_SIZE."
)


def _invite(
    launch: Launch,
    store: Any,
    number: int,
    note: Callable[[str], None],
    timeout: timedelta,
    now: Callable[[], float],
) -> dict[str, Any]:
    """Rank 0: answer every rank that asks, until all ranks have confirmed the answer. Returns the answer."""
    prefix = secrets.token_hex(8)
    job = store.compare_set(f"job/{number}", "", secrets.token_hex(8)).decode()
    restarts = store.add(f"starts/{number}", 1) - 1 if launch.has_store else 0
    agreed = {"prefix": prefix, "job": job, "restarts": restarts}
    missing = list(range(1, launch.size))
    start, quiet = now(), True
    while True:
        for rank in missing:
            if store.check([f"ask/{rank}"]):  # perhaps by a process that a restart has ended
                store.set(f"answer/{store.get(f'ask/{rank}').decode()}", json.dumps(agreed))
        missing = [rank for rank in missing if not store.check([f"{prefix}/here/{rank}"])]
        if not missing:
            return agreed
        waited = now() - start
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        if waited > timeout.total_seconds():
            raise JoinError(
                f"{len(missing)} of {launch.size} processes did not connect to {launch.host}:{launch.port} within "
                f"{timeout.total_seconds():.0f} s (ranks {names}). {_ADVICE}"
            )
        if quiet and waited > QUIET_SECONDS:
            note(f"Waiting for {len(missing)} of {launch.size} processes (ranks {names})...")
            quiet = False
        time.sleep(POLL_SECONDS)


BUCKETS_IN_FLIGHT = 2  # besides the one that was just started
BUCKET_BYTES = MAX_SUM_BYTES // (BUCKETS_IN_FLIGHT + 1)  # of tensors that are summed in one operation
POLL_SECONDS = 0.05
TIMEOUT = timedelta(minutes=30)  # of one operation, in which the other ranks wait while rank 0 saves or samples
LINGER_SECONDS = 10.0  # longest time that rank 0 keeps its store after an error, so that other ranks can read the error
ERROR_KEY, READY_KEY, ENDED_KEY = "error", "ready", "ended"


class ProcessRanks(Ranks):
    """The ranks of several processes, connected by the default process group of torch.distributed.

    threads: number of CPU threads of all ranks on this machine together
    """

    def __init__(self, launch: Launch, meeting: Rendezvous, threads: int) -> None:
        super().__init__(launch, meeting.job, meeting.restarts)
        self._store = meeting.store
        self.threads = threads
        self._announcements = itertools.count()

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        with self._communication():
            torch.distributed.all_gather_object(found, value)
        return found

    def first(self, value: Any) -> Any:
        found = [value if self.is_first else None]
        with self._communication():
            torch.distributed.broadcast_object_list(found, 0)
        return found[0]

    def require_device(self, device: str) -> None:
        local = self.launch.local_size
        if device not in ("cpu", "cuda"):
            raise UsageError(f"Several processes cannot use {device}; set `device` to cpu, or start one process.")
        if device == "cuda" and torch.cuda.device_count() < local:
            raise UsageError(
                f"{local} processes on this machine need as many GPUs, and it has {torch.cuda.device_count()}; start "
                "fewer processes."
            )

    def announce(self) -> None:
        with self._communication():
            self._store.set(f"{READY_KEY}/{next(self._announcements)}", "")

    def wait(self) -> None:
        # Not a collective operation, which ends after TIMEOUT and does not let signal handlers run.
        key = f"{READY_KEY}/{next(self._announcements)}"
        while True:
            with self._communication():
                if self._store.check([key]):
                    return
                if self._store.check([ERROR_KEY]):
                    raise RuntimeError
            time.sleep(POLL_SECONDS)

    def broadcast(
        self, tensors: Mapping[str, Tensor], keep: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> dict[str, Tensor]:
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()} if self.is_first else {}
        names = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in own.items()]
        result = {}
        for name, dtype, shape in self.first(names):
            tensor = own[name] if self.is_first else torch.empty(shape, dtype=getattr(torch, dtype))
            if tensor.numel():
                with self._communication():
                    torch.distributed.broadcast(tensor.reshape(-1).view(torch.uint8), 0)
            result[name] = keep(tensor)
        return result

    def add(self, tensors: Sequence[Tensor]) -> None:
        pending: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
        for bucket in _buckets(tensors):
            in_place = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0].view(-1) if in_place else torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._communication():
                pending.append((torch.distributed.all_reduce(flat, async_op=True), flat, bucket))
            if len(pending) > BUCKETS_IN_FLIGHT:
                self._finish(*pending.popleft())
        while pending:
            self._finish(*pending.popleft())

    def _finish(self, work: Any, flat: Tensor, bucket: list[Tensor]) -> None:
        with self._communication():
            work.wait()
        for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            if tensor.data_ptr() != total.data_ptr():  # not summed in place
                tensor.copy_(total.view_as(tensor))

    def part(self, batch: AnyBatch) -> AnyBatch:
        return batch.every(self.size, self.launch.rank)

    def seed(self, seed: int, step: int) -> None:
        sequence = np.random.SeedSequence([seed, step, self.launch.rank])
        torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))

    @contextlib.contextmanager
    def peer_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # Some errors of Gloo are recognised only by their messages.
            is_lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
            if is_out_of_memory(error) or not is_lost:
                raise
            raise self._peer_error(str(error)) from error

    def share_threads(self, threads: int) -> int:
        return max(1, self.threads // self.launch.local_size)

    def publish(self, error: BaseException) -> None:
        """Let the other ranks raise a PeerError with the message and the exit code of this error.

        Has no effect if another rank has published an error before.
        """
        text, exit_code = f"{type(error).__name__}: {error}", 1
        if isinstance(error, TinyLMError):
            text, exit_code = str(error), error.exit_code
        elif not isinstance(error, Exception):
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            text, exit_code = "Stopped by a signal.", 128 + number
        record = {"rank": self.launch.rank, "message": text[:2000], "exit_code": exit_code}
        with contextlib.suppress(RuntimeError):  # the process that holds the store has ended
            self._store.compare_set(ERROR_KEY, "", json.dumps(record))

    def end(self) -> None:
        """After an error of any rank: report that this rank has ended. Rank 0, if it holds the store, waits for the
        other ranks, which read the error there, for at most LINGER_SECONDS: a rank may have been killed.
        """
        with contextlib.suppress(RuntimeError):  # the process that holds the store has ended
            self._store.set(f"{ENDED_KEY}/{self.launch.rank}", "")
            keys = [f"{ENDED_KEY}/{rank}" for rank in range(self.size)]
            limit = time.monotonic() + LINGER_SECONDS
            while self.is_first and not self.launch.has_store and time.monotonic() < limit:
                if self._store.check(keys):
                    return
                time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def _communication(self) -> Iterator[None]:
        """Context manager that turns a RuntimeError into a PeerError, unless memory is exhausted."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise self._peer_error(str(error)) from error

    def _peer_error(self, reason: str) -> PeerError:
        try:
            if self._store.check([ERROR_KEY]):
                record = json.loads(self._store.get(ERROR_KEY))
                return PeerError(f"On rank {record['rank']}: {record['message']}", record["exit_code"])
        except RuntimeError:
            pass
        lines = reason.strip().splitlines() or ["closed"]
        return PeerError(
            f"Another process of the run has ended, or the connection to it is lost ({lines[0][:200]}). What was saved "
            "is intact; `resume` continues from the last save.",
            1,
        )


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of consecutive tensors of one dtype, of at most BUCKET_BYTES each unless a single tensor is larger."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


@contextlib.contextmanager
def join_ranks(launch: Launch, reporter: Reporter | None = None) -> Iterator[Ranks]:
    """Context manager that connects this process with the other ranks of its launch.

    Under torchrun, torch then has `machine_threads` CPU threads on each rank; `Ranks.share_threads` divides them. An
    exception in the block reaches the other ranks as a PeerError.

    reporter: receives a note if rank 0 waits for other ranks

    The process can join again after the block, but after an exception only if it uses neither CUDA nor a sharded model.

    Raises UsageError if torch has no torch.distributed, and JoinError if the other ranks cannot be reached.
    """
    if launch.size == 1 and not launch.has_store:
        yield Ranks(launch)
        return
    if not torch.distributed.is_available():
        raise UsageError("This build of torch has no torch.distributed; start one process, without torchrun.")
    threads = machine_threads(launch)
    torch.set_num_threads(threads)
    _select_gpu(launch)
    meeting = _in_thread(lambda: _connect(launch, reporter or LogReporter()))
    if launch.size == 1:
        yield Ranks(launch, meeting.job, meeting.restarts)
        return
    ranks = ProcessRanks(launch, meeting, threads)
    try:
        yield ranks
    except BaseException as error:
        if not isinstance(error, PeerError):
            ranks.publish(error)
        if not torch.cuda.is_available():  # NCCL could wait for operations of the rank that failed
            torch.distributed.destroy_process_group()
            ranks.end()  # the other ranks notice that the group is gone, and read the error
        raise
    else:
        torch.distributed.destroy_process_group()


def machine_threads(launch: Launch) -> int:
    """Number of CPU threads of all ranks on this machine together.

    Each rank counts with torch's current number of threads. If that is 1 and there are several ranks, the result is
    torch's default for a single process, since torchrun sets OMP_NUM_THREADS to 1 if the user has not set it.
    """
    threads = torch.get_num_threads()
    if threads > 1 or launch.local_size == 1:
        return threads * launch.local_size
    # The default of torch (aten/src/ATen/ParallelOpenMP.cpp).
    return physical_cores() if torch.backends.mkl.is_available() else usable_cores()


def _select_gpu(launch: Launch) -> None:
    if torch.cuda.is_available() and launch.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(launch.local_rank)


def _connect(launch: Launch, reporter: Reporter) -> Rendezvous:
    _select_gpu(launch)  # again, since each thread has its own current device
    meeting = meet(launch, reporter.note, next(_numbers), MEETING_TIMEOUT)
    if launch.size > 1:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            torch.distributed.init_process_group(
                backend, store=meeting.store, rank=launch.rank, world_size=launch.size, timeout=TIMEOUT
            )
        except (RuntimeError, ValueError) as error:
            raise JoinError(f"Cannot connect to the other processes of the run ({first_line(error)}).") from error
    return meeting


def _in_thread(call: Callable[[], Rendezvous]) -> Rendezvous:
    """The result of `call`, run in a thread: its waits in C++ would delay signal handlers in the main thread."""
    future: Future[Rendezvous] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()
