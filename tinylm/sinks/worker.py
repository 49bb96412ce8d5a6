"""The process of a tracker: reads records, which are JSON lines, from stdin and logs them to the tracker's library.

The first record has the tracker's `name`, `folder` and `run` (see `open_tracker`), the others `step`, `values` and
`time`. An empty record is the last one. The process also ends when stdin is closed. It writes messages as JSON lines to
stdout, each with the key `note` or `problem`.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

EXIT_SECONDS = 60.0  # after the last record; longer than FINISH_SECONDS, after which training kills the process

Values = dict[str, float]
Note = Callable[[str], None]


class Tracker(Protocol):
    """Logs metrics to the library of a tracker. The methods may raise any exception."""

    def log(self, step: int, values: Values, time: float) -> None:
        """Log numbers, by name, at a step. time: in seconds since 1970."""
        ...

    def finish(self) -> None:
        """Write or upload what is left."""
        ...


def open_tracker(name: str, folder: str | None, run: dict[str, Any], note: Note, problem: Note) -> Tracker:
    """Import the library of a tracker, and begin or continue a run in it.

    name: tensorboard, wandb or trackio. folder: of TensorBoard's event files; unused by the other trackers.
    run: the result of `describe_run`. note, problem: called with messages for the user.

    Raises any exception of the library.
    """
    if name == "tensorboard":
        from tinylm.sinks.tensorboard import TensorBoard

        return TensorBoard(folder, run)
    if name == "wandb":
        from tinylm.sinks.wandb import Wandb

        return Wandb(run, note)
    from tinylm.sinks.trackio import Trackio

    return Trackio(run, problem)


def main() -> None:
    """Log records until the last one, then exit with 0; after an exception, report it and exit with 1."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")  # not inherited by processes that libraries start
    os.dup2(2, 1)  # what libraries print is not part of the output of the training

    def send(kind: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the training has ended
            messages.write(json.dumps({kind: text}) + "\n")
            messages.flush()

    code = 0
    try:
        first = json.loads(sys.stdin.readline())
        tracker = open_tracker(
            **first, note=lambda text: send("note", text), problem=lambda text: send("problem", text)
        )
        for line in sys.stdin:
            record = json.loads(line)
            if not record:
                break
            tracker.log(**record)
        _limit_exit()
        tracker.finish()
    except BaseException as error:  # SystemExit, too
        _limit_exit()
        send("problem", f"{type(error).__name__}: {error}")
        code = 1
    raise SystemExit(code)


def _limit_exit() -> None:
    """End the process after EXIT_SECONDS, even if the library blocks."""
    timer = threading.Timer(EXIT_SECONDS, os._exit, [1])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
