"""Option groups: dataclasses whose fields are command-line options. A command takes a whole group as one parameter.

A group may contain other groups.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import typer

from tinylm.commands.console import Console
from tinylm.commands.flags import find_option, long_flag, settings_to_flags
from tinylm.commands.next_steps import next_step
from tinylm.commands.option_sources import append_sources, warn_about_unknown_variables
from tinylm.commands.suggestions import reject_addresses
from tinylm.config.validation import check_numbers
from tinylm.errors import TinyLMError, UsageError

Command = Callable[..., None]
COMMAND_LINE = "tinylm.command_line"  # key in `ctx.meta` of the words of the command line
CTX = "ctx"  # name of a command's parameter for the Typer context


def with_option_groups(command: Command) -> Command:
    """Decorator of every command: replaces each parameter that is an option group by one option per field.

    Before the command runs, numbers are checked against their ranges, and the values are collected into the groups. A
    group's field of type typer.Context gets the context. In the message of a TinyLMError, settings are replaced by
    flags, and a next command is appended if there is one; for a UsageError, also the environment variable or file that
    the options in the message come from.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _parameters_of(groups[name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    takes_context = CTX in hints
    if not takes_context:
        parameters.insert(0, inspect.Parameter(CTX, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        ctx = values[CTX] if takes_context else values.pop(CTX)
        warn_about_unknown_variables(Console(), ctx)
        try:
            reject_addresses(ctx, values)
            check_numbers(values)  # first: later steps compute with these numbers
            for name, group in groups.items():
                values[name] = _build_group(group, values, ctx)
            command(**values)
        except TinyLMError as error:
            step = next_step(error, ctx.meta.get(COMMAND_LINE, ()))
            error.args = (f"{settings_to_flags(ctx, str(error))} {step}".rstrip(),)
            if isinstance(error, UsageError):
                append_sources(ctx, error)
            raise

    # Typer reads the signature with `inspect`, which prefers `__signature__`. Type checkers do not know the attribute.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    """One keyword parameter per option of the group, including nested groups."""
    hints = typing.get_type_hints(group, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for field in dataclasses.fields(group):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            parameters += _parameters_of(hint)
        elif hint is not typer.Context:
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, keyword, default=field.default, annotation=hint))
    return parameters


def _build_group(group: Any, values: dict[str, Any], ctx: typer.Context) -> Any:
    """An instance of the group. Its options are removed from `values`."""
    hints = typing.get_type_hints(group)
    fields: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(group)):
        if dataclasses.is_dataclass(hints[name]):
            fields[name] = _build_group(hints[name], values, ctx)
        else:
            fields[name] = ctx if hints[name] is typer.Context else values.pop(name)
    return group(**fields)


def non_default_options(*groups: Any) -> dict[str, Any]:
    """The values of the options that differ from their defaults, by name, including those of nested groups."""
    found: dict[str, Any] = {}
    for group in groups:
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if dataclasses.is_dataclass(value):
                found |= non_default_options(value)
            elif value != field.default:
                found[field.name] = value
    return found


def reject_fixed_options(ctx: typer.Context, fixing: str, *groups: Any) -> None:
    """Raise UsageError if an option of the groups, which have no nested groups, is on the command line.

    fixing: the flag that determines the values of these options.

    Values from environment variables and the --config file are not errors, since they apply to every run.
    """
    flags = [
        _flag_of(ctx, field.name, getattr(group, field.name))
        for group in groups
        for field in dataclasses.fields(group)
        if _is_on_command_line(ctx, field.name)
    ]
    if flags:
        those = "it" if len(flags) == 1 else "them"
        raise UsageError(f"{fixing} fixes {', '.join(flags)}; leave {those} out, or leave out {fixing}.")


def command_line_flags(ctx: typer.Context, *groups: Any) -> dict[str, str]:
    """The flags, by option name, of the options of the groups that are on the command line and not at their default."""
    return {
        name: _flag_of(ctx, name, value)
        for name, value in non_default_options(*groups).items()
        if _is_on_command_line(ctx, name)
    }


def options_from_env_or_file(ctx: typer.Context, *groups: Any) -> frozenset[str]:
    """The names of the options of the groups that an environment variable or the --config file changes."""
    return frozenset(name for name in non_default_options(*groups) if not _is_on_command_line(ctx, name))


def _flag_of(ctx: typer.Context, name: str, value: Any) -> str:
    return long_flag(find_option(ctx, name), value)


def _is_on_command_line(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
