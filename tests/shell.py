"""Running the command line in a test, and checking its output on each stream."""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import typer.testing

from tinylm.cli import app

Result = typer.testing.Result

ROOT = Path(__file__).parent.parent
FILES = {"config.json", "tokenizer.json", "metrics.jsonl", "model.safetensors", "last"}  # of a run directory
TINY = ("--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--batch-size", "4")
CHILD_LIMIT = 120.0  # seconds that a child process may take on a busy machine
WORDS = "the old man said it was a cold morning by the sea, and he went home to his bed in a quick boat; I saw no joy."


def environment() -> dict[str, str]:
    """The environment of a child process: with tinylm on its path, and one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def default_signals() -> None:
    """For `preexec_fn`: restores signal handling where the tests run under nohup or in the background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def child_process(
    command: Sequence[str], limit: float = CHILD_LIMIT, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, killed with all that it started after `limit` seconds and when the block ends.

    So a test that waits for the process or reads its output cannot hang.
    """
    options = {"text": True, "env": environment(), "start_new_session": os.name == "posix", **options}
    with subprocess.Popen(command, **options) as child:
        timer = threading.Timer(limit, _kill_session, [child])
        timer.daemon = True
        timer.start()
        try:
            yield child
        finally:
            timer.cancel()
            timer.join()  # it may be about to kill
            _kill_session(child)


def _kill_session(child: subprocess.Popen[str]) -> None:
    if child.returncode is None and os.name == "posix":  # not waited for yet, so its id is not reused
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        ranks = children.read_text().split() if children.exists() else []  # of torchrun, in sessions of their own
        for rank in map(int, ranks):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(rank), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended between these lines (on macOS: EPERM)
            os.killpg(child.pid, signal.SIGKILL)
    elif child.returncode is None:
        child.kill()


def run_child(command: Sequence[str], limit: float = CHILD_LIMIT, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its output as text; it is killed after `limit` seconds."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child_process(command, limit, **{**pipes, **options}) as child:
        stdout, stderr = child.communicate()
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


def story(characters: int, seed: int = 0) -> str:
    """Lines of a few words, with about the same 33 distinct characters for every seed."""
    rng = random.Random(seed)
    lines = [WORDS]
    while sum(map(len, lines)) < characters:
        lines.append(" ".join(rng.choices(WORDS.split(), k=rng.randint(4, 9))))
    return "\n".join(lines) + "\n"


def tinylm(*arguments: object, stdin: bytes | str = "", env: dict[str, str] | None = None) -> Result:
    return typer.testing.CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, env=env)


def run_ok(*arguments: object, stdin: bytes | str = "", env: dict[str, str] | None = None) -> Result:
    """The result of a command, which must succeed."""
    result = tinylm(*arguments, stdin=stdin, env=env)
    assert result.exit_code == 0, result.output
    return result


def records(result: Result) -> list[dict[str, Any]]:
    """The lines of stdout, each a JSON object."""
    return [json.loads(line, parse_constant=_no_constant) for line in result.stdout.splitlines()]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def assert_error(result: Result, code: int, *parts: str, sentences: int = 2) -> None:
    """Check an error of tinylm: exit code, empty stdout, and at most `sentences` sentences with all `parts`."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    message = result.stderr.splitlines()[-1]
    assert message.startswith("Error: ")
    for part in parts:
        assert part in message
    assert re.search(r"[^.]\.$", message), f"not a sentence: {message}"
    assert len(re.findall(r"\.(?= [A-Z]|$)", message)) <= sentences, message


def edit_config(run: Path, **sections: dict[str, Any]) -> None:
    """Changes values of a run's configuration, with a valid digest."""
    config = json.loads((run / "config.json").read_text())
    del config["digest"]
    for name, values in sections.items():
        config[name] |= values
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    (run / "config.json").write_text(json.dumps({**config, "digest": digest}))


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content, and every folder, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two safetensors files have equal tensors; the order of their metadata is arbitrary."""
    a, b = safetensors.torch.load_file(one), safetensors.torch.load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
