"""Entry point: sets up signal handlers, streams and torch's environment, then imports and runs the command line.

Functions import what they need, since a Ctrl-C during an import at the top would end in a traceback.
"""

import os
import sys

TORCH_COMMANDS = (  # `import` and `export` also import torch, but without these settings
    "train",
    "sample",
    "chat",
    "serve",
    "eval",
    "compare",
    "finetune-lora",
    "finetune-adapter",
    "merge-lora",
    "report",
    "doctor",
)
SHARED_COMMANDS = ("train", "finetune-lora", "finetune-adapter", "eval")  # torchrun can run these in several processes
HELP_FLAGS = {"--help", "-h", "--version"}


def main() -> None:
    """Run the command line with this process's arguments and streams."""
    import _signal as signal  # type: ignore[import-not-found]  # `signal` itself first imports enum for milliseconds

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # during the next import; there is nothing to clean up yet
    from tinylm.system.process_signals import run_with_signal_handlers

    run_with_signal_handlers(_main)


def _main() -> None:
    from tinylm.commands.streams import prepare_streams, silence_stream

    command, *options = sys.argv[1:] or ["--help"]
    asks_for_help = bool(HELP_FLAGS & {command, *options})
    if command in SHARED_COMMANDS and not asks_for_help and not _is_first_rank():
        silence_stream("stdout")
        if "--debug" not in options and not _has_own_log():
            silence_stream("stderr")
    prepare_streams()
    if command in TORCH_COMMANDS and not asks_for_help:
        _prepare_torch()
    from tinylm.cli import app

    app()


def _is_first_rank() -> bool:
    """Whether this process is rank 0. True for an invalid environment, so that the command prints the error."""
    from tinylm.errors import UsageError
    from tinylm.system.ranks import Launch

    try:
        return Launch.of(os.environ).rank == 0
    except UsageError:
        return True


def _has_own_log() -> bool:
    """Whether torchrun writes the stderr of this rank to a file of its own (--redirects or --tee)."""
    from pathlib import Path

    folder = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent  # also the folder of the log files
    try:
        return os.path.samestat(os.fstat(2), (folder / "stderr.log").stat())
    except OSError:
        return False


def _prepare_torch() -> None:
    """Before torch is imported: run the garbage collector less often, and not at exit; set the environment variables of
    torch's compilers and of OpenMP, which reads them when it is loaded, unless the user has set them.

    Importing torch creates more than a hundred thousand objects that are never freed. Collections during the import and
    at exit would search them all, which takes up to a second (decision 018).
    """
    import atexit
    import contextlib
    import gc

    from tinylm.errors import TinyLMError
    from tinylm.kernels.process import set_spin_count, use_private_folders

    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    set_spin_count()
    with contextlib.suppress(TinyLMError):  # raised again when something is compiled
        use_private_folders()


if __name__ == "__main__":
    main()
