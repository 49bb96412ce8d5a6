"""The command line: registers the commands, and turns an error into a message and an exit code."""

import os
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
from tinylm.commands.options import print_traceback_if_debugging
from tinylm.console import Console
from tinylm.errors import InterruptedRunError, TinyLMError, is_out_of_memory


class Commands(TyperGroup):
    """The one place that knows what an error is worth."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InterruptedRunError as error:
            Console().note(str(error))
            raise typer.Exit(error.exit_code) from None
        except TinyLMError as error:
            print_traceback_if_debugging(ctx)
            Console().error(str(error))
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:
            # Whoever read the output has seen enough. Python would complain again when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            print_traceback_if_debugging(ctx)
            where = f" ({str(error.filename)[:200]})" if error.filename else ""
            Console().error(
                f"The system refused: {error.strerror or error}{where}. Mend that and run the command again."
            )
            raise typer.Exit(1) from None
        except Exception as error:
            if hasattr(error, "exit_code"):  # Typer's own: it prints them
                _name_source(error)
                raise
            print_traceback_if_debugging(ctx)
            if is_out_of_memory(error):
                Console().error("Out of memory. Choose a smaller --size, --context or --batch-size.")
                raise typer.Exit(1) from None
            Console().error(
                f"Something went wrong inside tinylm ({type(error).__name__}: {error}). Run it again with --debug to "
                "see where, and please report it."
            )
            raise typer.Exit(1) from None


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
        print(f"tinylm {__version__}")
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
