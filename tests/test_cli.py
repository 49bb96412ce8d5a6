"""The command line as a whole: help, errors and exit codes, sources of options, pipes and signals."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import tinylm
from tests.machines import write_profile
from tests.shell import (
    CHILD_LIMIT,
    TINY,
    assert_error,
    assert_usage_error,
    child_process,
    environment,
    run_child,
    run_ok,
    same_tensors,
    story,
)
from tests.shell import tinylm as shell
from tinylm.cli import app
from tinylm.errors import DivergedError, InterruptedRunError, TinyLMError, UsageError
from tinylm.run_directory.loading import load_model
from tinylm.streams import prepare_streams

HEAVY = {"torch", "numpy", "tokenizers", "safetensors", "gigatoken"}
COMMANDS = (
    "train",
    "sample",
    "chat",
    "runs",
    "info",
    "eval",
    "compare",
    "report",
    "finetune-lora",
    "finetune-adapter",
    "merge-lora",
    "import",
    "export",
    "train-tokenizer",
    "doctor",
    "cache",
)
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and pipes")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text(story(2000))
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLM_CACHE", str(folder / "cache"))
        write_profile(folder / "cache")
        (folder / "corpus.txt").write_text(story(2000))
        run_ok("train", folder / "corpus.txt", "--out", folder / "run", "--steps", 2, *TINY)
    yield folder / "run"


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
    listing = run_ok("--help").stdout
    assert all(f" {name} " in listing for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_option_with_its_description(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    shown = " ".join(run_ok(name, "--help").stdout.split())
    command = typer.main.get_command(app).commands[name]
    assert command.help and command.help.split("\n")[0] in shown
    for parameter in command.params:
        assert parameter.help, parameter.name
        assert parameter.help in shown, parameter.name
        is_option = parameter.param_type_name == "option"
        for spelling in (*parameter.opts, *parameter.secondary_opts) if is_option else (parameter.metavar or name,):
            assert spelling in shown
    assert run_ok(name, "-h").stdout == run_ok(name, "--help").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_truncates_no_name_in_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    words = set(run_ok(name, "--help").stdout.split())
    for parameter in typer.main.get_command(app).commands[name].params:
        if parameter.param_type_name == "option":
            assert words >= {*parameter.opts, *parameter.secondary_opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options(name: str) -> None:
    command = typer.main.get_command(app).commands[name]
    spellings = {spelling for parameter in command.params for spelling in parameter.opts}
    assert {"--quiet", "-q", "--json", "--debug", "--config"} <= spellings


def test_a_command_is_imported_only_when_it_runs_or_is_listed() -> None:
    """Importing and building all commands takes more processor time than the rest of the command line."""
    program = """
