"""The command line: registers the commands, and turns an error into a message and an exit code."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tinylm import __version__
from tinylm.commands import (
    evaluate,
    finetune_adapter,
    finetune_lora,
    info,
    merge_lora,
    runs,
    sample,
    train,
    train_tokenizer,
)
from tinylm.console import Console, printable
from tinylm.errors import InterruptedRunError, OutputError, TinyLMError, is_out_of_memory
from tinylm.interrupts import was_interrupted


class Commands(TyperGroup):
    """The one place that knows what an error is worth."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            try:
                return super().main(*args, **extra)
            finally:  # at exit, Python could only complain
                sys.stdout.flush()
        except OutputError as error:
            if error.exit_code:
                Console().error(str(error))
            sys.exit(error.exit_code)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().make_context(*args, **extra)
        except Exception as error:
            _make_printable(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, OutputError) or was_interrupted():
                raise
            if hasattr(error, "exit_code") and not isinstance(error, TinyLMError):  # Typer's own: it prints them
                _name_source(error)
                _make_printable(error)
                raise
            raise typer.Exit(_report(ctx, error)) from None


def _report(ctx: Any, error: Exception) -> int:
    """Say what went wrong; returns the exit code."""
    if isinstance(error, InterruptedRunError):
        Console().note(str(error))
        return error.exit_code
    if (ctx.find_root().obj or {}).get("debug"):
        Console().traceback()
    if isinstance(error, TinyLMError):
        Console().error(str(error))
        return error.exit_code
    if isinstance(error, OSError):
        where = f"Cannot use {str(error.filename)[:200]}" if error.filename else "The operating system reports"
        Console().error(f"{where}: {error.strerror or error}. Remove the cause and run the command again.")
    elif is_out_of_memory(error):
        Console().error("Out of memory. Choose a smaller --size, --context or --batch-size.")
    else:
        Console().error(
            f"Something went wrong inside tinylm ({type(error).__name__}: {error}). Run it again with --debug to "
            "see where, and please report it."
        )
    return 1


def _name_source(error: Any) -> None:
    """Say of a value that was not typed where it came from."""
    invocation, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if invocation is None or parameter is None:
        return
    source = invocation.get_parameter_source(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        error.message += f" (in the environment: {parameter.resolve_envvar_value(invocation)!r})"
    elif source is not None and source.name == "DEFAULT_MAP":
        error.message += f" (in the --config file: {invocation.lookup_default(parameter.name)!r})"


def _make_printable(error: Any) -> None:
    """Escape what a terminal would interpret in a message of Typer's, which may quote a file or a variable."""
    if isinstance(getattr(error, "message", None), str):
        error.message = printable(error.message, sys.stderr)


app = typer.Typer(
    name="tinylm",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "TINYLM", "help_option_names": ["--help", "-h"]},
    help="Turn a text into a language model, and put it to work.",
)

app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("sample", epilog=sample.EXAMPLES)(sample.sample)
app.command("eval")(evaluate.evaluate_model)
app.command("finetune-lora")(finetune_lora.finetune_lora)
app.command("finetune-adapter")(finetune_adapter.finetune_adapter)
app.command("merge-lora")(merge_lora.merge)
app.command("runs")(runs.runs)
app.command("info")(info.info)
app.command("train-tokenizer")(train_tokenizer.train_tokenizer)


def _print_version(wanted: bool) -> None:
    if wanted:
        Console().result(f"tinylm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True, allow_from_autoenv=False
        ),
    ] = False,
) -> None:
    pass
