"""The rank of this process and the rendezvous address, from the environment variables of torchrun. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from tinylm.errors import UsageError

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
