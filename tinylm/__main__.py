"""How the program starts. What it must settle before anything else is imported is settled here."""

import atexit
import contextlib
import gc
import os
import sys

from tinylm.interrupts import run_interruptibly
from tinylm.streams import prepare_streams

COMPUTING = ("train", "sample", "eval", "finetune-lora", "finetune-adapter", "merge-lora")
SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # either of which settles it, where the user has set it


def main() -> None:
    """Run the command line on this process's arguments and streams."""
    run_interruptibly(_main)


def _main() -> None:
    prepare_streams()
    # torch's import makes more than a hundred thousand objects that all stay. Looking through them for garbage
    # meanwhile, and once more at the end of the process, takes up to a second (decision 018).
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    if _will_compute(sys.argv[1:]):
        _prepare_torch()
    from tinylm.cli import app

    app()


def _will_compute(arguments: list[str]) -> bool:
    """Whether a command will load torch's threads; help, lists and versions measure nothing and change nothing."""
    return bool(arguments) and arguments[0] in COMPUTING and not {"--help", "-h"} & {*arguments}


def _prepare_torch() -> None:
    """Set what torch and its libraries read when they are loaded."""
    from tinylm.compiler import use_private_folders
    from tinylm.errors import TinyLMError
    from tinylm.spinning import choose_spin_count

    if not any(name in os.environ for name in SPINNING):
        os.environ["GOMP_SPINCOUNT"] = str(choose_spin_count())
    with contextlib.suppress(TinyLMError):  # it is raised again before anything is compiled
        use_private_folders()


if __name__ == "__main__":
    main()
