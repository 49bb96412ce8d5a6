"""The Typer application: lists the commands, and maps errors to messages and exit codes."""

import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from tinylm import __version__
from tinylm.commands.console import Console, long_flag, printable
from tinylm.commands.option_groups import COMMAND_LINE
from tinylm.commands.option_sources import describe_source
from tinylm.commands.suggestions import explain_extra_argument, explain_unknown_command, explain_unknown_option
from tinylm.errors import InterruptedRunError, JoinError, OutputError, TinyLMError, UsageError, is_out_of_memory
from tinylm.system.process_signals import was_interrupted

PANELS = {  # the groups of commands in `tinylm --help`, with the function in tinylm.commands of each command
    "Start here": {"train": "train.train", "sample": "sample.sample", "chat": "chat.chat", "serve": "serve.serve"},
    "Look at models": {
        "runs": "runs.runs",
        "info": "info.info",
        "eval": "evaluate.evaluate_model",
        "classify": "classify.classify",
        "compare": "compare.compare",
        "report": "report.report",
    },
    "Fine-tune": {
        "finetune-lora": "finetune.finetune_lora",
        "finetune-adapter": "finetune.finetune_adapter",
        "merge-lora": "merge_lora.merge_lora",
    },
    "Models of other tools": {"import": "import_model.import_model", "export": "export_model.export_model"},
    "Tokenizer and machine": {
        "train-tokenizer": "train_tokenizer.train_tokenizer",
        "doctor": "doctor.doctor",
        "cache": "cache.cache",
    },
}
COMMANDS = {name: (function, panel) for panel, functions in PANELS.items() for name, function in functions.items()}
COMPLETION = "_TINYLM_COMPLETE"  # the environment variable by which a shell asks for completions
MEMORY_OPTIONS = ("size", "context", "batch_size", "micro_batch", "num_samples", "beams")  # smaller needs less memory


@functools.cache
def load_command(name: str) -> Any:
    """The Typer command `name`. Imports its module. Raises KeyError for an unknown name."""
    path, panel = COMMANDS[name]
    module_name, function = path.split(".")
    module = importlib.import_module(f"tinylm.commands.{module_name}")
    # `get_command` of an application with one command returns that command, not a group.
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(
        name,
        epilog=getattr(module, "EXAMPLES", None),
        rich_help_panel=panel,
        context_settings={"help_option_names": ["--help"]},  # -h: see OutputOptions
    )(getattr(module, function))
    return typer.main.get_command(single)


class LazyCommands(Mapping[str, Any]):
    """All commands by name, each imported when it is looked up: importing all takes 0.15 s (decision 025)."""

    def __getitem__(self, name: str) -> Any:
        return load_command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class CommandGroup(TyperGroup):
    """The group of all commands. An exception of a command ends the process with a message and an exit code."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": LazyCommands()})

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line. If stdout cannot be written, exit with 1, or with 0 if its reader has closed it."""
        if COMPLETION in os.environ:
            os.environ["COLUMNS"] = "10000"  # Typer wraps descriptions, whose lines fish would take for candidates
        try:
            try:
                return super().main(*args, **extra)
            finally:  # here, since an error of the flush at interpreter exit cannot be handled
                sys.stdout.flush()
        except OutputError as error:
            if error.exit_code:
                Console().error(str(error))
            sys.exit(error.exit_code)

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **extra: Any) -> Any:
        """Parse the arguments before the command name, and keep all for messages. Typer prints the errors."""
        words = ("tinylm", *args)
        try:
            ctx = super().make_context(info_name, args, *others, **extra)
            ctx.meta[COMMAND_LINE] = words
            return ctx
        except Exception as error:
            _make_printable(error)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first argument. For an unknown one, the error suggests a command."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. {explain_unknown_command(args[0], list(COMMANDS))}".rstrip())
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Parse the arguments of a command and run it. On an error, print it and exit with its exit code."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, OutputError) or was_interrupted():
                raise
            if hasattr(error, "exit_code") and not isinstance(error, TinyLMError):  # an error of Typer, which prints it
                _append_source(error)
                _append_suggestion(error)
                _make_printable(error)
                raise
            exit_code = _print_error(ctx, error)
            for note in getattr(error, "__notes__", ()):  # such as the error of a save that has failed as well
                Console().error(note)
            raise typer.Exit(exit_code) from None


