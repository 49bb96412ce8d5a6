"""How this process was launched, and the ranks of a run: the processes that train or evaluate one model together.

Each rank calls the same methods in the same order. `tinylm.distributed` connects several processes. Imports no torch.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from tinylm.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


MAX_RANKS = 1 << 16
MAX_PORT = (1 << 16) - 1
REQUIRED = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")  # if there are several processes


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How this process was started: alone, or by torchrun as one of `size` ranks.

    rank, local_rank: the number of this process, from 0, among all and among those on its machine
    size, local_size: the number of processes, in all and on this machine
    host, port: address of the store through which the processes find each other
    run_id: torchrun's id of the job; several jobs may use one store
    has_store: whether torchrun runs that store, and keeps it when it restarts the processes; otherwise rank 0 runs it
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    port: int = 0
    run_id: str = ""
    has_store: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables that torchrun sets. Without MASTER_ADDR, the process is alone.

        Raises UsageError for a variable that is missing, not a number or out of range.
        """
        if "MASTER_ADDR" not in environment:
            return cls()
        size = _number(environment, "WORLD_SIZE", 1, 1, MAX_RANKS)
        missing = [name for name in REQUIRED if name not in environment] if size > 1 else []
        if missing:
            raise UsageError(
                f"WORLD_SIZE is {size}, but {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set. "
                "Start the processes with torchrun, or unset MASTER_ADDR."
            )
        local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, 1, size)
        has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=_number(environment, "RANK", 0, 0, size - 1),
            size=size,
            local_rank=_number(environment, "LOCAL_RANK", 0, 0, local_size - 1),
            local_size=local_size,
            host=environment["MASTER_ADDR"],
            port=_number(environment, "MASTER_PORT", 0, 1, MAX_PORT) if size > 1 or has_store else 0,
            run_id=environment.get("TORCHELASTIC_RUN_ID", ""),
            has_store=has_store,
        )


def _number(environment: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environment.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and low <= int(text) <= high):
        found = repr(text[:40]) if name in environment else "not set"
        raise UsageError(
            f"The environment variable {name} is {found}; it must be from {low} to {high}. torchrun sets it; "
            "without torchrun, unset MASTER_ADDR."
        )
    return int(text)


MAX_SUM_BYTES = 96 << 20  # that `Ranks.add` allocates at a time, for contiguous tensors


class Divisible(Protocol):
    """What ranks need of a batch."""

    @property
    def n_targets(self) -> int: ...

    def every(self, step: int, first: int) -> Self: ...


AnyBatch = TypeVar("AnyBatch", bound=Divisible)


class Ranks:
    """The ranks of a run: the interface, and the implementation for a single process, which exchanges nothing.

    job, restarts: see Rendezvous
    """

    def __init__(self, launch: Launch | None = None, job: str | None = None, restarts: int = 0) -> None:
        self.launch = launch or Launch()
        self.job = job
        self.restarts = restarts

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.launch.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which plans, writes files and reports."""
        return self.launch.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether this is a single process that torchrun has not started."""
        return self.size == 1 and not self.launch.has_store

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks. value: of JSON's types."""
        return [value]

    def first(self, value: Any) -> Any:
        """The value of rank 0. value: of JSON's types; ignored on the other ranks."""
        return value

    def require_device(self, device: str) -> None:
        """With several ranks: raise UsageError for a device other than cpu and cuda, and if this machine has fewer GPUs
        than ranks.
        """

    def announce(self) -> None:
        """Rank 0: end one call of `wait` on all other ranks."""

    def wait(self) -> None:
        """Ranks other than 0: wait for `announce`, for any length of time."""

    def broadcast(
        self, tensors: "Mapping[str, Tensor]", keep: "Callable[[Tensor], Tensor]" = lambda tensor: tensor
    ) -> "dict[str, Tensor]":
        """The tensors of rank 0 by name, with several ranks on the CPU; those of the other ranks are ignored.

        keep: applied to each tensor before the next one is sent; the result has its return values
        """
        return {name: keep(tensor) for name, tensor in tensors.items()}

    def add(self, tensors: "Sequence[Tensor]") -> None:
        """Replace each tensor by its sum over all ranks. Every rank gives tensors of the same shapes and dtypes."""

    def part(self, batch: AnyBatch) -> AnyBatch:
        """The rows of a batch that this rank computes: rows rank, rank + size, and so on. May be empty."""
        return batch

    def seed(self, seed: int, step: int) -> None:
        """With several ranks: seed torch's random numbers from the seed, the step and the rank."""

    def peer_errors(self) -> AbstractContextManager[None]:
        """Context manager for a computation in which torch exchanges tensors between ranks, as FSDP does. If another
        rank has failed, the error of the exchange becomes a PeerError.
        """
        return contextlib.nullcontext()

    def share_threads(self, threads: int) -> int:
        """Number of CPU threads of this rank: `threads` for one rank, else an equal share of those of the machine."""
        return threads

    def deal(self, batches: Iterable[AnyBatch]) -> Iterator[tuple[AnyBatch, bool, int]]:
        """Deal batches to the ranks in turns. Yields, for each turn, the batch of this rank, whether the batch counts,
        and the number of targets of all batches of the turn. A rank for which no batch is left gets the batch of rank
        0, which then does not count.
        """
        turn: list[AnyBatch] = []
        for batch in batches:
            turn.append(batch)
            if len(turn) == self.size:
                yield turn[self.launch.rank], True, sum(batch.n_targets for batch in turn)
                turn = []
        if turn:
            counts = self.launch.rank < len(turn)
            yield turn[self.launch.rank if counts else 0], counts, sum(batch.n_targets for batch in turn)


ONE_RANK = Ranks()
