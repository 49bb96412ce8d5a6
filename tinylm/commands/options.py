"""The declaration of options, and the options that most commands share."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinylm.commands.console import Console
from tinylm.commands.flags import settings_to_flags
from tinylm.commands.option_groups import options_from_env_or_file
from tinylm.commands.option_sources import read_config_file
from tinylm.config.run import TRAIN_ON
from tinylm.config.validation import check_choice

if TYPE_CHECKING:
    from tinylm.text.corpus_loading import TextSource


class Panel:
    """Titles of the panels that group options in --help."""

    OUTPUT = "Output"
    DATA = "Data"
    RUN = "Run directory"
    LENGTH = "Training length"
    MODEL = "Model"
    MODEL_SWITCHES = "Model parts (on or off)"
    EXPERTS = "Experts"
    OPTIMIZER = "Optimizer"
    MEMORY = "Memory"
    INTERVALS = "Intervals"
    MACHINE = "Machine"
    ADAPTER = "Adapter"
    TOKENIZER = "Tokenizer"
    PROMPT = "Prompt"
    SAMPLING = "Sampling"
    TEXT = "Text"
    ENCODER_DECODER = "Encoder-decoder"
    MEMORISATION = "Memorisation"


def option(help: str, panel: str | None = None, metavar: str | None = None, *names: str, **extra: Any) -> Any:
    """A `typer.Option` with a help panel.

    Shell completion offers the words of a metavar such as auto|char|PATH that are not upper case, if there are several.
    """
    values = [word for word in (metavar or "").split("|") if word and not word.isupper()]
    if len(values) > 1:
        extra.setdefault("autocompletion", lambda incomplete: [word for word in values if word.startswith(incomplete)])
    return typer.Option(
        *names, help=help, rich_help_panel=panel, metavar=metavar, show_default=False, show_envvar=False, **extra
    )


def one_of(values: Iterable[str]) -> str:
    """The metavar of an option that takes one of these values."""
    return "|".join(values)


def store_debug(ctx: typer.Context, debug: bool) -> bool:
    """Callback of --debug: store the value in the root context, for the error handling of tinylm/cli.py."""
    ctx.find_root().obj = {"debug": debug}
    return debug


@dataclass(frozen=True)
class OutputOptions:
    """The options of every command: its output and --config. `ctx` is the context of the command."""

    ctx: typer.Context
    quiet: Annotated[bool, option("Print no progress and no notes on stderr.", Panel.OUTPUT, None, "--quiet", "-q")] = (
        False
    )
    json: Annotated[bool, option("Print results as JSON, one object per line.", Panel.OUTPUT, None, "--json")] = False
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

    def console(self) -> Console:
        """The console of the command; its notes and warnings show settings as flags."""
        return Console(self.quiet, self.json, functools.partial(settings_to_flags, self.ctx))


@dataclass(frozen=True)
class MachineOptions:
    """Device and number format."""

    device: Annotated[
        str,
        option("Device; auto picks CUDA, then MPS, then the CPU (default: auto).", Panel.MACHINE, "auto|cuda|mps|cpu"),
    ] = "auto"
    dtype: Annotated[
        str,
        option(
            "Floating-point format; auto: by the device, or in inference that of 16-bit weights (default: auto).",
            Panel.MACHINE,
            "auto|fp32|bf16|fp16",
        ),
    ] = "auto"


@dataclass(frozen=True)
class TextOptions:
    """How text files are read."""

    format: Annotated[
        str,
        option(
            "Format of the texts; auto detects it, lines is one document per line (default: auto).",
            Panel.DATA,
            one_of(["auto", "text", "jsonl", "lines", "pairs", "chat"]),
        ),
    ] = "auto"
    text_key: Annotated[
        str | None,
        option("Key of the text in JSONL, its column in Parquet and CSV (default: text).", Panel.DATA, "KEY"),
    ] = None
    encoding: Annotated[str, option("Encoding of the text files (default: utf-8).", Panel.DATA, "NAME")] = "utf-8"


@dataclass(frozen=True)
class ChatOptions:
    """How conversations are rendered, and which parts are scored."""

    chat_template: Annotated[
        str | None,
        option(
            "Template of conversations: chatml, or a Jinja file (default: the model's own, else chatml).",
            Panel.DATA,
            "chatml|FILE",
        ),
    ] = None
    train_on: Annotated[
        str | None,
        option(
            "Scored parts of conversations: all answers, the last answer, or all text (default: assistant).",
            Panel.DATA,
            one_of(TRAIN_ON),
        ),
    ] = None


@dataclass(frozen=True)
class UnknownCharacterOptions:
    """The option for characters that the tokenizer cannot encode."""

    unknown: Annotated[
        str,
        option("Characters outside the vocabulary: an error, or skipped (default: error).", Panel.DATA, "error|skip"),
    ] = "error"

    def __post_init__(self) -> None:
        check_choice("unknown", self.unknown, ("error", "skip"))


def text_source(
    ctx: typer.Context,
    names: Sequence[str],
    text: TextOptions,
    unknown: str = "error",
    chat: ChatOptions = ChatOptions(),
) -> "TextSource":
    """The source of the texts at these paths, read with these options.

    Options from environment variables and the --config file are ignored where they do not apply to a text. Raises
    UsageError for an unknown value of `unknown` or `chat.train_on`.
    """
    from tinylm.text.corpus_loading import TextSource

    ignorable = options_from_env_or_file(ctx, text, chat)
    return TextSource(paths=tuple(names), unknown=unknown, ignorable=ignorable, **vars(text), **vars(chat))
