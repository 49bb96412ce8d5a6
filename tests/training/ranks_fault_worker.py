"""A process of torchrun that runs command lines, one after the other, with a fault on one rank from one step on.

    ranks_fault_worker.py CASES.json CODES

One command line runs in this process. Each of several runs in a process of its own, forked when torch is imported.
CASES.json has [FAULT, RANK, STEP, ATTEMPT, ARGUMENTS] for each command line. FAULT: `error` raises an exception in the
forward pass, `memory` runs out of memory there, `inf` makes the loss infinite, `disk` is a full disk at each save,
`signal` and `kill` send SIGTERM and SIGKILL to this rank, or `none`. With an ATTEMPT, the fault is only in processes
that torchrun has started after that number of restarts, and an error ends them. Each rank writes the exit code of each
command line to CODES/CASE-RANK.
"""

import contextlib
import errno
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch._dynamo  # before the forks, since these imports take seconds
import torch.distributed.fsdp  # noqa: F401, likewise

import tinylm.run_report.page  # noqa: F401
from tinylm.__main__ import main
from tinylm.objectives.loss import Loss
from tinylm.run_directory import directory
from tinylm.training import trainer

SIGNALS = {"signal": signal.SIGTERM, "kill": signal.SIGKILL}


@contextlib.contextmanager
def fail_from(step: int, fault: str) -> Iterator[None]:
    """Replace the method that fails."""
    take_step, save = trainer.Trainer._step, directory.RunDirectory.write_last
    errors = {"memory": MemoryError(), "error": RuntimeError("injected")}
    full_disk = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "optimizer.safetensors")

    def step_or_fail(self: trainer.Trainer, progress: float) -> None:
        objective = self.task.objective(progress)

        def compute_or_fail(*arguments: Any) -> Loss:
            if fault in errors:
                raise errors[fault]
            if fault in SIGNALS:
                os.kill(os.getpid(), SIGNALS[fault])
            loss = objective(*arguments)
            return loss._replace(total=loss.total * math.inf) if fault == "inf" else loss

        fails = self.state.step >= step and fault != "disk"
        with patch.object(type(self.task), "objective", lambda *_: compute_or_fail if fails else objective):
            take_step(self, progress)

    def save_or_fail(self: directory.RunDirectory, *arguments: Any, **options: Any) -> dict[str, str]:
        if fault != "disk" or arguments[3]["step"] < step:
            return save(self, *arguments, **options)
        with patch.object(directory, "write_tensors", side_effect=full_disk):
            return save(self, *arguments, **options)

    with (
        patch.object(directory.RunDirectory, "write_last", save_or_fail),
        patch.object(trainer.Trainer, "_step", step_or_fail),
    ):
        yield


def run(arguments: list[str]) -> int:
    """The exit code of a command line."""
    with patch.object(sys, "argv", ["tinylm", *arguments]):
        try:
            main()
        except SystemExit as error:
            return int(error.code or 0)
    return 0


def run_forked(arguments: list[str]) -> int:
    """The exit code of a command line in a process of its own."""
    child = os.fork()
    if child == 0:
        sys.exit(run(arguments))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    cases, codes = Path(sys.argv[1]), Path(sys.argv[2])
    code, own, lines = 0, int(os.environ["RANK"]), json.loads(cases.read_text())
    for number, (fault, rank, step, attempt, arguments) in enumerate(lines):
        fails = fault != "none" and rank == own and attempt in (None, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        with fail_from(step, fault) if fails else contextlib.nullcontext():
            code = run(arguments) if len(lines) == 1 else run_forked(arguments)
        (codes / f"{number}-{own}").write_text(str(code))
        if code and attempt is not None:
            break
    sys.exit(code)
