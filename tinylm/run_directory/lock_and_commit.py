"""Creating, replacing and locking a run, so that after a kill at any instant the old run or the new one can be read.

A run is replaced by two renames, and so is its `last/`. After a kill between the two, the `recover_` functions finish
the replacement or undo it.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tinylm.errors import RunExistsError, TinyLMError, UsageError, concerning
from tinylm.run_directory.layout import (
    ADAPTER_FILE,
    MODEL_FILE,
    RUN_FILES,
    RUN_FOLDERS,
    lock_file,
    replaced_directory,
    staging_directory,
)
from tinylm.system.files import flush_folder, is_link, is_unfinished, remove_tree, replace_folder, resolve_links
from tinylm.system.process_signals import temporary


@contextlib.contextmanager
def lock_run(path: Path, *, windows: bool = os.name == "nt") -> Iterator[None]:
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
            f"Cannot write {str(path)[:200]}: cannot create {str(error.filename or lock_file(path))[:200]}: "
            f"{error.strerror}; choose another `out`."
        ) from error
    try:
        with temporary(Path(lock.lock_file)):
            yield
    finally:
        if windows:  # an open file cannot be deleted there
            lock.release()
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def reserve(path: Path, force: bool) -> Iterator[Path]:
    """Context manager that locks `path` for a new run and checks that it is free (see `check_free`).

    Yields the path of the hidden directory in which the run is to be prepared. At the end, this directory and the empty
    parent directories that were created are deleted; after a commit there are none.

    Raises UsageError if `path` is not free or another process is writing there, and TinyLMError if nothing can be
    written there.
    """
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    try:
        with lock_run(path):
            check_free(path, force)
            try:
                with temporary(staging_directory(path)):
                    yield staging_directory(path)
            finally:
                shutil.rmtree(staging_directory(path), ignore_errors=True)
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # raised if it is not empty
                folder.rmdir()


@concerning("out")
def check_free(path: Path, force: bool) -> None:
    """Raise UsageError if a new run must not be written to `path`; it is a RunExistsError if `force` would permit it.

    `force` permits replacing a run, but never a folder that contains other files. An interrupted replacement is
    recovered first, and other leftovers of an interrupted run are deleted.
    """
    recover_run(path)
    if is_link(path):
        raise UsageError(f"{path} is a link; set `out` to the folder itself, {resolve_links(path)}.")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; choose another `out`.")
    if path.exists() and any(path.iterdir()):
        check_no_foreign_files(path)
        if not force:
            raise RunExistsError(path)
        _check_replaceable(path)
    for leftover in (staging_directory(path), replaced_directory(path)):
        remove_tree(leftover)
        if os.path.lexists(leftover):  # it may belong to another user
            raise UsageError(f"{leftover} is in the way and cannot be deleted; choose another `out`.")


def _check_replaceable(path: Path) -> None:
    """Raise UsageError if the run at `path` cannot be replaced, before training starts.

    Creates and deletes a folder in each folder of the run: permissions do not show whether a file system is read-only
    or a folder immutable.
    """
    for folder in (path, *(path / name for name in RUN_FOLDERS)):
        if folder.is_dir() and not is_link(folder):
            try:
                Path(tempfile.mkdtemp(prefix=".config.json.", suffix=".tmp", dir=folder)).rmdir()
            except OSError as error:
                raise UsageError(
                    f"Cannot replace {path}: {folder} cannot be written: {error.strerror}; choose another folder with "
                    "`out`."
                ) from error


def check_no_foreign_files(path: Path) -> None:
    """Raise UsageError if the folder contains anything that is not part of a run, or has no config.json."""
    run_entries = (*RUN_FILES, *RUN_FOLDERS)
    entries = [entry.name for entry in path.iterdir()]
    foreign = [name for name in entries if name not in run_entries and not is_unfinished(name, RUN_FILES)]
    if foreign:
        listed = ", ".join(foreign[:3])
        raise UsageError(f"{path} contains files that do not belong to a run ({listed}); choose another `out`.")
    if not (path / "config.json").exists():
        raise UsageError(f"{path} contains no run: it has no config.json; choose another `out`.")


def commit(staging: Path, path: Path) -> None:
    """Move the prepared run at `staging` to `path`. A run at `path` is replaced and deleted.

    Raises UsageError if the folder at `path` contains other files, and OSError if a rename fails.
    """
    replaced = replaced_directory(path)
    if path.exists() and any(path.iterdir()):
        check_no_foreign_files(path)
    replace_folder(path, staging, replaced)
    with contextlib.suppress(OSError):  # the run is in place; without the flush, a power failure may undo the rename
        flush_folder(path.parent)
    if replaced.exists():
        with contextlib.suppress(OSError):  # `check_free` deletes what is left when the next run is created
            remove_run(replaced)


def remove_run(path: Path) -> None:
    """Delete the files of a run, config.json last, and its folder. Raises OSError if the folder has other files."""
    for name in RUN_FOLDERS:
        remove_tree(path / name)
    remove_unfinished(path)
    for name in reversed(RUN_FILES):
        (path / name).unlink(missing_ok=True)
    path.rmdir()


def remove_unfinished(path: Path) -> None:
    """Delete the partially written files that a kill left in a run directory."""
    for entry in path.iterdir():
        if is_unfinished(entry.name, RUN_FILES):
            remove_tree(entry)


def recover_run(path: Path) -> None:
    """Recover an interrupted replacement of the run at `path`: move the new run there, or else the old one back.

    A new run without a complete `last/`, such as one from an import or a merge, may be incomplete; then the old run is
    moved back. Does nothing if there is something at `path`.
    """
    if path.exists():
        return
    staging, replaced = staging_directory(path), replaced_directory(path)
    if (staging / "last" / "manifest.json").exists():
        staging.rename(path)
    elif any((replaced / name).exists() for name in (MODEL_FILE, ADAPTER_FILE)):  # else it was being deleted
        replaced.rename(path)


def recover_last(run: Path) -> Path:
    """Recover an interrupted replacement of `last/` in the directory `run`. Returns the path of `last/`, which may not
    exist.
    """
    last = run / "last"
    if not last.exists():
        for name in ("last.new", "last.old"):
            if (run / name / "manifest.json").exists():
                (run / name).rename(last)
                break
    return last
