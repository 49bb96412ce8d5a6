"""The place of this process among those that torchrun started, read from environment variables. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from tinylm.errors import UsageError

MAX_RANKS = 1 << 16
NO_JOB = "none"  # torchrun's TORCHELASTIC_RUN_ID if it was given no --rdzv-id


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How this process was started: alone, or by torchrun as one of `size` ranks.

    rank, local_rank: the number of this process, from 0, among all and among those on its machine
    size, local_size: the number of processes, in all and on this machine
    restarts: how often torchrun has restarted the processes after a failure
    job: identifies the torchrun command, and is the same after a restart; `None` without torchrun
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0
    job: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables that torchrun sets. Raises UsageError for values that torchrun does not set."""
        job = environment.get("TORCHELASTIC_RUN_ID")
        if job is None and "MASTER_ADDR" not in environment:
            return cls()
        size = _number(environment, "WORLD_SIZE", 1, 1, MAX_RANKS)
        local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, 1, size)
        return cls(
            rank=_number(environment, "RANK", 0, 0, size - 1),
            size=size,
            local_rank=_number(environment, "LOCAL_RANK", 0, 0, local_size - 1),
            local_size=local_size,
            restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0, 0, MAX_RANKS),
            job=f"process {os.getppid()}" if job == NO_JOB else job,
        )


def _number(environment: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environment.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not low <= int(text[:10]) <= high:
        raise UsageError(
            f"The environment variable {name} is {text[:40]!r}; it must be from {low} to {high}. torchrun sets it; "
            "without torchrun, unset MASTER_ADDR."
        )
    return int(text)
