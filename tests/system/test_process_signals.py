"""Signals outside of training end a command quietly, with the exit code of the signal and without temporary files.

tests/faults sends them to real commands at random moments.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.shell import TINY, child_process, default_signals, environment, run_child, story
from tinylm.system import process_signals
from tinylm.system.process_signals import TERMINATION_SIGNALS

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
LIMIT = 60  # seconds; a process that runs longer fails the test

WORK = """
import os, signal, sys, tempfile
from tinylm.system.process_signals import run_with_signal_handlers

def program():
    with tempfile.TemporaryDirectory() as folder:
        print(folder, flush=True)
        {work}
        print("went on", flush=True)

number = {number}
run_with_signal_handlers(program)
"""


def work(code: str, number: int, folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the code in another process, inside of a TemporaryDirectory whose path the process prints first."""
    command = [sys.executable, "-c", WORK.format(work=code, number=int(number))]
    env = {**environment(), "TMPDIR": str(folder)}
    return run_child(command, LIMIT, **{"env": env, "preexec_fn": default_signals, **options})


SIGNALLED = {  # what the process is doing, and whether its temporary files are removed
    "nothing": ("os.kill(os.getpid(), number)", True),
    "raising another": ("try: os.kill(os.getpid(), number)\n        except BaseException: raise ImportError", True),
    "exiting": ("try: os.kill(os.getpid(), number)\n        except BaseException: sys.exit(1)", True),
    "freeing": ("type('Freed', (), {'__del__': lambda self: os.kill(os.getpid(), number)})()", False),
    "importing": (
        """sys.meta_path.insert(0, type('', (), {'find_spec': lambda *names: os.kill(os.getpid(), number)})())
        try: import half_a_module
        finally: print("went on", flush=True)""",
        False,
    ),
    "ending by a signal": (
        "try: os.kill(os.getpid(), number)\n        finally: os.kill(os.getpid(), number); print('went on')",
        False,
    ),
    "a call that takes hours and releases the interpreter lock, as the training of a tokenizer does": (
        """import hashlib, threading
        from tinylm.system.process_signals import interruptible
        threading.Timer(0.5, os.kill, [os.getpid(), number]).start()
        interruptible(lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1))""",
        True,
    ),
}


@pytest.mark.parametrize("doing", SIGNALLED)
def test_a_signal_ends_the_process_whatever_it_is_doing(doing: str, tmp_path: Path) -> None:
    code, removed = SIGNALLED[doing]
    number = TERMINATION_SIGNALS[list(SIGNALLED).index(doing) % len(TERMINATION_SIGNALS)]
    result = work(code, number, tmp_path)
    assert (result.returncode, result.stderr) == (-number, "")
    (folder,) = result.stdout.splitlines()  # and not "went on"
    assert Path(folder).exists() == (not removed)


