"""Run commands of tinylm in folders of their own, in a fork of one process that has imported everything or in a new
process.

A fork takes milliseconds, a new interpreter a second and a half. A forked command runs in its own session under
a time limit, with its streams in files, and with limits on memory and file size, so that a hostile input cannot harm
the machine. POSIX only.
"""

import contextlib
import hashlib
import importlib
import os
import pkgutil
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import tinylm
import tinylm.__main__

LIMIT = 20.0  # seconds after which a command counts as hanging
MOST_MEMORY = 4 << 30  # bytes of private memory
MOST_FILE = 256 << 20  # bytes in one file
DOCUMENTED_CODES = (0, 1, 2, 3)
SECRET = "canary-7f3a"  # content of the files in `Place.outside`, which no command may print


def import_everything() -> None:
    """Import all of tinylm, so that a forked command need not. Torch computes nothing yet, so that no threads run."""
    for module in pkgutil.walk_packages(tinylm.__path__, "tinylm."):
        importlib.import_module(module.name)
    importlib.import_module("gigatoken")


@dataclass(frozen=True)
class Ran:
    """How a command ended. `code` is negative for a signal; `hung` is true if it was killed at its time limit."""

    words: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float
    hung: bool
    debug: bool = False  # whether tracebacks are allowed

    def defects(self, codes: Sequence[int] = DOCUMENTED_CODES) -> list[str]:
        """Descriptions of behaviour that no input may cause."""
        last = self.stderr.strip().splitlines()[-1:] or [""]
        found = []
        if self.hung:
            found.append(f"no end within {self.seconds:.0f} s")
        elif self.code < 0:
            found.append(f"killed by {signal.Signals(-self.code).name}")
        elif self.code not in codes:
            found.append(f"exit code {self.code}: {last[0][:200]}")
        if "Traceback (most recent call last)" in self.stderr and not self.debug:
            found.append(f"traceback: {last[0][:200]}")
        if "Internal error of tinylm" in self.stderr:
            found.append(f"internal error: {last[0][:300]}")
        if "panicked at" in self.stderr and not last[0].startswith("Error: "):
            found.append(f"panic: {self.stderr[self.stderr.index('panicked at') :][:200]}")
        if self.code in (1, 2, 3) and not self.stderr.strip():
            found.append(f"exit code {self.code} without a message")
        if SECRET in self.stdout or SECRET in self.stderr:
            found.append("content of a file outside its folders was printed")
        return found


