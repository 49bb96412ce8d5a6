"""Entry point of the program: makes the settings that must precede all other imports, then runs the command line."""

import atexit
import contextlib
import gc
import os
import sys

from tinylm.process_signals import run_with_signal_handlers
from tinylm.streams import prepare_streams, silence_streams

TORCH_COMMANDS = ("train", "sample", "chat", "eval", "finetune-lora", "finetune-adapter", "merge-lora")
HELP_FLAGS = {"--help", "-h", "--version"}


def main() -> None:
    """Run the command line with this process's arguments and streams."""
    run_with_signal_handlers(_main)


def _main() -> None:
    if os.environ.get("RANK", "0") != "0" and "MASTER_ADDR" in os.environ and "--debug" not in sys.argv:
        silence_streams()  # torchrun started several processes, and the first one reports
    prepare_streams()
    command, *options = sys.argv[1:] or ["--help"]
    if not HELP_FLAGS & {command, *options}:
        _reduce_garbage_collection()
        if command in TORCH_COMMANDS:
            _set_torch_environment()
    from tinylm.cli import app

    app()


def _reduce_garbage_collection() -> None:
    """Run the garbage collector less often, and not at exit.

    Importing torch creates more than a hundred thousand objects that are never freed. Collections during the import and
    at exit would search them all, which takes up to a second (decision 018).
    """
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)


def _set_torch_environment() -> None:
    """Set the environment variables that torch and its libraries read when they are loaded, unless the user has."""
    from tinylm.errors import TinyLMError
    from tinylm.kernels.compiler_cache import use_private_folders
    from tinylm.kernels.openmp_spin import SPIN_VARIABLES, choose_spin_count

    if not any(name in os.environ for name in SPIN_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(choose_spin_count())
    with contextlib.suppress(TinyLMError):  # raised again when something is compiled
        use_private_folders()


if __name__ == "__main__":
    main()
