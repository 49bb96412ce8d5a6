"""The user's cache folder, with subfolders for encoded texts, converted models, compiled code and measurements.

The content of the subfolders is executed or trusted, so only this user may have write permission on them.
"""

import contextlib
import os
import shutil
import stat
from pathlib import Path
from typing import NamedTuple

from tinylm.errors import TinyLMError

SUBFOLDERS = {
    "tokens": "encoded texts",
    "texts": "statistics and tokenizers of long texts",
    "gguf": "models converted for llama.cpp",
    "torch": "code compiled by torch",
    "bases": "places of the base models of adapters",
    "machine": "measurements of this machine",
}


class DiskUsage(NamedTuple):
    """The number of files in a folder, and their total size in bytes."""

    files: int
    bytes: int


def cache_root() -> Path:
    """The folder $TINYLM_CACHE, or tinylm/ in the user's cache folder ($XDG_CACHE_HOME, %LOCALAPPDATA% or ~/.cache).

    A relative $XDG_CACHE_HOME is ignored, as the XDG Base Directory Specification demands. Raises TinyLMError if none
    of the variables is set and the user has no home folder.
    """
    if own := os.environ.get("TINYLM_CACHE"):
        return Path(own).absolute()
    bases = (Path(os.environ.get(name, "")) for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"))
    try:
        return (next(filter(Path.is_absolute, bases), None) or Path.home() / ".cache") / "tinylm"
    except RuntimeError as error:
        raise TinyLMError("There is no home folder for the cache; set TINYLM_CACHE to a folder.") from error


def private_folder(name: str) -> Path:
    """The subfolder `name` of the cache, created with mode 0700.

    Raises TinyLMError if it cannot be created, is a symbolic link, or other users can write to it.
    """
    path = cache_root() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise TinyLMError(f"Cannot create {path}: {error.strerror}; set TINYLM_CACHE to another folder.") from error
    if not is_private(path):
        elsewhere = "set TINYLM_CACHE to a folder of your own"
        if path.is_symlink():
            raise TinyLMError(f"The cache folder {path} is a symbolic link, so it is not trusted; {elsewhere}.")
        next_step = f"chmod 700 {path}" if path.stat().st_uid == os.getuid() else elsewhere
        raise TinyLMError(f"Other users can write to the cache folder {path}, so it is not trusted; {next_step}.")
    return path


def is_private(path: Path) -> bool:
    """Whether a file or folder exists, is not a symbolic link, belongs to this user, and no other user can write to it.

    On Windows, the owner and the permissions are not checked.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    if stat.S_ISLNK(status.st_mode):
        return False
    if not hasattr(os, "getuid"):  # on Windows, the cache folder is in the user's private profile by default
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_private_entry(path: Path, name: str) -> bool:
    """Whether `path` is an entry of the subfolder `name` of the cache, and `is_private` holds for both.

    False if there is no cache folder.
    """
    with contextlib.suppress(TinyLMError):
        return path.parent == cache_root() / name and is_private(path.parent) and is_private(path)
    return False


def measure_usage(name: str) -> DiskUsage:
    """Number and bytes of the files in the subfolder `name`; zero if it does not exist. Links in it are not followed.

    Raises the error of `cache_root`.
    """
    sizes = []
    for folder, _, names in os.walk(cache_root() / name):
        for file in names:
            with contextlib.suppress(OSError):  # deleted meanwhile
                sizes.append(Path(folder, file).lstat().st_size)
    return DiskUsage(len(sizes), sum(sizes))


def clear_cache(name: str) -> DiskUsage:
    """Delete the subfolder `name` of the cache, and return its disk usage before that.

    Raises TinyLMError if it cannot be deleted, is a link, or other users can write to it.
    """
    path = cache_root() / name
    if not os.path.lexists(path):
        return DiskUsage(0, 0)
    path, usage = private_folder(name), measure_usage(name)
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise TinyLMError(f"Cannot delete {error.filename or path}: {error.strerror}.") from error
    return usage