EARLY = """
import os, runpy, signal, sys

def end_at(instant):
    executed = 0  # lines since the first one of tinylm, without those of Python that find modules
    def trace(frame, event, argument):
        nonlocal executed
        if not frame.f_code.co_filename.startswith("<frozen"):
            executed += bool(executed or frame.f_globals["__name__"].startswith("tinylm"))
        if executed == instant:
            os.kill(os.getpid(), signal.SIGINT)
        return trace
    sys.argv = ["tinylm", "--version"]
    sys.settrace(trace)
    runpy.run_module("tinylm", run_name="__main__")

for instant in (int(100 * 1.5**n) for n in range(14)):
    if not (child := os.fork()):
        end_at(instant)
    print(instant, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_ctrl_c_ends_a_command_without_a_word_from_its_first_imports_on() -> None:
    """Regression: a traceback in the first 80 ms. The first 100 lines take less than a millisecond."""
    result = run_child([sys.executable, "-c", EARLY], LIMIT, env=environment(), preexec_fn=default_signals)
    ends = [line.split()[1] for line in result.stdout.splitlines()]
    assert (ends, result.stderr) == (["-2"] * 14, "")


def test_a_signal_within_an_import_leaves_none_of_the_files_that_are_being_written(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from tinylm.system.files import replacing, temporary_folder
from tinylm.formats.huggingface import replacing_folder
from tinylm.system.process_signals import run_with_signal_handlers
from tinylm.run_directory.lock_and_commit import reserve
from tinylm.text.token_files import _unfinished_folder

def program():
    with (
        temporary_folder() as a, replacing(Path("b")) as b, replacing_folder(Path("c")) as c,
        reserve(Path("d"), False) as d, _unfinished_folder(Path("e"), False) as e,
    ):
        d.mkdir()
        for folder in (a, c, d, e):
            (folder / "file").touch()
        assert b.exists()
        sys.meta_path.insert(0, type("", (), {"find_spec": lambda *names: os.kill(os.getpid(), signal.SIGTERM)})())
        import half_a_module

run_with_signal_handlers(program)
"""
    (tmp_path / "tmp").mkdir()
    env = {**environment(), "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path / "tmp")}
    result = run_child([sys.executable, "-c", code], LIMIT, env=env, cwd=tmp_path, preexec_fn=default_signals)
    assert (result.returncode, result.stderr) == (-signal.SIGTERM, "")
    assert {path.name for path in tmp_path.rglob("*")} == {"tmp"}


def test_a_process_on_which_signals_have_no_default_effect_ends_with_their_exit_code(tmp_path: Path) -> None:
    """Such as process 1 of a container."""
    code = "kill = os.kill; os.kill = lambda *arguments: None; kill(os.getpid(), number)"
    assert work(code, signal.SIGTERM, tmp_path).returncode == 143


@pytest.mark.parametrize("number", TERMINATION_SIGNALS)
def test_a_signal_that_was_ignored_at_start_stays_ignored(number: int, tmp_path: Path) -> None:
    """As under nohup, and in background jobs of a script."""
    ignored = {"preexec_fn": lambda: signal.signal(number, signal.SIG_IGN)}
    result = work("os.kill(os.getpid(), number)", number, tmp_path, **ignored)
    assert (result.returncode, result.stderr) == (0, "")
    assert "went on" in result.stdout


def test_an_interruptible_call_returns_its_result_and_raises_its_error() -> None:
    waits: list[int] = []
    slept = process_signals.interruptible(lambda: time.sleep(1.5) or threading.current_thread(), waits.append)
    assert slept is not threading.main_thread() and waits == [1]
    with pytest.raises(ZeroDivisionError):
        process_signals.interruptible(lambda: 1 / 0)


TRAINING = """
import hashlib, sys
import tinylm.commands.console, tinylm.text.tokenizer
from tinylm.__main__ import main
from tinylm.system.process_signals import interruptible

def take_hours(call, waiting):  # in place of the training by the library
    return interruptible(lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1), waiting)

tinylm.commands.console.PLAIN_SECONDS = 0.0
tinylm.text.tokenizer.interruptible = take_hours
sys.argv[0] = "tinylm"
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", [pytest.param("train", marks=pytest.mark.slow), "train-tokenizer"])
def test_a_signal_ends_the_training_of_a_tokenizer(command: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(story(3000))
    (tmp_path / "out").mkdir()
    options = ("--tokenizer", "bpe", *TINY) if command == "train" else ("--kind", "bpe")
    arguments = map(str, (command, tmp_path / "corpus.txt", *options, "--out", tmp_path / "out/new"))
    process = [sys.executable, "-c", TRAINING, *arguments]
    with child_process(process, LIMIT, stderr=subprocess.PIPE, preexec_fn=default_signals) as child:
        shown = next((line for line in child.stderr if "training the tokenizer: " in line), "")
        child.send_signal(number)
        _, rest = child.communicate()
    assert shown == "training the tokenizer: 1 seconds\n"
    assert child.returncode == -number
    shown = ("training the tokenizer: ", "Stopped before the first step; nothing was written.")
    assert all(line.startswith(shown) for line in rest.splitlines()), rest
    assert not list((tmp_path / "out").iterdir())


def test_an_exception_that_a_library_raises_for_a_signal_is_not_reported(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from tinylm.__main__ import main
import tinylm.run_directory.loading

def fail(path):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        raise RuntimeError("what a library makes of it") from None

tinylm.run_directory.loading.read_config = fail
sys.argv = ["tinylm", "info", "."]
main()
"""
    result = run_child([sys.executable, "-c", program], LIMIT, preexec_fn=default_signals)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")