@dataclass
class Place:
    """The folders of one case, always at the same path, because runs record absolute paths.

    Commands run in `work`, and `home` has the cache and temporary files; they may write to both, but not to `outside`.
    """

    path: Path
    limit: float = LIMIT
    ran: list[Ran] = field(default_factory=list)

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def outside(self) -> Path:
        return self.path / "outside"

    @property
    def streams(self) -> Path:
        return self.path.with_name("streams")  # outside `path`, below which fault_disk.py counts writes

    def make(self) -> None:
        for folder in (self.work, self.home / "tmp", self.streams, self.outside / "folder"):
            folder.mkdir(parents=True, exist_ok=True)
        for name in ("secret.txt", "secret.json", "folder/secret.txt", "folder/tokens.json", "folder/train.bin"):
            (self.outside / name).write_text(f'"{SECRET}"')

    def keep(self, name: str) -> None:
        """Save a copy of the folders, for `restore`."""
        shutil.rmtree(self.path.with_name(name), ignore_errors=True)
        shutil.copytree(self.path, self.path.with_name(name), symlinks=True)

    def restore(self, name: str) -> None:
        """Make the folders again as they were at `keep` with this name."""
        remove(self.path)
        shutil.copytree(self.path.with_name(name), self.path, symlinks=True)
        for stream in ("out", "err"):
            remove(self.streams / stream)
        self.ran = []

    def environment(self) -> dict[str, str]:
        own = {
            "HOME": str(self.home),
            "TINYLM_CACHE": str(self.home / "cache"),
            "TMPDIR": str(self.home / "tmp"),
            "PYTHONPATH": str(Path(tinylm.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "GOMP_SPINCOUNT": "0",
            "COLUMNS": "200",
        }
        kept = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")
        return {name: os.environ[name] for name in kept if name in os.environ} | own

    def run(self, *words: object, env: dict[str, str] | None = None, **how: Any) -> Ran:
        """Run a command in a fork until it ends, or kill it at the time limit."""
        command = tuple(map(str, words))
        begun = time.monotonic()
        pid = self._fork(command, env or {}, **how)
        code, hung = _wait(pid, begun + self.limit)
        out, err = (_text(self.streams / name) for name in ("out", "err"))
        debug = "--debug" in command or any(name.endswith("_DEBUG") for name in env or {})
        ran = Ran(command, code, out, err, time.monotonic() - begun, hung, debug)
        self.ran.append(ran)
        return ran

    def run_and_kill(self, *words: object, after: float) -> bool:
        """Run a command in a fork and kill it after `after` seconds. Returns whether it was still running then."""
        command = tuple(map(str, words))
        begun = time.monotonic()
        pid = self._fork(command, {})
        code, killed = _wait(pid, begun + after)
        err = _text(self.streams / "err")
        self.ran.append(Ran(command, 0 if killed else code, "", err, time.monotonic() - begun, False))
        return killed

    def _fork(self, words: tuple[str, ...], env: dict[str, str], **how: Any) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become(self, words, env, **how)
        return pid

    def start(self, *words: object, stdin: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start a command in a new process, which can also be interrupted while Python starts."""
        with (
            (stdin or Path(os.devnull)).open("rb") as questions,
            (self.streams / "out").open("wb") as out,
            (self.streams / "err").open("wb") as err,
        ):
            return subprocess.Popen(
                [sys.executable, "-m", "tinylm", *map(str, words)],
                stdin=questions,
                stdout=out,
                stderr=err,
                cwd=self.work,
                env=self.environment(),
                start_new_session=True,
            )

    def finish(self, child: "subprocess.Popen[bytes]", words: Sequence[object], begun: float) -> Ran:
        """Wait for a process of `start`, or kill it at the time limit."""
        hung = False
        try:
            child.wait(max(0.1, begun + self.limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            hung = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
        out, err = (_text(self.streams / name) for name in ("out", "err"))
        ran = Ran(tuple(map(str, words)), code, out, err, time.monotonic() - begun, hung)
        self.ran.append(ran)
        return ran


def _become(
    place: Place,
    words: tuple[str, ...],
    env: dict[str, str],
    *,
    stdin: Path | None = None,
    stdout: Path | None = None,
    stderr: Path | None = None,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Never:
    """In a forked process: run the command, and exit as its own process would."""
    code = 1
    try:
        os.setsid()
        for number, path, flags in (
            (0, stdin or Path(os.devnull), os.O_RDONLY),
            (1, stdout or place.streams / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (2, stderr or place.streams / "err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        ):
            descriptor = os.open(path, flags, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update({**place.environment(), **env})
        tempfile.tempdir = None
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE, MOST_FILE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(place.work)
        sys.argv = ["tinylm", *words]
        if before is not None:
            before()
        try:
            tinylm.__main__.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except KeyboardInterrupt:
            code = 130
            traceback.print_exc()
        try:
            sys.stdout.flush()
        except (OSError, ValueError):
            sys.stderr.write("Exception ignored on flushing sys.stdout\n")
            code = 120
    except BaseException:  # PanicException is no Exception
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
            if after is not None:
                after()
        os._exit(code)


def in_fork(work: Callable[[], object], limit: float = LIMIT) -> bool:
    """Call `work` in a fork, because it may crash. Returns whether it finished."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            work()
            code = 0
        finally:
            os._exit(code)
    return _wait(pid, time.monotonic() + limit) == (0, False)


def _wait(pid: int, until: float) -> tuple[int, bool]:
    """Wait for a process: its exit code, negative for a signal, and whether it was killed at the time limit."""
    killed = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > until:
            killed = True
            os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0)
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # what it may have started
    return os.waitstatus_to_exitcode(status), killed


def _text(path: Path) -> str:
    try:
        return path.read_bytes()[: 1 << 20].decode(errors="replace")
    except OSError:
        return ""


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Type, mode, modification time, and content or link target of everything in a folder, by path."""
    found: dict[str, tuple[object, ...]] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            status = path.lstat()
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            elif stat.S_ISLNK(status.st_mode):
                content = path.readlink()
            found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found


def changes(before: dict[str, tuple[object, ...]], after: dict[str, tuple[object, ...]]) -> list[str]:
    """Files that were created, deleted or changed between two snapshots."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def remove(path: Path) -> None:
    """Delete a file or a folder with its content, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
