"""The lock that lets one process at a time write a run."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tinylm.errors import TinyLMError, UsageError
from tinylm.run_directory.layout import lock_file
from tinylm.system.process_signals import temporary

WINDOWS = os.name == "nt"


@contextlib.contextmanager
def lock_run(path: Path) -> Iterator[None]:
    """Context manager that locks the run at `path` against other processes that write it.

    The operating system releases the lock when the process ends for any reason. A symbolic link at the path of the lock
    file is not followed.

    Raises UsageError if another process holds the lock or `path` has no name, and TinyLMError if the lock file cannot
    be created.
    """
    from filelock import FileLock, Timeout

    if path.name in ("", ".."):
        raise UsageError(f"{path} cannot be the name of a run directory; choose another `out`.")
    lock = FileLock(lock_file(path), timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        # On file systems such as /proc, filelock reports a failure to create the file as a held lock.
        if not os.path.lexists(lock.lock_file):
            raise TinyLMError(f"Cannot write {path}: cannot create {lock.lock_file}; choose another `out`.") from None
        raise UsageError(f"Another process is writing {path}; wait until it ends, or choose another `out`.") from None
    except OSError as error:
        raise TinyLMError(
            f"Cannot write {str(path)[:200]}: cannot create {_failed_path(error, path)}: {error.strerror}; choose "
            "another `out`."
        ) from error
    try:
        with temporary(Path(lock.lock_file)):
            yield
    finally:
        if WINDOWS:  # an open file cannot be deleted there
            lock.release()
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _failed_path(error: OSError, path: Path) -> str:
    """The path of the file or folder that could not be created, cut to 200 characters."""
    return str(error.filename or lock_file(path))[:200]
