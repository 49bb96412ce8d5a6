"""The machine profile: what was measured about this machine, once (decision 020).

A measurement that steers results must not be repeated, since it differs with the load. Each is a JSON file in the
cache folder machine/, found by the identity of what was measured.
"""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tinylm.cache import is_private, private_folder
from tinylm.errors import TinyLMError
from tinylm.files import read_json, replacing

FORMAT = 1  # of the profile; raise it when what is measured, or how, changes
MOST_BYTES = 1 << 16
LOCK_SECONDS = 20.0  # that a command waits for another that is measuring
UNRECORDED = "Until then this machine is measured at each start, and the same command may give other results."
PROCESSOR_FIELDS = (
    *("vendor_id", "cpu family", "model", "model name", "stepping"),  # of x86
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part"),  # of ARM
)


class Reporter(Protocol):
    """Receives what the user should know."""

    def note(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...


@dataclass(frozen=True)
class Measurement:
    """Values that are measured once for an identity, which is plain JSON: change any part, and it is measured anew.

    `bounds` has the least and the most of each value. A file with any other content is ignored and replaced.
    """

    name: str
    identity: Mapping[str, Any]
    bounds: Mapping[str, tuple[float, float]]

    def get(self, measure: Callable[[], Mapping[str, float]], reporter: Reporter | None = None) -> dict[str, float]:
        """The recorded values; if there are none, what `measure` returns, which is recorded.

        Without a usable cache folder the values are measured at each call, and the reporter is warned.
        """
        try:
            file = self._file()
        except TinyLMError as error:
            if reporter is not None:
                reporter.warn(f"{error} {UNRECORDED}")
            return self._measured(measure)
        values = self._read(file)
        if values is not None:
            return values
        if reporter is not None:
            reporter.note("Measuring this machine, once...")
        with _locked(file):
            values = self._read(file)  # which another process may have written meanwhile
            if values is None:
                values = self._measured(measure)
                try:
                    self.write(values)
                except OSError as error:
                    if reporter is not None:
                        reporter.warn(
                            f"Cannot write {file}: {error.strerror}; set TINYLM_CACHE to another folder. {UNRECORDED}"
                        )
        return values

    def write(self, values: Mapping[str, float]) -> None:
        """Record values. Raises TinyLMError and OSError."""
        with replacing(self._file()) as unfinished:
            record = {"format": FORMAT, "identity": dict(self.identity), "values": dict(values)}
            unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def _file(self) -> Path:
        key = json.dumps([FORMAT, dict(self.identity), sorted(self.bounds)])
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        return private_folder("machine") / f"{self.name}-{digest}.json"

    def _read(self, file: Path) -> dict[str, float] | None:
        try:
            record = read_json(file, MOST_BYTES) if is_private(file) else None
        except (OSError, ValueError):
            return None
        if not isinstance(record, dict):
            return None
        values = record.get("values")
        if (record.get("format"), record.get("identity")) != (FORMAT, dict(self.identity)):
            return None
        if not isinstance(values, dict) or values.keys() != self.bounds.keys():
            return None
        for name, (least, most) in self.bounds.items():
            if type(values[name]) not in (int, float) or not least <= values[name] <= most:
                return None
        return {name: float(value) for name, value in values.items()}

    def _measured(self, measure: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        measured = measure()
        return {name: min(max(float(measured[name]), least), most) for name, (least, most) in self.bounds.items()}


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Let one process measure at a time, where the file system has locks: two at once would disturb each other."""
    from filelock import FileLock, Timeout

    lock = FileLock(file.with_suffix(".lock"), timeout=LOCK_SECONDS)
    with contextlib.suppress(OSError, NotImplementedError, Timeout):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def identify_processor() -> dict[str, Any]:
    """The processor and how much of it this process may use, as JSON; found without importing torch."""
    fields = {"system": platform.system(), "architecture": platform.machine()}
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if not name.strip():  # ends the first of the cores
                break
            if name.strip() in PROCESSOR_FIELDS:
                fields[name.strip()] = value.strip()
    if "model name" not in fields:
        fields["model name"] = platform.processor()
    return {**fields, "cores": usable_cores()}


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
