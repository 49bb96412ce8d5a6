"""Starts a tracker in a process of its own, and exchanges messages with it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

MAX_QUEUED = 10_000  # records in the queue to the process
JOIN_SECONDS = 1.0  # for each thread to handle the rest, after the process has ended
TAIL = 4096  # last bytes of standard error in which `exit_reason` looks for a line
CREATE_NEW_PROCESS_GROUP = 0x200  # Windows

Message = dict[str, Any]


class TrackerProcess:
    """Runs `tinylm.sinks.worker` in a process group of its own, so that Ctrl-C in a terminal does not reach it.

    first: the first record for the process; see `tinylm.sinks.worker`.

    The process has the `sys.path` of this one. Raises OSError if it cannot be started. The methods do not raise.
    `finish` waits for the process; the other methods take at most 2 * JOIN_SECONDS.
    """

    def __init__(self, first: Message) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        own_group: dict[str, Any] = {"start_new_session": True}
        if os.name == "nt":
            own_group = {"creationflags": CREATE_NEW_PROCESS_GROUP}
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "tinylm.sinks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                **own_group,
            )
        except OSError:
            self._errors.close()
            raise
        self._records: queue.Queue[Message] = queue.Queue(MAX_QUEUED)
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._records.put(first)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._reader.start()
        self._writer.start()

    def send(self, record: Message) -> bool:
        """Queue a record for the process. Returns False if the queue is full."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            return False
        return True

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process: negative for a signal, `None` while it runs."""
        return self._child.poll()

    def messages(self) -> Iterator[Message]:
        """Yield the messages of the process since the last call, each with the key `note` or `problem`."""
        if self.exit_code is not None:
            self._reader.join(JOIN_SECONDS)
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._messages.get_nowait()

    def exit_reason(self) -> str:
        """Why the process has ended: the signal, or the last line of its standard error, or the exit code."""
        code = self.exit_code or 0
        if code < 0:
            return f"its process was ended by signal {-code}"
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - TAIL))
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"its process ended with exit code {code}")

    def finish(self, seconds: float) -> bool:
        """Send the last record, wait at most `seconds` for the process to end, and then kill it.

        Returns False if the process was killed.
        """
        deadline = time.monotonic() + seconds
        try:
            self._records.put({}, timeout=seconds)
            self._child.wait(max(0.0, deadline - time.monotonic()))
        except (queue.Full, subprocess.TimeoutExpired):
            return False
        finally:
            self._kill()
        return True

    def close(self) -> None:
        """Release the files, after `finish`."""
        self._writer.join(JOIN_SECONDS)
        self._reader.join(JOIN_SECONDS)
        self._errors.close()

    def _kill(self) -> None:
        """Kill the process if it still runs, with its process group (on Windows, alone)."""
        if self._child.poll() is None:
            with contextlib.suppress(OSError):
                if os.name == "nt":
                    self._child.kill()
                else:
                    os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def _write(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError), self._child.stdin as stdin:
            record: Message = {"": None}
            while record:
                record = self._records.get()
                stdin.write(json.dumps(record).encode() + b"\n")
                stdin.flush()
        while record:  # the process has ended: empty the queue, so that `finish` does not wait for room in it
            record = self._records.get()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with contextlib.suppress(OSError, ValueError), self._child.stdout as stdout:
            for line in stdout:
                self._messages.put(json.loads(line))
