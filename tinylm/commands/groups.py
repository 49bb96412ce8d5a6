"""A command takes whole groups of options: each is a dataclass, and each of its fields an option."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import typer

from tinylm.checks import check_numbers, flag
from tinylm.commands.sources import name_sources, warn_of_unknown_variables
from tinylm.console import Console
from tinylm.errors import UsageError

Command = Callable[..., None]
CONTEXT = "invocation"  # the parameter of a command that takes typer's context


def with_groups(command: Command) -> Command:
    """Give a command an option for each field of the option groups among its parameters, and of the groups in those.

    Numbers are in their ranges when the command gets them. An error names the variable or file that a value is from.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _options_of(groups[name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    takes_context = CONTEXT in hints
    if not takes_context:
        parameters.insert(0, inspect.Parameter(CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        invocation = values[CONTEXT] if takes_context else values.pop(CONTEXT)
        warn_of_unknown_variables(Console(), invocation)
        try:
            check_numbers(values)  # before anything is computed from them
            for name, kind in groups.items():
                values[name] = _take(kind, values)
            command(**values)
        except UsageError as error:
            name_sources(invocation, error)
            raise

    # typer asks inspect for the options, which reads this before the code; the type of a function does not list it.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for field in dataclasses.fields(group):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            parameters += _options_of(hint)
        else:
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, keyword, default=field.default, annotation=hint))
    return parameters


def _take(group: Any, values: dict[str, Any]) -> Any:
    """A group made of its own options, which are taken out of the values."""
    hints = typing.get_type_hints(group)
    return group(
        **{
            name: _take(hints[name], values) if dataclasses.is_dataclass(hints[name]) else values.pop(name)
            for name in (field.name for field in dataclasses.fields(group))
        }
    )


def given(group: Any) -> dict[str, Any]:
    """The options of a group that are not at their defaults."""
    return {
        field.name: getattr(group, field.name)
        for field in dataclasses.fields(group)
        if getattr(group, field.name) != field.default
    }


def refuse_with(invocation: typer.Context, reason: str, *groups: Any) -> None:
    """Raises UsageError when an option of the groups was typed beside an option that fixes them.

    What the environment or a file says of every run is not said of this one.
    """
    names = [
        _spelling(field.name, getattr(group, field.name))
        for group in groups
        for field in dataclasses.fields(group)
        if _typed(invocation, field.name)
    ]
    if names:
        raise UsageError(f"{reason} fixes {', '.join(names)}; leave that out, or leave out {reason}.")


def typed(invocation: typer.Context, *groups: Any) -> dict[str, str]:
    """The groups' options that were typed with a value of their own: their flags by their names."""
    chosen = {name: value for group in groups for name, value in given(group).items()}
    return {name: _spelling(name, value) for name, value in chosen.items() if _typed(invocation, name)}


def _spelling(name: str, value: Any) -> str:
    return flag(f"no_{name}" if value is False else name)


def _typed(invocation: typer.Context, name: str) -> bool:
    source = invocation.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
