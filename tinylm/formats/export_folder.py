"""Checks whether an export may replace a folder, and replaces the folder or, on an error, restores it.

The old export is moved into the hidden folder .NAME.*.export before the new one is renamed. If the process is killed
in between, the old export remains there.
"""

import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tinylm.errors import TinyLMError, UsageError
from tinylm.system.files import flush_folder, is_link, remove_tree
from tinylm.system.process_signals import temporary


def check_folder_free(out: Path, files: Collection[str], force: bool) -> None:
    """Raise UsageError unless an export may be written to the folder `out`.

    `out` may be missing, an empty folder, or, with `force`, a folder that contains only `files` (of an export).
    """
    if not os.path.lexists(out):
        return
    if is_link(out) or not out.is_dir():
        raise UsageError(f"{out} is not a folder; choose another `out`.")
    try:
        names = {entry.name for entry in out.iterdir()}
    except OSError as error:
        raise UsageError(f"{out} cannot be read: {error.strerror}; choose another `out`.") from error
    if others := sorted(names.difference(files)):
        listed = ", ".join(others[:3])
        raise UsageError(f"{out} contains files that do not belong to an export ({listed}); choose another `out`.")
    if names and not force:
        raise UsageError(f"{out} contains an earlier export; choose another `out`, or replace it with `force`.")


@contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """Context manager that yields a new empty folder, which replaces `out` at the end. On an error, `out` is restored.

    Raises UsageError if the parent of `out` cannot be written, and TinyLMError if writing fails later. If `out` cannot
    be restored, the message says where the earlier export is.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".export", dir=out.parent))
    except OSError as error:
        raise UsageError(f"Cannot write to {out.parent}: {error.strerror}; choose another `out`.") from error
    new, old = stage / "new", stage / "old"
    try:
        with temporary(stage):  # `old` is not yet in it
            new.mkdir()
            yield new
            flush_folder(new)
        _replace(out, new, old)
    except OSError as error:
        kept = f"; the earlier export is in {old}" if old.exists() else ""
        raise TinyLMError(f"Cannot write {out}: {error.strerror or error}. Nothing was exported{kept}.") from error
    finally:
        if out.exists() or not old.exists():
            remove_tree(stage)
    with suppress(OSError):  # the export is in place; without the flush, a power failure may undo the rename
        flush_folder(out.parent)


def _replace(out: Path, new: Path, old: Path) -> None:
    """Move `out`, if it exists, to `old`, and `new` to `out`.

    On any exception, including KeyboardInterrupt, `out` is restored.
    """
    try:
        if out.exists():
            out.rename(old)
        new.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
