"""How the program starts. What it must settle before anything else is imported is settled here."""

import atexit
import contextlib
import gc
import os
import signal
import sys

COMPUTING = ("train", "sample", "eval", "finetune-lora", "finetune-adapter", "merge-lora")
SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # either of which settles it, where the user has set it


def main() -> None:
    """Run the command line on this process's arguments and streams."""
    interrupt = signal.getsignal(signal.SIGINT)
    # While Python imports, a Ctrl-C would end in a traceback from wherever it was; nothing is lost by ending at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_closed_streams()
    # torch's import makes more than a hundred thousand objects that all stay. Looking through them for garbage
    # meanwhile, and once more at the end of the process, takes up to a second (decision 018).
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    if _will_compute(sys.argv[1:]):
        _prepare_torch()
    from tinylm.cli import app

    signal.signal(signal.SIGINT, interrupt)
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


def _open_closed_streams() -> None:
    """A stream that the shell closed (`2>&-`) leads nowhere; left closed, the next file opened would take its number.

    A path may hold bytes that are not UTF-8: they go out as they came, or in a message escaped.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors=errors)


if __name__ == "__main__":
    main()