def _print_error(ctx: Any, error: Exception) -> int:
    """Print the error, and return the exit code."""
    if isinstance(error, JoinError):  # the stderr of other ranks is silenced, and rank 0 may not be running
        sys.stderr = sys.__stderr__
    if isinstance(error, InterruptedRunError):
        Console().note(str(error))
        return error.exit_code
    if (ctx.find_root().obj or {}).get("debug"):
        Console().traceback()
    if isinstance(error, TinyLMError):
        Console().error(str(error))
        return error.exit_code
    if isinstance(error, OSError):
        problem = f"Cannot access {str(error.filename)[:200]}" if error.filename else "Operating system error"
        Console().error(f"{problem}: {error.strerror or error}.")
    elif is_out_of_memory(error):
        command = ctx.command.commands.get(ctx.invoked_subcommand)
        parameters = {} if command is None else {parameter.name: parameter for parameter in command.params}
        flags = [long_flag(parameters[name]) for name in MEMORY_OPTIONS if name in parameters]
        advice = f"Reduce one of: {', '.join(flags)}." if flags else "Free some memory, then run the command again."
        Console().error(f"Out of memory. {advice}")
    else:
        Console().error(
            f"Internal error of tinylm ({type(error).__name__}: {error}). Run the command again with --debug for a "
            "traceback, and please report it."
        )
    return 1


def _append_source(error: Any) -> None:
    """Append to a parsing error of Typer the environment variable or file that the value comes from."""
    ctx, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if ctx is None or parameter is None:
        return
    if (source := describe_source(ctx, parameter)) is None:
        return
    from_variable = ctx.get_parameter_source(parameter.name).name == "ENVIRONMENT"
    value = parameter.resolve_envvar_value(ctx) if from_variable else ctx.lookup_default(parameter.name)
    error.message += f" (in {source}: {value!r})"


def _append_suggestion(error: Any) -> None:
    """Append to Typer's error for an unknown option or too many arguments what the user may have meant."""
    if (ctx := getattr(error, "ctx", None)) is None:
        return
    sentence = ""
    if hasattr(error, "possibilities"):  # NoSuchOption
        error.possibilities = None
        sentence = explain_unknown_option(ctx, error.option_name)
    elif error.message.startswith("Got unexpected extra argument"):
        sentence = explain_extra_argument(ctx)
    if sentence:
        error.message = f"{error.message.rstrip('.')}. {sentence}"


def _make_printable(error: Any) -> None:
    """Escape control characters in a message of Typer, which may quote a file or a variable."""
    if isinstance(getattr(error, "message", None), str):
        error.message = printable(error.message, sys.stderr)


HELP = """Train, fine-tune, evaluate and sample small language models.

Start with a text file:

tinylm train book.txt
    Train a model on it; everything is chosen automatically.

tinylm sample "Once upon a time"
    Continue a text with that model.

tinylm COMMAND --help
    The options of a command, with examples.
"""
app = typer.Typer(
    name="tinylm",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "TINYLM", "help_option_names": ["--help", "-h"]},
    help=HELP,
)


def _print_version(requested: bool) -> None:
    if requested:
        Console().result(f"tinylm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True, allow_from_autoenv=False
        ),
    ] = False,
) -> None:
    """Options that come before the command name. Raises UsageError if the working directory was deleted."""
    try:
        Path.cwd()
    except FileNotFoundError:  # oneMKL would end the process
        raise UsageError(
            "The working directory was deleted; go to another one (cd) and run the command again."
        ) from None
