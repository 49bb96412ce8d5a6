"""The user's cache: encoded texts, compiled code and what was measured about the machine.

tokens/  compiled/  torch/  machine/       each a folder that only this user can write
"""

import os
import stat
from pathlib import Path

from tinylm.errors import TinyLMError


def cache_root() -> Path:
    """$TINYLM_CACHE, or tinylm/ in the user's cache folder. Raises TinyLMError for a user without a home folder."""
    if own := os.environ.get("TINYLM_CACHE"):
        return Path(own).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tinylm"
    except RuntimeError as error:
        raise TinyLMError("There is no home folder for a cache; set TINYLM_CACHE to a folder.") from error


def private_folder(name: str) -> Path:
    """The folder `name` of the cache, created for this user alone (mode 0700).

    Raises TinyLMError when it cannot be created, and when another user could have written what is in it.
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
    """Whether a file or folder belongs to this user, is no link, and cannot be written by others."""
    try:
        status = path.lstat()
    except OSError:
        return False
    if stat.S_ISLNK(status.st_mode):
        return False
    if not hasattr(os, "getuid"):  # Windows keeps each user's cache folder to that user
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