import sys
from tinylm.cli import app
app(["runs", "--quiet"], standalone_mode=False)
print(*sorted(name for name in sys.modules if name in ("tinylm.commands.runs", "tinylm.commands.train")))
"""
    assert run_child([sys.executable, "-c", program]).stdout.split() == ["tinylm.commands.runs"]


def test_completion_offers_all_commands() -> None:
    variables = {"_TINYLM_COMPLETE": "complete_bash", "COMP_WORDS": "tinylm ", "COMP_CWORD": "1"}
    program = 'from tinylm.cli import app; app(prog_name="tinylm")'
    result = run_child([sys.executable, "-c", program], env={**environment(), **variables})
    assert tuple(result.stdout.split()) == COMMANDS, result


def test_version_is_printed_and_no_argument_prints_the_usage() -> None:
    assert run_ok("--version").stdout == f"tinylm {tinylm.__version__}\n"
    bare = shell()
    assert bare.exit_code == 2
    assert "Usage: tinylm" in bare.output
    places = [
        bare.output.index(words) for words in ("tinylm train book.txt", 'tinylm sample "Once', "Options", "Start here")
    ]
    assert places == sorted(places)


def test_the_environment_variable_tinylm_version_sets_no_option() -> None:
    run_ok("runs", env={"TINYLM_VERSION": "1.2.3"})


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in run_ok("--help").stdout


@pytest.mark.parametrize("words", [("dance",), ("train", "--dance"), ("merge-lora",), ("runs", "a", "b")])
def test_unknown_commands_and_options_have_exit_code_2(words: tuple[str, ...]) -> None:
    assert_usage_error(shell(*words), "Usage: tinylm", "--help")
    assert_usage_error(shell("sample", "-n"), "Option '-n' requires an argument")


# Errors


@pytest.mark.parametrize(
    "error, code",
    [
        (TinyLMError("The disk is full."), 1),
        (UsageError("The disk is full."), 2),
        (DivergedError("The disk is full."), 3),
    ],
)
def test_errors_have_their_exit_codes(error: TinyLMError, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr("tinylm.run_directory.loading.read_config", fail)
    result = shell("info", ".")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", "Error: The disk is full.\n")
    debugged = shell("info", ".", "--debug")
    assert debugged.exit_code == code
    assert debugged.stderr.startswith("Traceback (most recent call last):")
    assert debugged.stderr.endswith("Error: The disk is full.\n")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_is_a_note_and_not_an_error(number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(path: Path) -> None:
        raise InterruptedRunError("All is saved.", number)

    monkeypatch.setattr("tinylm.run_directory.loading.read_config", stop)
    result = shell("info", ".", "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", "All is saved.\n")


def test_notes_of_an_error_are_printed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that the save, which was written when the error occurred, failed as well."""

    def fail(path: Path) -> None:
        error = DivergedError("The loss is not finite.")
        error.add_note("Cannot write run.")
        raise error

    monkeypatch.setattr("tinylm.run_directory.loading.read_config", fail)
    result = shell("info", ".")
    assert result.exit_code == 3
    assert result.stderr == "Error: The loss is not finite.\nError: Cannot write run.\n"


