"""One process at a time writes a run."""

import errno
import os
from pathlib import Path
from typing import Any

import filelock
import pytest

from tinylm.errors import TinyLMError, UsageError
from tinylm.run_directory.lock_and_commit import lock_run


@pytest.mark.skipif(os.name != "posix", reason="on Windows the lock is released first")
def test_a_locked_run_is_a_usage_error_until_the_lock_is_released_and_its_file_deleted(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_run(tmp_path / "run"):
            assert [entry.name for entry in tmp_path.iterdir()] == [".run.tinylm-lock"]
            words = r"Another process is writing .*run; wait until it ends"
            with pytest.raises(UsageError, match=words), lock_run(tmp_path / "run"):
                pass
        assert list(tmp_path.iterdir()) == []


def test_on_windows_the_lock_is_released_before_its_file_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows cannot delete an open file."""
    order: list[str] = []
    release, unlink = filelock.FileLock.release, Path.unlink
    monkeypatch.setattr(filelock.FileLock, "release", lambda self: (order.append("release"), release(self))[1])
    monkeypatch.setattr(Path, "unlink", lambda self, **options: (order.append("delete"), unlink(self, **options))[1])
    with lock_run(tmp_path / "run", windows=True):
        pass
    assert order[:2] == ["release", "delete"]


def test_a_path_without_a_name_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("", "..", "."):
        with pytest.raises(UsageError, match="cannot be the name of a run directory"), lock_run(Path(name)):
            pass


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.ENOENT])
def test_a_lock_file_that_cannot_be_created_is_not_reported_as_another_process(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc is an example of ENOENT, which filelock reports as contention."""

    def fail(path: str, *arguments: Any, **options: Any) -> int:
        raise OSError(code, os.strerror(code), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        reason = "" if code == errno.ENOENT else rf": {os.strerror(code)}; choose another `out`"
        words = rf"^Cannot write .*run: cannot create .*\.run\.tinylm-lock{reason}"
        with pytest.raises(TinyLMError, match=words) as caught, lock_run(tmp_path / "run"):
            pass
    assert not isinstance(caught.value, UsageError)


@pytest.mark.skipif(os.name != "posix", reason="links need privileges elsewhere")
def test_a_link_in_the_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".run.tinylm-lock").symlink_to(tmp_path / "target")
    with pytest.raises(TinyLMError, match="Cannot write"), lock_run(tmp_path / "run"):
        pass
    assert not (tmp_path / "target").exists()
