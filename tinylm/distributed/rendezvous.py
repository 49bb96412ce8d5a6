"""The rendezvous of the ranks of a run: each connects to the store of its launch, and rank 0 chooses a prefix of keys.

torchrun keeps its store, with all keys, when it restarts the processes, and its restart counts differ between machines:
a machine counts only failures of its own processes. Rank 0 therefore chooses a new prefix at each rendezvous, and the
other ranks ask for it with a random number, which no earlier process has used.
"""

import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from tinylm.errors import JoinError
from tinylm.system.launch import Launch

TIMEOUT = timedelta(minutes=5)  # torchrun starts all processes at once; long enough for the slowest import of torch
QUIET_SECONDS = 10.0  # before rank 0 reports that it waits
POLL_SECONDS = 0.05
_numbers = itertools.count()  # counts the rendezvous of this process; equal on all ranks


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
    *,
    numbers: Iterator[int] = _numbers,
    timeout: timedelta = TIMEOUT,
    now: Callable[[], float] = time.monotonic,
) -> Rendezvous:
    """Connect to the store and wait for the other ranks.

    note: receives a sentence if rank 0 waits for more than QUIET_SECONDS. numbers: of the rendezvous of this process

    Raises JoinError if the store cannot be reached, or some ranks do not connect within the timeout.
    """
    number, seconds = next(numbers), timeout.total_seconds()
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
            agreed = _invite(launch, store, number, note, seconds, now)
        else:  # ask rank 0, and confirm the answer
            own = secrets.token_hex(8)
            store.set(f"ask/{launch.rank}", own)
            agreed = json.loads(store.get(f"answer/{own}"))  # waits for at most the timeout
            store.set(f"{agreed['prefix']}/here/{launch.rank}", "")
    except (RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise JoinError(
            f"Rank {launch.rank} of {launch.size} found no rank 0 at {address} within {int(seconds)} s "
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
    launch: Launch, store: Any, number: int, note: Callable[[str], None], seconds: float, now: Callable[[], float]
) -> dict[str, Any]:
    """Rank 0: answer every rank that asks, until all ranks have confirmed the answer. Returns the answer.

    Raises JoinError after so many seconds.
    """
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
        if waited > seconds:
            raise JoinError(
                f"{len(missing)} of {launch.size} processes did not connect to {launch.host}:{launch.port} within "
                f"{int(seconds)} s (ranks {names}). {_ADVICE}"
            )
        if quiet and waited > QUIET_SECONDS:
            note(f"Waiting for {len(missing)} of {launch.size} processes (ranks {names})...")
            quiet = False
        time.sleep(POLL_SECONDS)
