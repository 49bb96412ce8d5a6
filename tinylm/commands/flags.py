"""Settings as flags: library messages quote a setting as `kv_heads`, and the command line shows it as --kv-heads."""

import re
from typing import Any

import typer

_SETTING = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")  # `kv_heads`, or with a value: `position="learned"`


def long_flag(parameter: Any, value: Any = None) -> str:
    """The long flag of an option, such as --kv-heads. If `value` is False, the flag that turns the option off, such as
    --no-bias, if it has one.
    """
    spellings = parameter.secondary_opts if value is False and parameter.secondary_opts else parameter.opts
    return str(max(spellings, key=len))


def find_option(ctx: typer.Context, name: str) -> Any | None:
    """The option of the running command with this Python name, or `None`."""
    options = (parameter for parameter in ctx.command.params if parameter.param_type_name == "option")
    return next((option for option in options if option.name == name), None)


def settings_to_flags(ctx: typer.Context, message: str) -> str:
    """Replace each setting in backticks by its flag, if the running command has that option.

    `bias=False` becomes --no-bias, and `position="learned"` becomes --position learned. Other words in backticks stay.
    """

    def replacement(quoted: re.Match[str]) -> str:
        name, value = quoted.groups()
        option = find_option(ctx, name)
        if option is None:
            return quoted[0]
        if value is None or option.is_flag:
            return long_flag(option, {"False": False}.get(value))
        return long_flag(option) + " " + value.strip('"')

    return _SETTING.sub(replacement, message)
