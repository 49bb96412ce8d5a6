"""How the program starts. What it must settle before anything else is imported is settled here."""

import atexit
import gc
import os

from tinylm.interrupts import run_interruptibly
from tinylm.streams import prepare_streams


def main() -> None:
    """Run the command line on this process's arguments and streams."""
    run_interruptibly(_main)


def _main() -> None:
    prepare_streams()
    # torch's import makes more than a hundred thousand objects that all stay. Looking through them for garbage
    # meanwhile, and once more at the end of the process, takes up to a second (decision 018).
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    if "GOMP_SPINCOUNT" not in os.environ:
        from tinylm.spinning import choose_spin_count

        os.environ["GOMP_SPINCOUNT"] = str(choose_spin_count())
    from tinylm.cli import app

    app()


if __name__ == "__main__":
    main()
