"""The ranks of a run, which are the processes that train or evaluate one model together.

Each rank calls the same methods in the same order. `tinylm.distributed` connects several processes.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from tinylm.system.launch import Launch

if TYPE_CHECKING:
    from torch import Tensor

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
