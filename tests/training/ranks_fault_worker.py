"""A process of torchrun that runs the command line, with a fault on one rank from one step on.

    ranks_fault_worker.py FAULT RANK STEP ARGUMENTS...

FAULT: `error` raises an exception in the forward pass, `disk` is a full disk at each save.
"""

import errno
import os
import sys
from typing import Any

from tinylm.__main__ import main
from tinylm.run_directory import directory
from tinylm.training import trainer


def fail_from(step: int, fault: str) -> None:
    """Replace the method that fails."""
    accumulate, save = trainer.Trainer._accumulate_once, directory.RunDirectory.write_last

    def accumulate_or_fail(self: trainer.Trainer, *arguments: Any) -> Any:
        if self.state.step >= step:
            raise RuntimeError("injected")
        return accumulate(self, *arguments)

    def save_or_fail(self: directory.RunDirectory, *arguments: Any, **options: Any) -> dict[str, str]:
        if arguments[3]["step"] >= step:
            directory.write_tensors = full_disk
        return save(self, *arguments, **options)

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "optimizer.safetensors")

    if fault == "error":
        trainer.Trainer._accumulate_once = accumulate_or_fail
    else:
        directory.RunDirectory.write_last = save_or_fail


if __name__ == "__main__":
    fault, rank, step, *arguments = sys.argv[1:]
    if os.environ["RANK"] == rank:
        fail_from(int(step), fault)
    sys.argv = ["tinylm", *arguments]
    main()
