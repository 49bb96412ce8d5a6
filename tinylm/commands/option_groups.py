"""Options of the command line, alone and in groups: dataclasses whose fields are options.

A command takes a whole group as one parameter. A field is an option if it is annotated as a `Setting`, or with
`option`.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from tinylm.commands.console import Console, find_option, long_flag
from tinylm.commands.next_steps import next_step
from tinylm.commands.option_sources import show_options, warn_about_unknown_variables
from tinylm.commands.suggestions import reject_addresses
from tinylm.config.validation import Setting, annotations_of, check_values, declared_in, limits_in
from tinylm.errors import TinyLMError, UsageError
from tinylm.run_directory.layout import MODEL_FILE, run_names

Command = Callable[..., None]
COMMAND_LINE = "tinylm.command_line"  # key in `ctx.meta` of the words of the command line
CTX = "ctx"  # name of a command's parameter for the Typer context
COMPLETED_RUNS = {"MODEL": MODEL_FILE, "RUN": "config.json"}  # by metavar: a file of the runs that completion offers


def option(help: str, panel: str | None = None, metavar: str | None = None, *names: str, **extra: Any) -> Any:
    """A `typer.Option` with a help panel.

    Shell completion offers the words of a metavar such as auto|char|PATH that are not upper case, if there are several,
    and runs for a metavar in COMPLETED_RUNS.
    """
    values = [word for word in (metavar or "").split("|") if word and not word.isupper()]
    if len(values) > 1:
        extra.setdefault("autocompletion", lambda incomplete: [word for word in values if word.startswith(incomplete)])
    elif metavar in COMPLETED_RUNS:
        extra.setdefault("autocompletion", complete_runs(COMPLETED_RUNS[metavar]))
    return typer.Option(
        *names, help=help, rich_help_panel=panel, metavar=metavar, show_default=False, show_envvar=False, **extra
    )


def complete_runs(file: str) -> Callable[[str], list[str]]:
    """A shell completion: names of the runs under checkpoints/ that have the file."""
    return lambda incomplete: [name for name in run_names(file) if name.startswith(incomplete)]


def _as_option(name: str, annotation: Any, default: Any) -> Any:
    """The annotation of a parameter of a command: of a Setting, that of its option, with the default in the help."""
    setting = declared_in(annotation, Setting)
    if setting is None:
        return annotation
    type_ = annotation.__origin__
    kinds = [kind for kind in typing.get_args(type_) if kind is not types.NoneType]
    kinds = kinds if isinstance(type_, types.UnionType) else [type_]
    extra: dict[str, Any] = {}
    if (parse := setting.parse) is not None:

        def parser(text: Any) -> Any:  # a number if it comes from TOML
            try:
                return parse(str(text))
            except UsageError as error:
                raise typer.BadParameter(str(error)) from None

        extra["parser"] = parser
        kind: Any = str
    elif any(typing.get_origin(kind) in (Sequence, list) for kind in kinds):
        kind = list[str]
    else:
        kind = Path if Path in kinds else kinds[0]
    flags = setting.flags
    if not flags and (kind == list[str] or (kind is bool and default is False)):
        flags = (f"--{name.replace('_', '-')}",)  # without --no-name
    metavar = setting.metavar
    if metavar is None:
        metavar = "|".join(setting.values) if isinstance(setting.values, tuple) else {int: "N", float: "X"}.get(kind)
    chosen = kind | None if default is None else kind
    help = setting.help
    # The default stands at the end of the help, unless the help describes it, or there is none to show
    if default not in (None, inspect.Parameter.empty) and default is not False and "default:" not in help:
        shown = "yes" if default is True else f"{default:g}" if isinstance(default, float) else default
        help = f"{help.removesuffix('.')} (default: {shown})."
    return Annotated[chosen, option(help, setting.panel, metavar, *flags, **extra), setting]


def with_option_groups(command: Command) -> Command:
    """Decorator of every command: replaces each parameter that is an option group by one option per field.

    Before the command runs, numbers and words are checked against their limits, and the values are collected into the
    groups. A group's field `ctx` gets the Typer context. The message of a TinyLMError names flags and, if
    there is one, a next command (see `show_options`).
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    options: list[tuple[str, Any, Any]] = []  # name, annotation, default
    for name, parameter in inspect.signature(command).parameters.items():
        options += _options_of(groups[name]) if name in groups else [(name, hints[name], parameter.default)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=default, annotation=_as_option(name, annotation, default))
        for name, annotation, default in options
    ]
    limits = {name: limits for name, annotation, _ in options if (limits := limits_in(annotation)) is not None}
    takes_context = CTX in hints
    if not takes_context:
        parameters.insert(0, inspect.Parameter(CTX, keyword, annotation=typer.Context))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        ctx = values[CTX] if takes_context else values.pop(CTX)
        warn_about_unknown_variables(Console(), ctx)
        try:
            reject_addresses(ctx, values)
            check_values({name: values[name] for name in limits}, limits)  # first: later steps use these values
            built = {}
            for name, group in groups.items():
                found = {option: values.pop(option) for option, *_ in _options_of(group) if option in values}
                takes_ctx = any(field.name == CTX for field in dataclasses.fields(group))
                built[name] = group(**found | ({CTX: ctx} if takes_ctx else {}))
            command(**values, **built)
        except TinyLMError as error:
            show_options(ctx, error, next_step(error, ctx.meta.get(COMMAND_LINE, ())))
            raise

    # Typer reads the signature with `inspect`, which prefers `__signature__`. Type checkers do not know the attribute.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: Any) -> list[tuple[str, Any, Any]]:
    """The name, the annotation and the default of each field of a group that is an option."""
    fields = [(field.name, annotations_of(group)[field.name], field.default) for field in dataclasses.fields(group)]
    return [one for one in fields if declared_in(one[1], Setting) or declared_in(one[1], OptionInfo)]


def non_default_options(*groups: Any) -> dict[str, Any]:
    """The values of the options that differ from their defaults, by name."""
    fields = [(field, getattr(group, field.name)) for group in groups for field in dataclasses.fields(group)]
    return {field.name: value for field, value in fields if value != field.default}


def command_line_flags(ctx: typer.Context, *groups: Any) -> dict[str, str]:
    """The flags, by option name, of the options of the groups that are on the command line and not at their default."""
    return {
        name: long_flag(find_option(ctx, name), value)
        for name, value in non_default_options(*groups).items()
        if is_on_command_line(ctx, name)
    }


def options_from_env_or_file(ctx: typer.Context, *groups: Any) -> frozenset[str]:
    """The names of the options of the groups that an environment variable or the --config file changes."""
    return frozenset(name for name in non_default_options(*groups) if not is_on_command_line(ctx, name))


def is_on_command_line(ctx: typer.Context, name: str) -> bool:
    """Whether the option `name` is on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
