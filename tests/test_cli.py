"""The command line as a whole: help, errors and exit codes, sources of options, pipes and signals."""

import contextlib
import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer.main

import tinylm
from tests.shell import (
    CHILD_LIMIT,
    TINY,
    Result,
    assert_error,
    child_process,
    environment,
    run_child,
    run_ok,
    same_tensors,
    story,
)
from tests.shell import tinylm as shell
from tinylm.cli import app
from tinylm.commands.streams import prepare_streams
from tinylm.errors import DivergedError, InterruptedRunError, TinyLMError, UsageError
from tinylm.run_directory.loading import load_model

HEAVY = {"torch", "numpy", "tokenizers", "safetensors", "gigatoken"}
COMMANDS = (
    *("train", "sample", "chat", "serve", "runs", "info", "eval", "classify", "compare", "report", "finetune-lora"),
    *("finetune-adapter", "merge-lora", "import", "export", "train-tokenizer", "doctor", "cache"),
)
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and pipes")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text(story(2000))
    return tmp_path


def process(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tinylm", *map(str, arguments)]


# Start and help


def test_help_imports_no_slow_library() -> None:
    """Importing torch takes longer than all other work of --help; numpy and tokenizers are slow as well."""
    program = f"""
import sys
from tinylm.cli import app
for words in [["--help"]] + [[name, "--help"] for name in {COMMANDS}]:
    app(words, standalone_mode=False)
heavy = {HEAVY} & set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
    result = run_child([sys.executable, "-c", program])
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_the_commands_are_the_documented_ones() -> None:
    commands = typer.main.get_command(app).commands
    assert tuple(commands) == COMMANDS
    listing = run_ok("--help", env={"TINYLM_VERSION": "1.2.3"}).stdout  # which sets no option
    assert all(f" {name} " in listing for name in (*COMMANDS, "--install-completion"))


def test_help_has_every_option_with_its_description() -> None:
    for name, command in typer.main.get_command(app).commands.items():
        shown = " ".join(run_ok(name, "--help", env={"COLUMNS": "400"}).stdout.split())
        assert command.help and command.help.split("\n")[0] in shown
        for parameter in command.params:
            assert parameter.help, parameter.name
            assert parameter.help in shown, parameter.name
            is_option = parameter.param_type_name == "option"
            for spelling in (*parameter.opts, *parameter.secondary_opts) if is_option else (parameter.metavar or name,):
                assert spelling in shown
        options = (option for option in command.params if option.param_type_name == "option")
        flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
        assert flags >= {"--quiet", "-q", "--json", "--debug", "--config"}
        narrow = run_ok(name, "--help", env={"COLUMNS": "80"}).stdout  # which truncates no name
        assert set(narrow.split()) >= flags


def test_a_command_is_imported_only_when_it_runs_or_is_listed() -> None:
    """Importing and building all commands takes more processor time than the rest of the command line."""
    program = """
import sys
from tinylm.cli import app
app(["runs", "--quiet"], standalone_mode=False)
print(*sorted(name for name in sys.modules if name in ("tinylm.commands.runs", "tinylm.commands.train")))
"""
    assert run_child([sys.executable, "-c", program]).stdout.split() == ["tinylm.commands.runs"]


def test_version_is_printed_and_no_argument_prints_the_usage() -> None:
    assert run_ok("--version").stdout == f"tinylm {tinylm.__version__}\n"
    bare = shell()
    assert bare.exit_code == 2
    parts = ("Usage: tinylm", "tinylm train book.txt", 'tinylm sample "Once', "Options", "Start here")
    places = [bare.output.index(words) for words in parts]
    assert places == sorted(places)


# Errors


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A command that raises the error."""
    monkeypatch.setattr("tinylm.run_directory.loading.read_config", Mock(side_effect=error))
    return functools.partial(shell, "info", ".")


@pytest.mark.parametrize(("kind", "code"), [(TinyLMError, 1), (UsageError, 2), (DivergedError, 3)])
def test_errors_have_their_exit_codes(kind: type[TinyLMError], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of an error, such as that the save after it failed as well, are printed after it."""
    error = kind("The disk is full.")
    error.add_note("Cannot write run.")
    info = failing(error, monkeypatch)
    result = info()
    message = "Error: The disk is full.\nError: Cannot write run.\n"
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", message)
    debugged = info("--debug")
    assert debugged.exit_code == code
    assert debugged.stderr.startswith("Traceback (most recent call last):")
    assert debugged.stderr.endswith(message)


def test_an_interruption_is_a_note_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code, said in (
        (InterruptedRunError("All is saved.", signal.SIGINT), 130, "All is saved.\n"),
        (InterruptedRunError("All is saved.", signal.SIGTERM), 143, "All is saved.\n"),
        (KeyboardInterrupt(), 130, ""),  # Ctrl-C outside of training
    ):
        result = failing(error, monkeypatch)("--quiet")
        assert (result.exit_code, result.stdout, result.stderr.lstrip()) == (code, "", said)


def test_unexpected_errors_print_a_sentence_and_have_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, words in (
        (ZeroDivisionError("division by zero"), "Internal error of tinylm (ZeroDivisionError: division by zero)."),
        (PermissionError(13, "Permission denied", "/x/y"), "Cannot access /x/y: Permission denied."),
        (OSError("no reason"), "Operating system error: no reason."),
        (MemoryError(), "Out of memory. Free some memory, then run the command again."),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "Out of memory. Free some memory"),
        (ImportError("x.so: failed to map segment from shared object: Operation not permitted"), "Internal error"),
    ):
        info = failing(error, monkeypatch)
        assert_error(info(), 1, words)
        assert "Traceback" in info("--debug").stderr
        assert "Traceback" in info(env={"TINYLM_INFO_DEBUG": "1"}).stderr


@posix
def test_a_path_that_is_not_utf_8_is_an_ordinary_error() -> None:
    command = [*process("info"), b"\xff" + "\U0001f30d".encode()]
    result = subprocess.run(command, capture_output=True, env=environment(), timeout=60)
    assert result.returncode == 2
    assert result.stderr.decode().startswith("Error: There is no run at \\udcff🌍.")


@posix
def test_a_deleted_working_directory_is_an_error_that_says_so(tmp_path: Path) -> None:
    """Regression: a message of oneMKL, for a model named by its absolute path."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = ["sh", "-c", 'rmdir "$1"; shift; exec "$@"', "sh", str(gone), *process("info", tmp_path)]
    result = run_child(command, cwd=gone)
    message = "Error: The working directory was deleted; go to another one (cd) and run the command again.\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert colour.search(shell("info", "x", env={"FORCE_COLOR": "1"}).stderr)
    assert not colour.search(shell("info", "x", env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stderr)
    assert "\x1b" not in shell("info", "x").stderr


# Pipes and signals


FULL = "Cannot write to standard output: No space left on device"


@contextlib.contextmanager
def unwritable(kind: str) -> Iterator[int]:
    """The descriptor of a file that cannot be written: on a full disk, a pipe without a reader, a closed terminal."""
    if kind == "full":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe() if kind == "pipe" else os.openpty()
        os.close(reader)
    yield writer
    os.close(writer)


def run_on(stdout: int, stderr: int, *arguments: object) -> int:
    """The exit code of a command that runs in this process, with these file descriptors as stdout and stderr."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(os.fdopen(stdout, "w", closefd=False)))
        stack.enter_context(contextlib.redirect_stderr(os.fdopen(stderr, "w", closefd=False)))
        prepare_streams()
        with pytest.raises(SystemExit) as exit:
            app([str(argument) for argument in arguments])
        sys.stdout.flush()
        return int(exit.value.code or 0)


@full
@pytest.mark.parametrize(
    "stream, kind, command, code, said",
    [
        ("stdout", "full", "--version", 1, f"Error: {FULL}; free some space, or redirect the output.\n"),
        ("stdout", "pipe", "train --help", 0, ""),
        ("stderr", "full", "train --dance", 2, ""),
        ("stderr", "pipe", "sample -n 0", 2, ""),
        ("stderr", "terminal", "sample -n 0", 2, ""),
    ],
)
def test_failed_output_leaves_the_exit_code(stream: str, kind: str, command: str, code: int, said: str) -> None:
    with unwritable(kind) as descriptor:
        result = run_child(process(*command.split()), **{stream: descriptor})
    assert (result.returncode, result.stdout or "", result.stderr or "") == (code, "", said)


@full
@pytest.mark.parametrize(
    "stream, kind, options, code",
    [
        *(("stderr", kind, (), 0) for kind in ("full", "pipe", "terminal")),
        *(("stdout", "full", (), 1), ("stdout", "pipe", ("--json",), 0), ("stdout", "terminal", (), 0)),
    ],
)
def test_training_ends_without_a_reader(
    stream: str, kind: str, options: tuple[str, ...], code: int, here: Path
) -> None:
    command = ("train", "corpus.txt", "--out", "run", "--steps", 3, "--log-every", 1, *TINY, *options)
    with unwritable(kind) as broken, (here / "other").open("w") as other:
        streams = (broken, other.fileno()) if stream == "stdout" else (other.fileno(), broken)
        assert run_on(*streams, *command) == code
    assert json.loads((here / "run/last/state.json").read_text())["step"] == 3
    *_, last = (here / "other").read_text().splitlines()
    said = f"Error: The run is complete and saved in run. {FULL}" if code else "Best validation loss"
    assert last.startswith(said if stream == "stdout" else "run")


@full
@pytest.mark.parametrize(
    "kind, command, code",
    [("full", "sample -n 10000", 1), ("pipe", "sample -n 9 --json", 0), ("terminal", "eval corpus.txt", 0)],
)
def test_a_full_output_ends_a_command_that_prints(kind: str, command: str, code: int, run: Path, here: Path) -> None:
    with unwritable(kind) as stdout, (here / "err.txt").open("w") as stderr:
        assert run_on(stdout, stderr.fileno(), *command.split(), "--model", run, "--quiet") == code
    said = (here / "err.txt").read_text()
    assert said == (f"Error: {FULL}; free some space, or redirect the output.\n" if code else "")


@posix
def test_file_names_in_messages_of_typer_are_escaped_on_a_terminal() -> None:
    """A shell may insert such file names for a pattern such as *."""
    for words in (("runs", "a"), ("doctor", "--quiet"), ()):
        ours, theirs = os.openpty()
        with os.fdopen(theirs, "w") as terminal:
            with contextlib.redirect_stderr(terminal), pytest.raises(SystemExit) as exit:
                app([*words, "\x1b[2J"])
            os.write(theirs, b"\0end")
            shown = b""
            while not shown.endswith(b"\0end") and select.select([ours], [], [], 60)[0]:
                shown += os.read(ours, 1 << 16)
        os.close(ours)
        assert exit.value.code == 2
        assert rb"[2J" in shown and b"\x1b[2J" not in shown


@posix
def test_a_closed_pipe_ends_quietly(run: Path) -> None:
    sample = " ".join(process("sample", "-q", "-m", run, "-n", 100_000, "-t", 0))
    result = run_child(["bash", "-c", f"{sample} | head -c 5; echo ${{PIPESTATUS[0]}} >&2"])
    assert (len(result.stdout), result.stderr) == (5, "0\n")


@posix
@pytest.mark.parametrize(
    "closed, stdout", [pytest.param("2>&-", "run\n", marks=pytest.mark.slow), ("<&- >&- 2>&-", "")]
)
def test_output_to_a_closed_stream_is_dropped(closed: str, stdout: str, here: Path) -> None:
    command = " ".join(process("train", "corpus.txt", "--out", "run", "--steps", 1, *TINY))
    result = run_child(["bash", "-c", f"{command} {closed}"])
    assert (result.returncode, result.stdout) == (0, stdout), result.stderr
    load_model(here / "run")


@posix
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_work_and_prints_the_command_that_resumes(number: int, code: int, here: Path) -> None:
    options = ("--dtype", "fp32", "--dropout", "0.1", "--log-every", 1, "--val-fraction", 0.1)
    # Settings that the plan would derive from the length, which differs between the two runs.
    options = ("--schedule", "constant", "--warmup-steps", 0, "--weight-decay", 0, "--mtp-weight", 0, "--tie", *options)
    options = ("--eval-every", 100, "--save-every", 100, *options, *TINY)
    command = process("train", "corpus.txt", "--out", "my run", "--steps", 100_000, "--json", *options)
    with child_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        for line in child.stdout:
            if '"loss"' in line:
                break
        child.send_signal(number)
        stdout, stderr = child.communicate()
    assert child.returncode == code
    last = json.loads(stdout.splitlines()[-1])
    message = stderr.splitlines()[-1]
    match = re.fullmatch(
        r"Stopped at step (\d+); the run is saved\. The validation loss of its last weights is (.*) bits per byte "
        r"\((.*) nats per token\), on 207 tokens\. Resume it with: tinylm train --resume 'my run'",
        message,
    )
    assert match, stderr
    assert last["stopped_by"] == "signal" and last["step"] == last["best_step"] == int(match[1])
    assert last["val_loss"] == last["best_val_loss"] == pytest.approx(float(match[3]), abs=1e-4)
    assert same_tensors(here / "my run/model.safetensors", here / "my run/last/model.safetensors")
    assert json.loads(run_ok("eval", "--model", "my run", "--json").stdout)["loss"] == pytest.approx(last["val_loss"])
    shown = run_ok("info", "my run").stdout
    assert f"({match[3]} nats per token), on 207 tokens where training was stopped, at step {match[1]}\n" in shown
    more = int(match[1]) + 2
    result = run_ok("train", "--resume", "my run", "--steps", more)
    assert f"at step {match[1]}" in result.stderr
    run_ok("train", "corpus.txt", "--out", "whole", "--steps", more, *options)
    for name in ("model", "optimizer"):
        assert same_tensors(here / f"my run/last/{name}.safetensors", here / f"whole/last/{name}.safetensors")


@posix
@pytest.mark.skipif(sys.platform == "darwin", reason="Linux hangs up a process group when its terminal closes")
def test_a_closed_terminal_saves_the_work(here: Path) -> None:
    """All three streams are the terminal, which is closed when the process prints its last message."""
    import fcntl
    import termios

    ours, theirs = os.openpty()
    command = process("train", "corpus.txt", "--out", "run", "--steps", 100_000, "--save-every", 50_000, *TINY)

    def take_terminal() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with child_process(command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal) as child:
        os.close(theirs)
        metrics = here / "run/metrics.jsonl"
        deadline = time.monotonic() + CHILD_LIMIT
        while not (metrics.exists() and '"grad_norm"' in metrics.read_text()):  # a step was made
            assert time.monotonic() < deadline
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 4096)
        os.close(ours)
        assert child.wait() == 128 + signal.SIGHUP
    step = json.loads((here / "run/last/state.json").read_text())["step"]
    assert step > 0
    assert f"at step {step}" in run_ok("train", "--resume", "run", "--steps", step + 1).stderr
