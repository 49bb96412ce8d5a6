"""TensorBoard: event files, written by tensorboardX."""

import sys
import time
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
FLUSH_SECONDS = 1.0  # minimum time between two writes to the disk


class TensorBoard:
    """Writes scalars to a new event file in `folder`/<name of the run>.

    folder: default: tensorboard/ in the current directory. run: the result of `describe_run`.

    The first event of a session is a `SessionLog.START` with the first step of the session. TensorBoard then drops the
    points of earlier sessions from that step on: all for a new run; for a resumed run, those after the step that it
    continues from.

    tensorboardX's SummaryWriter is not used: its thread ends when the disk is full, and then its queue blocks.
    """

    def __init__(self, folder: str | None, run: dict[str, Any]) -> None:
        # tensorboardX imports torch if it is installed, which takes seconds and hundreds of megabytes. `None` makes
        # the import fail; the annotation of sys.modules allows modules only.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        place = Path(folder or FOLDER) / run["name"]
        place.mkdir(parents=True, exist_ok=True)
        # Sessions that begin in the same second have different files, which sort by time.
        self._writer = EventsWriter(str(place / "events"), f".{time.time_ns()}")
        first = 0 if run["step"] is None else run["step"] + 1
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=first, session_log=start))
        self._flushed = 0.0

    def log(self, step: int, values: dict[str, float], time: float) -> None:
        """Write an event with all values. time: in seconds since 1970."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.write_event(self._event(wall_time=time, step=step, summary=self._summary(value=scalars)))
        if time >= self._flushed + FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()