@pytest.mark.parametrize(
    "error, words",
    [
        (
            ZeroDivisionError("division by zero"),
            "Internal error of tinylm (ZeroDivisionError: division by zero).",
        ),
        (PermissionError(13, "Permission denied", "/x/y"), "Cannot access /x/y: Permission denied."),
        (OSError("no reason"), "Operating system error: no reason."),
        (MemoryError(), "Out of memory. Free some memory, then run the command again."),
    ],
)
def test_unexpected_errors_print_a_sentence_and_have_exit_code_1(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr("tinylm.run_directory.loading.read_config", fail)
    assert_error(shell("info", "."), 1, words)
    assert "Traceback" in shell("info", ".", "--debug").stderr
    assert "Traceback" in shell("info", ".", env={"TINYLM_INFO_DEBUG": "1"}).stderr


def test_ctrl_c_outside_of_training_prints_nothing_and_has_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinylm.run_directory.loading.read_config", interrupt)
    result = shell("info", ".")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr


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
    script = 'rmdir "$1"; shift; exec "$@"'
    command = ["sh", "-c", script, "sh", str(gone), *process("info", tmp_path)]
    result = subprocess.run(command, cwd=gone, capture_output=True, text=True, env=environment(), timeout=60)
    message = "Error: The working directory was deleted; go to another one (cd) and run the command again.\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


def test_no_color_is_honoured() -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert colour.search(shell("info", "x", env={"FORCE_COLOR": "1"}).stderr)
    assert not colour.search(shell("info", "x", env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stderr)
    assert "\x1b" not in shell("info", "x").stderr


# Options from a file and from the environment


def planned(*arguments: object, env: dict[str, str] | None = None) -> str:
    return run_ok("train", "corpus.txt", "--dry-run", *TINY, *arguments, env=env).stdout


def test_flag_beats_environment_beats_file_beats_default(here: Path) -> None:
    (here / "my.toml").write_bytes(b"\xef\xbb\xbfsteps = 11\n")  # with a byte-order mark, as Notepad writes it
    file, variable = ("--config", "my.toml"), {"TINYLM_TRAIN_STEPS": "12"}
    assert "length:    11 steps" in planned(*file)
    assert "length:    12 steps" in planned(*file, env=variable)
    assert "length:    12 steps" in planned(env=variable)
    assert "length:    13 steps" in planned(*file, "--steps", 13, env=variable)
    assert re.search(r"length: +[\d,]+ steps, 4\d\.\d passes over the text", planned())


def test_the_message_for_a_bad_value_names_the_variable_or_file_that_it_comes_from(here: Path) -> None:
    (here / "my.toml").write_text('steps = "some"\n')
    assert_usage_error(
        shell("train", "corpus.txt", env={"TINYLM_TRAIN_STEPS": "few"}),
        "'--steps'",
        "in the environment variable",
        "TINYLM_TRAIN_STEPS",
    )
    assert_usage_error(shell("train", "corpus.txt", "--config", "my.toml"), "'--steps'", "in the file my.toml: 'some'")
    typed = shell("train", "corpus.txt", "--steps", "many")
    assert_usage_error(typed, "'--steps'")
    assert "(in the" not in typed.stderr


def test_a_command_with_a_hyphen_has_environment_variables(trained: Path) -> None:
    def adapter(**env: str) -> str:
        options = ("--model", trained, "--out", "ad", "--steps", 1, "--batch-size", 4, "--dry-run")
        return run_ok("finetune-lora", "corpus.txt", *options, env=env).stdout

    small, large = (
        int(match[1].replace(",", ""))
        for rank in ("2", "6")
        if (match := re.search(r"adapter: .*: ([\d,]+) parameters", adapter(TINYLM_FINETUNE_LORA_RANK=rank)))
    )
    assert large == 3 * small


def test_an_environment_variable_can_name_the_file_of_options(here: Path) -> None:
    (here / "my.toml").write_text("steps = 11\n")
    assert "length:    11 steps" in planned(env={"TINYLM_TRAIN_CONFIG": "my.toml"})


def test_a_file_names_options_with_hyphens_or_underscores(here: Path) -> None:
    (here / "my.toml").write_text(
        'steps = 1\nbatch-size = 7\nmicro_batch = 3\nlr = 1\nnorm-gain = false\nseed = 4\nout = "o"'
    )
    run_ok("train", "corpus.txt", *TINY[:-2], "--config", "my.toml")
    _, config, *_ = load_model(here / "o")
    assert config.training is not None
    assert (config.training.batch_size, config.training.micro_batch, config.training.seed) == (7, 3, 4)
    assert (config.training.lr, config.model.norm_gain) == (1.0, False)


def test_a_file_can_set_lists_texts_and_switches(here: Path, trained: Path) -> None:
    (here / "train.toml").write_text('corpus = ["corpus.txt"]\ntime = "5m"\nquiet = true\ndry-run = true\n')
    assert run_ok("train", "--config", "train.toml").stderr == ""
    (here / "train.toml").write_text('corpus = "corpus.txt"\ntime = 300\ndry-run = true\n')
    assert "time:      about 5m 00s" in run_ok("train", "--config", "train.toml").stdout
    (here / "sample.toml").write_text(f'model = "{trained.as_posix()}"\nseed = 1\nmax-tokens = 30\njson = true\n')
    text = run_ok("sample", "--config", "sample.toml", "--no-stream").stdout
    for stop in ("stop = 'XY'", "stop = ['X', 'Y']"):
        (here / "stop.toml").write_text((here / "sample.toml").read_text() + stop)
        assert run_ok("sample", "--config", "stop.toml").stdout == text


@pytest.mark.parametrize(
    "content, parts",
    [
        ("layer = 2", ("my.toml sets layer, which tinylm train does not have; use layers.",)),
        ("[train]\nsteps = 2", ("my.toml sets train,", "tinylm train --help")),
        ("max-tokens = 2", ("my.toml sets max-tokens,",)),
        ("steps = ", ("my.toml is not valid TOML",)),
        (b"out = '\xff'", ("my.toml is not valid TOML",)),
        (None, ("Cannot read --config my.toml: No such file",)),
    ],
)
def test_the_error_names_an_invalid_file(content: str | bytes | None, parts: tuple[str, ...], here: Path) -> None:
    if content is not None:
        (here / "my.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_error(shell("train", "corpus.txt", "--config", "my.toml", *TINY), 2, *parts)


@pytest.mark.parametrize(
    "content", ["steps = 'many'", "steps = 2.5", "steps = [1, 2]", "steps = {n = 1}", "lr = 'x'", "out = 5"]
)
def test_a_file_with_a_value_of_the_wrong_kind_names_the_option(content: str, here: Path) -> None:
    (here / "my.toml").write_text(content)
    assert_usage_error(
        shell("train", "corpus.txt", "--config", "my.toml"), f"Invalid value for '--{content.split(' ')[0]}'"
    )


def test_a_variable_with_a_value_of_the_wrong_kind_names_the_option() -> None:
    assert_usage_error(
        shell("train", "corpus.txt", env={"TINYLM_TRAIN_STEPS": "many"}), "Invalid value for '--steps'", "integer"
    )


def test_values_from_file_and_environment_are_checked_like_flags(here: Path) -> None:
    (here / "my.toml").write_text("width = 15")
    assert_error(
        shell("train", "corpus.txt", "--config", "my.toml", "--heads", 2, "--steps", 1),
        2,
        "--heads is 2; it must divide",
    )
    assert_error(
        shell("train", "corpus.txt", "--steps", 1, env={"TINYLM_TRAIN_BATCH_SIZE": "0"}), 2, "--batch-size is 0"
    )
    contradiction = shell("train", "corpus.txt", "--steps", 1, env={"TINYLM_TRAIN_EPOCHS": "2"})
    assert_error(contradiction, 2, "--steps and --epochs contradict each other")


# Pipes and signals


FULL = "Cannot write to standard output: No space left on device"
CHEAP = [("--help",), ("train", "--help"), ("--version",), ("runs", "--help")]


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


def process_on(words: tuple[str, ...], folder: Path, **streams: int) -> "subprocess.CompletedProcess[str]":
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(process(*words), **both, text=True, env=environment(), cwd=folder, timeout=60)


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
@pytest.mark.parametrize("words", CHEAP)
def test_a_result_that_does_not_fit_on_the_disk_is_an_error(words: tuple[str, ...], trained: Path) -> None:
    with unwritable("full") as stdout:
        result = process_on(words, trained.parent, stdout=stdout)
    said = f"Error: {FULL}; free some space, or redirect the output.\n"
    assert (result.returncode, result.stderr) == (1, said)


@posix
@pytest.mark.parametrize("words", CHEAP)
def test_a_result_without_a_reader_is_not_an_error(words: tuple[str, ...], trained: Path) -> None:
    with unwritable("pipe") as stdout:
        result = process_on(words, trained.parent, stdout=stdout)
    assert (result.returncode, result.stderr) == (0, "")


@full
@pytest.mark.parametrize("words, code", [(("sample", "-n", "0"), 2), (("train", "--dance"), 2)])
@pytest.mark.parametrize("kind", ["full", "pipe", "terminal"])
def test_an_error_that_cannot_be_written_keeps_its_exit_code(
    kind: str, words: tuple[str, ...], code: int, here: Path
) -> None:
    with unwritable(kind) as stderr:
        result = process_on(words, here, stderr=stderr)
    assert (result.returncode, result.stdout) == (code, "")


@full
@pytest.mark.parametrize("kind", ["full", "pipe", "terminal"])
def test_training_completes_without_a_reader_of_its_messages(kind: str, here: Path) -> None:
    with unwritable(kind) as stderr, (here / "out.txt").open("w") as stdout:
        assert run_on(stdout.fileno(), stderr, "train", "corpus.txt", "--out", "run", "--steps", 3, *TINY) == 0
    assert (here / "out.txt").read_text() == "run\n"
    assert json.loads((here / "run/last/state.json").read_text())["step"] == 3


@full
@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("kind, code", [("full", 1), ("pipe", 0), ("terminal", 0)])
def test_training_completes_without_a_reader_of_its_output(
    kind: str, code: int, options: tuple[str, ...], here: Path
) -> None:
    command = ("train", "corpus.txt", "--out", "run", "--steps", 3, "--log-every", 1, *TINY, *options)
    with unwritable(kind) as stdout, (here / "err.txt").open("w") as stderr:
        assert run_on(stdout, stderr.fileno(), *command) == code
    assert json.loads((here / "run/last/state.json").read_text())["step"] == 3
    said = (here / "err.txt").read_text().splitlines()[-1]
    if code:
        assert said.startswith(f"Error: The run is complete and saved in run. {FULL}")
    else:
        assert said.startswith("Best validation loss")


@full
@pytest.mark.parametrize("command", [("sample", "-n", 10_000), ("sample", "-n", 9, "--json"), ("eval", "corpus.txt")])
@pytest.mark.parametrize("kind, code", [("full", 1), ("pipe", 0), ("terminal", 0)])
def test_output_that_cannot_be_written_ends_a_command_that_only_prints(
    kind: str, code: int, command: tuple[object, ...], trained: Path, here: Path
) -> None:
    with unwritable(kind) as stdout, (here / "err.txt").open("w") as stderr:
        assert run_on(stdout, stderr.fileno(), *command, "--model", trained, "--quiet") == code
    said = (here / "err.txt").read_text()
    assert said == (f"Error: {FULL}; free some space, or redirect the output.\n" if code else "")


@posix
@pytest.mark.parametrize("words", [("runs", "a"), ("doctor", "--quiet"), ()])
def test_file_names_in_messages_of_typer_are_escaped_on_a_terminal(words: tuple[str, ...]) -> None:
    """A shell may insert such file names for a pattern such as *."""
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
def test_a_closed_pipe_ends_quietly(trained: Path) -> None:
    sample, table = (" ".join(process(*words)) for words in (("sample", "-q", "-m", trained), ("runs", trained.parent)))
    script = f"{sample} -n 100000 -t 0 | head -c 5; echo ${{PIPESTATUS[0]}} >&2;"
    script += f"{table} | head -c 0; echo ${{PIPESTATUS[0]}} >&2"
    result = run_child(["bash", "-c", script])
    assert result.stderr == "0\n0\n"
    assert len(result.stdout) == 5


@posix
@pytest.mark.parametrize(
    "closed, stdout",
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("<&-", "run\n"), (">&-", ""), ("2>&-", "run\n"))),
        ("<&- >&- 2>&-", ""),
    ],
)
def test_output_to_a_closed_stream_is_dropped(closed: str, stdout: str, here: Path) -> None:
    command = " ".join(process("train", "corpus.txt", "--out", "run", "--steps", 1, *TINY))
    result = run_child(["bash", "-c", f"{command} {closed}"])
    assert (result.returncode, result.stdout) == (0, stdout), result.stderr
    load_model(here / "run")


