"""The user's cache folder, with subfolders for encoded texts, compiled code and measurements of the machine.

Their content is executed or trusted, so only this user may have write permission on each subfolder.
"""

import os
import stat
from pathlib import Path

from tinylm.errors import TinyLMError


def cache_root() -> Path:
    """The folder $TINYLM_CACHE, or tinylm/ in the user's cache folder ($XDG_CACHE_HOME, %LOCALAPPDATA% or ~/.cache).

    Raises TinyLMError for a user without a home folder.
    """
    if own := os.environ.get("TINYLM_CACHE"):
        return Path(own).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tinylm"
    except RuntimeError as error:
        raise TinyLMError("There is no home folder for the cache; set TINYLM_CACHE to a folder.") from error


def private_folder(name: str) -> Path:
    """The subfolder `name` of the cache, created with mode 0700.

    Raises TinyLMError if it cannot be created or other users can write to it.
    """
    path = cache_root() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise TinyLMError(f"Cannot create {path}: {error.strerror}; set TINYLM_CACHE to another folder.") from error
    if not is_private(path):
        own = not path.is_symlink() and path.stat().st_uid == os.getuid()
        next_step = f"chmod 700 {path}" if own else "set TINYLM_CACHE to a folder of your own"
        raise TinyLMError(f"Other users can write to the cache folder {path}, so it is not trusted; {next_step}.")
    return path


def is_private(path: Path) -> bool:
    """Whether a file or folder exists, is not a symbolic link, belongs to this user, and no other user can write it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    if stat.S_ISLNK(status.st_mode):
        return False
    if not hasattr(os, "getuid"):  # on Windows, each user's cache folder is private
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
