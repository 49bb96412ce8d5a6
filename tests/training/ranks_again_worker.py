"""A process of torchrun that trains again after two calls have failed on rank 0: at the start, and while training."""

import sys
from pathlib import Path
from typing import Any

import tinylm
from tinylm.errors import TinyLMError

SETTINGS: dict[str, Any] = {"steps": 4, "layers": 1, "heads": 2, "width": 16, "context": 16, "compile": "off"}


class Fault(Exception):
    """Raised by a callback, which rank 0 calls."""


def fail(event: object) -> None:
    if type(event).__name__ == "Stepped":
        raise Fault


def main(text: str, out: Path) -> None:
    """Prints the error of each call, and the number of steps of the last one."""
    errors = []
    for files, callbacks in (([text + ".missing"], []), ([text], [fail])):
        try:
            tinylm.train(files, out, callbacks=callbacks, **SETTINGS)
        except (TinyLMError, Fault) as error:
            errors.append(type(error).__name__)
    result = tinylm.train([text], out, force=True, **SETTINGS)
    sys.stdout.write(f"{' '.join(errors)} {result.step}\n")  # in one piece: both ranks write to one pipe


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
