"""One process at a time writes a run."""

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import filelock
import pytest

from tinylm.errors import TinyLMError, UsageError
from tinylm.run_directory.lock import lock_run


@pytest.mark.skipif(os.name != "posix", reason="on Windows the lock is released first")
def test_the_lock_is_released_and_its_file_deleted(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_run(tmp_path / "run"):
            assert [entry.name for entry in tmp_path.iterdir()] == [".run.tinylm-lock"]
        assert list(tmp_path.iterdir()) == []


def test_on_windows_the_lock_is_released_before_its_file_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows cannot delete an open file."""
    order: list[str] = []
    release, unlink = filelock.FileLock.release, Path.unlink
    monkeypatch.setattr("tinylm.run_directory.lock.WINDOWS", True)
    monkeypatch.setattr(filelock.FileLock, "release", lambda self: (order.append("release"), release(self))[1])
    monkeypatch.setattr(Path, "unlink", lambda self, **options: (order.append("delete"), unlink(self, **options))[1])
    with lock_run(tmp_path / "run"):
        pass
    assert order[:2] == ["release", "delete"]


def lock_in_another_process(path: Path, locked: Any, release: Any) -> None:
    with lock_run(path):
        locked.set()
        release.wait(60)


def test_a_run_locked_by_another_process_is_a_usage_error(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    locked, release = spawn.Event(), spawn.Event()
    process = spawn.Process(target=lock_in_another_process, args=(tmp_path / "run", locked, release))
    process.start()
    try:
        assert locked.wait(60)
        with (
            pytest.raises(UsageError, match=r"Another process is writing .*run; wait until it ends"),
            lock_run(tmp_path / "run"),
        ):
            pass
    finally:
        release.set()
        process.join(60)


@pytest.mark.parametrize("name", ["", "..", "."])
def test_a_path_without_a_name_is_a_usage_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="cannot be the name of a run directory"), lock_run(Path(name)):
        pass


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG, errno.ENOSPC])
def test_a_lock_file_that_cannot_be_created_is_not_reported_as_another_process(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, *arguments: Any, **options: Any) -> int:
        raise OSError(code, os.strerror(code), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        words = rf"^Cannot write .*run: cannot create .*\.run\.tinylm-lock: {os.strerror(code)}; choose another `out`"
        with pytest.raises(TinyLMError, match=words) as caught, lock_run(tmp_path / "run"):
            pass
    assert not isinstance(caught.value, UsageError)


def test_a_file_system_that_creates_no_files_is_not_reported_as_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is /proc: creating a file there fails with "no such file", which filelock reports as contention."""

    def vanish(path: str, *arguments: Any, **options: Any) -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", vanish)
        words = r"Cannot write .*run: cannot create .*tinylm-lock"
        with pytest.raises(TinyLMError, match=words), lock_run(tmp_path / "run"):
            pass


@pytest.mark.skipif(os.name != "posix", reason="links need privileges elsewhere")
def test_a_link_in_the_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".run.tinylm-lock").symlink_to(tmp_path / "target")
    with pytest.raises(TinyLMError, match="Cannot write"), lock_run(tmp_path / "run"):
        pass
    assert not (tmp_path / "target").exists()