ENDING = """
import atexit, gc, sys
from tinylm.__main__ import main

atexit.register(lambda: print(gc.get_freeze_count()))  # comes after what main registers
sys.argv = ["tinylm", "sample", "--no-such-option"]
main()
"""


def test_at_exit_of_a_command_that_computes_the_garbage_collector_ignores_imported_objects() -> None:
    result = run_child([sys.executable, "-c", ENDING])
    assert int(result.stdout.splitlines()[-1]) > 1000  # gc.freeze has moved them out of its reach


@posix
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_work_and_prints_the_command_that_resumes(number: int, code: int, here: Path) -> None:
    """The resumed run ends with the weights of an uninterrupted run."""
    options = ("--dtype", "fp32", "--dropout", "0.1", "--log-every", 1)
    # Settings that the plan would derive from the length, which differs between the two runs.
    options = ("--schedule", "constant", "--warmup-steps", 0, "--weight-decay", 0, "--mtp-weight", 0, "--tie", *options)
    options = ("--eval-every", 100, "--save-every", 100, *options, *TINY)
    command = process("train", "corpus.txt", "--out", "my run", "--steps", 100_000, "--json", *options)
    with child_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if '"loss"' in line:
                break
        child.send_signal(number)
        _, stderr = child.communicate()
    assert child.returncode == code
    message = stderr.splitlines()[-1]
    match = re.fullmatch(
        r"Stopped at step (\d+); the run is saved\. Its weights are those of step 0, the best that were evaluated; "
        r"those of step (\d+) are 'my run/last'\. Resume it with: tinylm (.*)",
        message,
    )
    assert match, stderr
    assert match[1] == match[2] and match[3] == "train --resume 'my run'"
    assert run_ok("info", "my run/last", "--json").stdout.count(f'"best_step": {match[1]}') == 1
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
