"""Run commands of tinylm in folders of their own, each in a fork of a server process that has imported everything.

A fork takes milliseconds, a new interpreter a second and a half. A command runs in its own session under a time limit,
with its streams in files, and with limits on memory and file size, so that a hostile input cannot harm the machine.
POSIX only.
"""

import contextlib
import hashlib
import multiprocessing
import os
import pkgutil
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import tinylm
import tinylm.__main__

LIMIT = 20.0  # seconds after which a command counts as hanging
MOST_MEMORY, MOST_FILE = 4 << 30, 256 << 20  # bytes of private memory, and in one file
SECRET = "canary-7f3a"  # content of the files in `Place.outside`, which no command may print
CODES = (0, 1, 2, 3)  # documented exit codes, besides those of signals
Hook = Callable[[], object]
FORKS = multiprocessing.get_context("forkserver")


def start_server(preload: Path | None) -> None:
    """Start the process that forks. preload: a shared library for LD_PRELOAD."""
    added = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tinylm.__file__).parents[1])}
    added |= {"LD_PRELOAD": str(preload)} if preload else {}
    FORKS.set_forkserver_preload([*(m.name for m in pkgutil.walk_packages(tinylm.__path__, "tinylm.")), "gigatoken"])
    with mock.patch.dict(os.environ, added):
        forkserver.ensure_running()


@dataclass(frozen=True)
class Ran:
    """How a command ended. `code` is negative for a signal; `killed` is true if it was killed at its time limit."""

    words: tuple[str, ...]
    code: int
    stdout: str = ""
    stderr: str = ""
    seconds: float = 1.0
    killed: bool = False
    debug: bool = False  # whether tracebacks are allowed

    @property
    def last(self) -> str:
        return (self.stderr.strip().splitlines() or [""])[-1]

    def __str__(self) -> str:
        return f"tinylm {' '.join(self.words)[:150]}: exit {self.code}, {self.last[:250] or 'nothing on stderr'}"

    def defects(self, codes: Sequence[int] = CODES) -> list[str]:
        """Descriptions of behaviour that no input may cause."""
        defects = {
            f"no end within {self.seconds:.0f} s": self.killed,
            "an undocumented exit code, or a signal": not self.killed and self.code not in codes,
            "a traceback": "Traceback (most recent call last)" in self.stderr and not self.debug,
            "an internal error": "Internal error of tinylm" in self.stderr,
            "a panic": "panicked at" in self.stderr and not self.last.startswith("Error: "),
            "no message": self.code in (1, 2, 3) and not self.last,
            "content of a file outside its folders was printed": SECRET in self.stdout + self.stderr,
        }
        return [f"{self}: {defect}" for defect, is_there in defects.items() if is_there]


class Place:
    """The folders of one case, always at the same path, because runs record absolute paths.

    Commands run in `work`, and `home` has the cache and temporary files; they may write to both, but not to `outside`.
    `wrong` collects the defects of a case.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work, self.home, self.outside = (path / name for name in ("work", "home", "outside"))
        self.streams = path.with_name("streams")  # outside `path`, below which disk.c counts writes
        self.wrong: list[str] = []
        for folder in (self.work, self.home / "tmp", self.streams, self.outside / "folder"):
            folder.mkdir(parents=True)
        for name in ("secret.txt", "secret.json", "folder/secret.txt", "folder/tokens.json", "folder/train.bin"):
            (self.outside / name).write_text(f'"{SECRET}"')

    def keep(self, name: str) -> None:
        """Save a copy of the folders, for `restore`."""
        shutil.copytree(self.path, self.path.with_name(name), symlinks=True)

    def restore(self, name: str) -> None:
        """Make the folders again as they were at `keep` with this name."""
        remove(self.path)
        shutil.copytree(self.path.with_name(name), self.path, symlinks=True)

    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH") if name in os.environ}
        folders = {"HOME": self.home, "TINYLM_CACHE": self.home / "cache", "TMPDIR": self.home / "tmp"}
        folders["PYTHONPATH"] = Path(tinylm.__file__).parents[1]
        chosen = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "GOMP_SPINCOUNT": "0", "COLUMNS": "200"}
        return kept | {name: str(folder) for name, folder in folders.items()} | chosen

    def run(
        self, command: str, *more: object, codes: Sequence[int] = CODES, after: float | None = None, **how: Any
    ) -> Ran:
        """Run a command in a fork, and add its defects to `wrong`. command: words; more: words that may have spaces.

        after: seconds after which it is killed, without a defect. how: env, stdin, stdout, stderr, and two hooks that
        the fork calls before and after the command.
        """
        words = (*command.split(), *map(str, more))
        env, outputs = self.environment() | how.get("env", {}), (self.streams / "out", self.streams / "err")
        for file in outputs:
            file.write_bytes(b"")
        stdin = self.work / "questions.txt" if words[0] == "chat" else Path(os.devnull)
        defaults = zip(("stdin", "stdout", "stderr"), (stdin, *outputs), strict=True)
        files, hooks = [how.get(*default) for default in defaults], how.get("hooks", (nothing, nothing))
        begun = time.monotonic()
        code, killed = call(_become, self.work, words, env, files, *hooks, limit=after or LIMIT)
        stdout, stderr = (file.read_bytes()[: 1 << 20].decode(errors="replace") for file in outputs)
        debug = "--debug" in words or any(name.endswith("_DEBUG") for name in env)
        ran = Ran(words, 0 if killed and after else code, stdout, stderr, time.monotonic() - begun, killed, debug)
        self.wrong += [] if killed and after else ran.defects(codes)
        return ran

    def must(self, command: str, *more: object, **how: Any) -> Ran:
        """Run a command that must succeed."""
        ran = self.run(command, *more, **how)
        self.wrong += [str(ran)] if ran.code and str(ran) not in "".join(self.wrong) else []
        return ran


def call(work: Callable[..., object], *arguments: object, limit: float = LIMIT) -> tuple[int, bool]:
    """Call a function in a fork: its exit code, negative for a signal, and whether it was killed at the time limit."""
    process = FORKS.Process(target=_alone, args=(work, *arguments))
    process.start()
    process.join(limit)
    killed = process.exitcode is None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # and what it may have started
    process.join()
    return process.exitcode or 0, killed


def _alone(work: Callable[..., object], *arguments: object) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work(*arguments)


def nothing() -> None:
    pass


def _become(
    work: Path, words: Sequence[str], env: Mapping[str, str], files: Sequence[Path], before: Hook, after: Hook
) -> None:
    """In a fork: run the command as its own process would. files: stdin, stdout and stderr."""
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY, 0o600), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE, MOST_FILE))
    os.chdir(work)
    sys.argv = ["tinylm", *words]
    before()
    try:
        tinylm.__main__.main()
    finally:
        after()


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Type, mode, modification time, and content or link target of everything in a folder, by path."""
    found: dict[str, tuple[object, ...]] = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        content: object = path.readlink() if stat.S_ISLNK(status.st_mode) else None
        if stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found


def remove(path: Path) -> None:
    """Delete a file, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
