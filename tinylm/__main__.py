"""How the program starts. What it must settle before anything else is imported is settled here."""

import atexit
import gc
import os
import signal
import sys


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
    if "GOMP_SPINCOUNT" not in os.environ:
        from tinylm.spinning import choose_spin_count

        os.environ["GOMP_SPINCOUNT"] = str(choose_spin_count())
    from tinylm.cli import app

    signal.signal(signal.SIGINT, interrupt)
    app()


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
