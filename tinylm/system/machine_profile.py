"""The machine profile: measurements of this machine, each made once (decision 020).

A measurement that affects results must not be repeated, since it varies with the load. Each is a JSON file in the cache
folder machine/. The file name contains a digest of the measurement's identity: everything that its result depends on.
"""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinylm.errors import TinyLMError
from tinylm.reporter import Reporter
from tinylm.system.files import is_private, is_system_failure, private_folder, read_json, write_text

FORMAT = 1  # of the profile; increase it when a measurement or its method changes
MAX_BYTES = 1 << 16
LOCK_SECONDS = 20.0  # longest wait for another process that is measuring
UNRECORDED = "Until then the machine is measured at each start, and the same settings may give different results."
PROCESSOR_FIELDS = (
    *("vendor_id", "cpu family", "model", "model name", "stepping"),  # x86
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part"),  # ARM
)


@dataclass(frozen=True)
class Measurement:
    """Numbers that are measured once per machine, and recorded in a file.

    name: name of the measurement, with which the file name begins.
    identity: everything that the numbers depend on, as JSON values; if one changes, the numbers are measured again.
    bounds: the smallest and the largest plausible value of each number. Measured values are clamped to the bounds, and
        a file with values outside of the bounds is ignored and replaced.
    """

    name: str
    identity: Mapping[str, Any]
    bounds: Mapping[str, tuple[float, float]]

    def get(self, measure: Callable[[], Mapping[str, float]], reporter: Reporter | None = None) -> dict[str, float]:
        """The recorded values. If there are none, they are measured with `measure` and recorded.

        If the cache folder cannot be used, or the file cannot be read or written, each call measures them, and the
        reporter receives a warning.
        """
        try:
            file = self._file()
            values = self._read(file)
        except TinyLMError as error:
            if reporter is not None:
                reporter.warn(f"{error} {UNRECORDED}")
            return self._clamped(measure())
        if values is not None:
            return values
        if reporter is not None:
            reporter.note("Measuring this machine, once...")
        with _locked(file):
            values = self._read_written(file)
            if values is None:
                measured = self._clamped(measure())
                values = self._read_written(file) or measured  # again, since waiting for the lock has a limit
                try:
                    self.write(values)
                except (OSError, TinyLMError) as error:
                    reason = getattr(error, "strerror", None) or error
                    if reporter is not None:
                        reporter.warn(
                            f"Cannot write {file}: {reason}; set TINYLM_CACHE to another folder. {UNRECORDED}"
                        )
        return values

    def refresh(self, measure: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Measure again and record the values.

        Raises TinyLMError without a usable cache folder, and OSError for a failed write.
        """
        with _locked(self._file()):
            values = self._clamped(measure())
            self.write(values)
        return values

    def recorded(self) -> dict[str, float] | None:
        """The recorded values, or `None`. Raises TinyLMError without a usable cache folder or if reading fails."""
        return self._read(self._file())

    def _read_written(self, file: Path) -> dict[str, float] | None:
        """The values that another process has written meanwhile; `None` if there are none or they cannot be read."""
        with contextlib.suppress(TinyLMError):
            return self._read(file)
        return None

    def write(self, values: Mapping[str, float]) -> None:
        """Record the values. Raises TinyLMError without a usable cache folder, and OSError for a failed write."""
        record = {"format": FORMAT, "identity": dict(self.identity), "values": dict(values)}
        write_text(self._file(), json.dumps(record, indent=1) + "\n")

    def _file(self) -> Path:
        key = json.dumps([FORMAT, dict(self.identity), sorted(self.bounds)])
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        return private_folder("machine") / f"{self.name}-{digest}.json"

    def _read(self, file: Path) -> dict[str, float] | None:
        try:
            record = read_json(file, MAX_BYTES) if is_private(file) else None
        except (OSError, ValueError) as error:
            if is_system_failure(error):  # a valid file must not be replaced: other measurements would change results
                raise TinyLMError(f"Cannot read {file}: {getattr(error, 'strerror', error)}.") from error
            return None
        if not isinstance(record, dict):
            return None
        values = record.get("values")
        if (record.get("format"), record.get("identity")) != (FORMAT, dict(self.identity)):
            return None
        if not isinstance(values, dict) or values.keys() != self.bounds.keys():
            return None
        for name, (low, high) in self.bounds.items():
            if type(values[name]) not in (int, float) or not low <= values[name] <= high:
                return None
        return {name: float(value) for name, value in values.items()}

    def _clamped(self, values: Mapping[str, float]) -> dict[str, float]:
        return {name: min(max(float(values[name]), low), high) for name, (low, high) in self.bounds.items()}


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Context manager that lets one process measure at a time, since simultaneous measurements disturb each other.

    After LOCK_SECONDS, and on a file system without locks, it continues without the lock.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(file.with_suffix(".lock"), timeout=LOCK_SECONDS)
    with contextlib.suppress(OSError, NotImplementedError, Timeout):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def identify_processor() -> dict[str, Any]:
    """System, processor model and number of cores that this process may use, as JSON values. Imports no torch."""
    fields = {"system": platform.system(), "architecture": platform.machine()}
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if not name.strip():  # end of the entry of the first core
                break
            if name.strip() in PROCESSOR_FIELDS:
                fields[name.strip()] = value.strip()
    if "model name" not in fields:
        fields["model name"] = platform.processor()
    return {**fields, "cores": usable_cores()}


def usable_cores() -> int:
    """Number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def physical_cores(topology: Path = Path("/sys/devices/system/cpu"), logical: Iterable[int] | None = None) -> int:
    """Number of physical cores that this process may use; `usable_cores()` if the topology cannot be read.

    logical: numbers of the logical cores, by default those that this process may use
    """
    cores = set()
    try:
        for number in os.sched_getaffinity(0) if logical is None else logical:
            folder = topology / f"cpu{number}" / "topology"
            cores.add(tuple((folder / name).read_text() for name in ("physical_package_id", "core_id")))
    except (AttributeError, OSError):
        return usable_cores()
    return len(cores)
