"""Options that several commands share, and what they all print."""

import functools
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinylm.commands.console import Console
from tinylm.commands.option_groups import complete_runs, option, options_from_env_or_file
from tinylm.commands.option_sources import read_config_file, settings_to_flags
from tinylm.config.settings import ChatSettings, TextFileSettings
from tinylm.config.validation import Panel, Setting
from tinylm.run_directory.layout import ADAPTER_FILE

if TYPE_CHECKING:
    from tinylm.text.file_selection import TextSource


MAX_HELP_COLUMNS, HELP_INDENT, MAX_VALUE_COLUMNS = 100, 26, 14  # of -h
FIRST_EXAMPLES = 3


def store_debug(ctx: typer.Context, debug: bool) -> bool:
    """Callback of --debug: store the value in the root context, for the error handling of tinylm/cli.py."""
    ctx.find_root().obj = {"debug": debug}
    return debug


def show_short_help(ctx: typer.Context, requested: bool) -> bool:
    """Callback of -h: print one screen, with the options in FIRST_OPTIONS of the command's module, or with all."""
    if not requested or ctx.resilient_parsing:
        return requested
    command: Any = ctx.command
    module = sys.modules[command.callback.__module__]
    options = {found.name: found for found in command.params if found.param_type_name == "option"}
    names = getattr(module, "FIRST_OPTIONS", " ".join(name for name in options if name != "short_help")).split()
    names = [name for name in names if name in options]
    width = min(shutil.get_terminal_size().columns, MAX_HELP_COLUMNS)
    summary = textwrap.wrap(command.help.partition("\n\n")[0], max(width, HELP_INDENT))
    lines = [command.get_usage(ctx).strip(), "", *summary, ""]
    for shown in (options[name] for name in names):
        flags = ", ".join(sorted(shown.opts, key=len))
        value = "" if shown.is_flag else f" {shown.metavar}"
        start = f"  {flags}{value if len(value) <= MAX_VALUE_COLUMNS else ' ...'}"
        # The first sentence, up to a semicolon, without parentheses, in a column beside the flags
        brief = re.sub(r" \([^)]*\)", "", shown.help).partition(". ")[0].partition(";")[0].rstrip(".")
        first, *others = textwrap.wrap(brief, max(width - HELP_INDENT, HELP_INDENT))
        lines += [f"{start:<{HELP_INDENT}}{first}", *(" " * HELP_INDENT + line for line in others)]
    examples = getattr(module, "EXAMPLES", "").strip().split("\n\n")[: FIRST_EXAMPLES + 1]
    lines += ["", *"\n".join(examples).splitlines()] if examples != [""] else []
    lines += ["", f"All options: {ctx.command_path} --help"]
    Console().result("\n".join(lines))
    raise typer.Exit


@dataclass(frozen=True)
class OutputOptions:
    """The options of every command: its output and --config. `ctx` is the context of the command."""

    ctx: typer.Context
    quiet: Annotated[
        bool, Setting("Print no progress and no notes on stderr.", Panel.OUTPUT, flags=("--quiet", "-q"))
    ] = False
    json: Annotated[bool, Setting("Print results as JSON, one object per line.", Panel.OUTPUT)] = False
    config: Annotated[
        Path | None,
        option(
            "TOML file with options; flags and TINYLM_<COMMAND>_<OPTION> variables override it.",
            Panel.OUTPUT,
            "FILE",
            "--config",
            callback=read_config_file,
            is_eager=True,
        ),
    ] = None
    # Declared after --config, so that the callback of --config runs first: the file may set debug.
    debug: Annotated[
        bool,
        option("Print a traceback with errors.", Panel.OUTPUT, None, "--debug", callback=store_debug, is_eager=True),
    ] = False

    short_help: Annotated[
        bool,
        option(
            "Show the most used options.",
            Panel.OUTPUT,
            None,
            "-h",
            callback=show_short_help,
            is_eager=True,
            allow_from_autoenv=False,
            expose_value=False,
        ),
    ] = False

    def console(self) -> Console:
        """The console of the command; its notes and warnings show settings as flags."""
        return Console(self.quiet, self.json, functools.partial(settings_to_flags, self.ctx))


def text_source(
    ctx: typer.Context,
    names: Sequence[str],
    text: TextFileSettings,
    unknown: str = "error",
    chat: ChatSettings | None = None,
) -> "TextSource":
    """The source of the texts at these paths, read with these options.

    Options from environment variables and the --config file are ignored where they do not apply to a text. Raises
    UsageError for an unknown value of `unknown` or `chat.train_on`.
    """
    from tinylm.text.file_selection import TextSource

    chat = chat or ChatSettings()
    ignorable = options_from_env_or_file(ctx, text, chat)
    return TextSource(paths=tuple(names), unknown=unknown, ignorable=ignorable, **vars(text), **vars(chat))


UNITS = {  # by the end of a name, the longest first
    "_microseconds": "µs",
    "_tflops": "TFLOP/s",
    "_gb": "GB",
    "_mb": "MB",
}


def print_fields(console: Console, title: str, fields: Mapping[str, Any], *, first: bool = False) -> None:
    """Print a title and a line per field. first: whether to omit the empty line before the title."""
    console.result(title if first else f"\n{title}")
    for name, value in fields.items():
        console.field(*_name_and_text(name, value))


def _name_and_text(name: str, value: Any) -> tuple[str, str]:
    """The name in words, without its unit, and the value with it, as in memory_gb: memory, 2.6 GB."""
    end = next((end for end in UNITS if name.endswith(end)), "")
    shown = name if name.isupper() else name.removesuffix(end).replace("_", " ")  # environment variables are kept
    return shown, f"{_as_text(value)} {UNITS[end]}" if end and value is not None else _as_text(value)


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(" ".join(_name_and_text(name, part)) for name, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


ModelOption = Annotated[
    Path | None,
    Setting(
        "Run, Hugging Face folder, GGUF file or hf:OWNER/NAME (default: the adapter's base, or the newest model).",
        None,
        metavar="MODEL",
        flags=("--model", "-m"),
    ),
]
ResumeAdapterOption = Annotated[
    Path | None,
    option(
        "Continue training this adapter; only length, intervals and --parallel may change.",
        Panel.RUN,
        "RUN",
        autocompletion=complete_runs(ADAPTER_FILE),
    ),
]
AdapterOption = Annotated[
    list[str] | None,
    option(
        "Adapter directory or name; may be given several times. DIR=0.5 scales its update by 0.5.",
        None,
        "DIR",
        "--adapter",
        autocompletion=complete_runs(ADAPTER_FILE),
    ),
]
