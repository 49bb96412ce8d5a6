"""The place of a run on disk: what may be written there and by whom, and what a kill left in between."""

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from tinylm.errors import TinyLMError, UsageError
from tinylm.files import is_link, is_unfinished, remove_tree

WINDOWS = os.name == "nt"
CHECKPOINTS = Path("checkpoints")  # where runs are written by default
MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
PEFT_FILE = "adapter_config.json"  # of a LoRA
RUN_FILES = ("config.json", "tokenizer.json", "metrics.jsonl", MODEL_FILE, ADAPTER_FILE, PEFT_FILE)
RUN_FOLDERS = ("last", "last.new", "last.old", "tokens")


def preparation_folder(path: Path) -> Path:
    return hidden(path, "new")


def hidden(path: Path, version: str) -> Path:
    return path.with_name(f".{path.name}.tinylm-{version}")


def check_free(path: Path, force: bool) -> None:
    """Raises UsageError when a run must not be written here.

    `force` gives up a run that is there, but never a folder of anything else.
    """
    recover_run(path)
    if is_link(path):
        raise UsageError(f"{path} is a link; name the folder itself, {path.resolve()}, with --out.")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; choose another folder with --out.")
    if path.exists() and any(path.iterdir()):
        refuse_strangers(path)
        if not force:
            raise UsageError(
                f"{path} already holds a run. Go on with it: {resume_command(path)}. Replace it: "
                "add --force. Keep both: choose another folder with --out."
            )
        _require_removable(path)
    for version in ("new", "old"):
        remove_tree(hidden(path, version))
        if os.path.lexists(hidden(path, version)):  # in /tmp it may be another user's
            raise UsageError(f"{hidden(path, version)} is in the way and cannot be deleted; choose another --out.")


def _require_removable(path: Path) -> None:
    """Raises UsageError when a run cannot be replaced: before the training, not after it.

    Permissions alone do not tell, since a file system may be read-only and a folder immutable, so it is tried.
    """
    for folder in (path, *(path / name for name in RUN_FOLDERS)):
        if folder.is_dir() and not is_link(folder):
            try:
                Path(tempfile.mkdtemp(prefix=".config.json.", suffix=".tmp", dir=folder)).rmdir()
            except OSError as error:
                raise UsageError(
                    f"{path} cannot be replaced, since {folder} cannot be written: {error.strerror}; choose another "
                    "folder with --out."
                ) from error


def refuse_strangers(path: Path) -> None:
    own = (*RUN_FILES, *RUN_FOLDERS)
    entries = [entry.name for entry in path.iterdir()]
    strangers = [name for name in entries if name not in own and not is_unfinished(name, RUN_FILES)]
    if strangers or not (path / "config.json").exists():
        raise UsageError(f"{path} holds other things than a run ({', '.join(strangers[:3])}); choose another --out.")


def remove_run(path: Path) -> None:
    """Delete a run's own files, and the folder if nothing else is in it. It is known for a run until the end."""
    for name in RUN_FOLDERS:
        remove_tree(path / name)
    remove_unfinished(path)
    for name in reversed(RUN_FILES):
        (path / name).unlink(missing_ok=True)
    path.rmdir()


def remove_unfinished(path: Path) -> None:
    """Delete the files that a kill left half-written in a run directory."""
    for entry in path.iterdir():
        if is_unfinished(entry.name, RUN_FILES):
            remove_tree(entry)


def resume_command(path: Path) -> str:
    """What to type to go on with a run."""
    command = "train"
    if (path / ADAPTER_FILE).exists():
        command = "finetune-lora" if (path / PEFT_FILE).exists() else "finetune-adapter"
    return f"tinylm {command} --resume {shlex.quote(str(path))}"


@contextlib.contextmanager
def only_user(path: Path) -> Iterator[None]:
    """Keep other processes from writing the run at `path`.

    Raises UsageError when one does already, and for a path without a name; TinyLMError when nothing can be written
    there. The lock is the system's: it ends with the process, however that ends. A link in its place is not followed.
    """
    if path.name in ("", ".."):
        raise UsageError(f"{path} is no name for a new folder; choose one with --out.")
    lock = filelock.FileLock(path.with_name(f".{path.name}.tinylm-lock"), timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise UsageError(f"Another tinylm is writing {path}; wait until it is done, or choose another --out.") from None
    except OSError as error:
        raise TinyLMError(f"Cannot save to {str(path)[:200]}: {error.strerror}; choose another --out.") from error
    try:
        yield
    finally:
        if WINDOWS:  # which deletes no open file
            lock.release()
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def recover_run(path: Path) -> None:
    """Finish the replacement of a run that a kill interrupted between its two renames."""
    for version in ("new", "old"):
        if not path.exists() and (hidden(path, version) / "last" / "manifest.json").exists():
            hidden(path, version).rename(path)


def recover_last(home: Path) -> Path:
    """Finish a swap that a kill interrupted between its two renames. Returns the path of `last/`."""
    last = home / "last"
    if not last.exists():
        for name in ("last.new", "last.old"):
            if (home / name / "manifest.json").exists():
                (home / name).rename(last)
                break
    return last
