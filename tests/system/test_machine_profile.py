"""The machine profile: values are measured once, then read from a file; an invalid file is ignored and replaced."""

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tinylm.system import machine_profile as module
from tinylm.system.files import private_folder
from tinylm.system.machine_profile import Measurement, identify_processor, physical_cores, usable_cores

BOUNDS = {"fast": (1.0, 1e6), "slow": (0.0, 10.0)}
VALUES = {"fast": 1234.5, "slow": 0.1 + 0.2}
AGAIN = {"fast": 2.0, "slow": 2.0}


class Reported:
    """A reporter that keeps its notes and warnings."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.note, self.warn = self.notes.append, self.warnings.append


def entry(**identity: object) -> Measurement:
    return Measurement("speeds", {"processor": "a", **identity}, BOUNDS)


never = Mock(side_effect=AssertionError("measured again"))


def only_file() -> Path:
    (file,) = private_folder("machine").glob("speeds-*.json")
    return file


def test_recorded_values_are_read_exactly_and_others_are_measured_again() -> None:
    reported = Reported()
    assert entry().get(lambda: VALUES, reported) == VALUES
    assert entry().get(never, reported) == VALUES
    assert reported.notes == ["Measuring this machine, once..."]
    assert reported.warnings == []
    assert stat.S_IMODE(only_file().stat().st_mode) == 0o600
    assert entry(processor="c").get(lambda: {"fast": float("inf"), "slow": -1.0}) == {"fast": 1e6, "slow": 0.0}
    assert entry(processor="b").get(lambda: AGAIN) == AGAIN
    assert Measurement("speeds", {"processor": "a"}, {"fast": (1.0, 3.0)}).get(lambda: AGAIN) == {"fast": 2.0}
    assert entry().get(never) == VALUES


def with_values(**values: object) -> Callable[[dict[str, object]], str]:
    return lambda record: json.dumps({**record, "values": {**VALUES, **values}})


DAMAGE: list[Callable[[dict[str, object]], str]] = [
    lambda record: "",
    lambda record: json.dumps(record)[:-9],
    lambda record: "[" * 100_000,
    lambda record: json.dumps(record) + " " * (module.MAX_BYTES + 1),
    lambda record: "[]",
    lambda record: json.dumps({**record, "values": []}),
    lambda record: json.dumps({**record, "format": "1"}),
    lambda record: json.dumps({**record, "format": module.FORMAT + 1}),
    lambda record: json.dumps({**record, "identity": {"processor": "b"}}),
    lambda record: json.dumps({**record, "values": {"fast": 1234.5}}),
    with_values(more=1.0),
    *(with_values(fast=value) for value in ("1234", True, None, float("nan"), float("inf"), -5, 10**400)),
    lambda record: json.dumps(record).replace("1234.5", "1" * 10_000),
    lambda record: json.dumps(record).replace("1234.5", "1e999"),
    lambda record: "\udcff",  # not UTF-8
]


def test_a_forged_or_damaged_file_is_ignored_and_replaced() -> None:
    for damage in DAMAGE:
        entry().write(VALUES)
        record = json.loads(only_file().read_text())
        only_file().write_text(damage(record), errors="surrogateescape")
        assert entry().get(lambda: AGAIN) == AGAIN
        assert entry().get(never) == AGAIN


def test_a_file_that_others_can_write_is_not_trusted_and_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    entry().write(VALUES)
    only_file().chmod(0o666)
    assert entry().get(lambda: AGAIN) == AGAIN
    assert stat.S_IMODE(only_file().stat().st_mode) == 0o600
    entry().write(VALUES)
    file = only_file()
    file.rename(tmp_path / "target")
    file.symlink_to(tmp_path / "target")
    assert entry().get(lambda: AGAIN) == AGAIN
    assert not file.is_symlink()
    assert json.loads((tmp_path / "target").read_text())["values"] == VALUES


def test_without_a_private_cache_folder_each_call_measures_and_warns_once() -> None:
    private_folder("machine").chmod(0o777)
    for _ in range(2):
        reported = Reported()
        assert entry().get(lambda: VALUES, reported) == VALUES
        (warning,) = reported.warnings
        assert "Other users can write to the cache folder" in warning
        assert "the same settings may give different results" in warning
    assert list((Path(os.environ["TINYLM_CACHE"]) / "machine").glob("speeds-*")) == []


def test_a_file_that_cannot_be_read_is_kept_or_written_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    entry().get(lambda: VALUES)
    reported = Reported()
    with monkeypatch.context() as patch:
        patch.setattr(module, "read_json", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert entry().get(lambda: AGAIN, reported) == AGAIN
    assert len(reported.warnings) == 1 and "Too many open files" in reported.warnings[0]
    assert entry().get(never) == VALUES

    def measure() -> dict[str, float]:
        private_folder("machine").chmod(0o777)
        return VALUES

    only_file().unlink()
    first, second = Reported(), Reported()
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_text", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        assert entry().get(lambda: VALUES, first) == VALUES
    assert entry().get(measure, second) == VALUES
    ((disk,), (folder,)) = first.warnings, second.warnings
    assert "No space left on device" in disk and "set TINYLM_CACHE" in disk
    assert "Cannot write" in folder and "not trusted" in folder


def test_processes_that_start_together_use_one_measurement() -> None:
    measured, found, begin = [], [], threading.Barrier(4, timeout=20)

    def measure() -> dict[str, float]:
        measured.append(threading.get_ident())
        time.sleep(0.2)  # until all have found no file
        return {"fast": float(len(measured)), "slow": 0.0}

    def start() -> None:
        begin.wait()
        found.append(entry().get(measure))

    starts = [threading.Thread(target=start, daemon=True) for _ in range(4)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join(timeout=30)
    assert found == [{"fast": 1.0, "slow": 0.0}] * 4


def test_of_two_measurements_without_file_locks_the_first_recorded_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_slowly() -> dict[str, float]:
        entry().write(VALUES)  # by the other process
        return AGAIN

    monkeypatch.setattr("filelock.FileLock.acquire", Mock(side_effect=NotImplementedError("no locks")))
    assert entry(processor="b").get(lambda: AGAIN) == entry(processor="b").get(never) == AGAIN
    assert entry().get(measure_slowly) == entry().get(never) == VALUES


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
def test_the_processor_has_the_name_that_the_system_gives_it() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    found = identify_processor()
    assert found == identify_processor() == json.loads(json.dumps(found))
    assert {found["model name"]} == named or not named
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert identify_processor()["cores"] == 1
    finally:
        os.sched_setaffinity(0, cores)


def test_two_threads_of_one_core_are_one_physical_core(tmp_path: Path) -> None:
    for number, (package, core) in enumerate([(0, 0), (0, 1), (1, 0), (0, 0), (0, 1), (1, 0)]):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert physical_cores(tmp_path, {0, 1, 2, 3, 5}) == 3
    assert physical_cores(tmp_path, {0, 3}) == 1
    assert physical_cores(tmp_path / "absent") == usable_cores()  # without a description
