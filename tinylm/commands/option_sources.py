"""Option values that are not on the command line: from a --config file and from TINYLM_<COMMAND>_<OPTION> variables.

The command line overrides environment variables, and these override the file.
"""

import difflib
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import typer

from tinylm.commands.console import Console, find_option, long_flag
from tinylm.config.similar_names import suggest_options
from tinylm.config.validation import describe_value
from tinylm.errors import SETTING, TinyLMError, UsageError

MAX_CONFIG_BYTES = 1 << 16
VARIABLES_WITHOUT_OPTION = (
    "TINYLM_CACHE",  # see `tinylm.system.files.cache_root`
    "TINYLM_VERSION",  # tinylm does not read it, but container images often set a variable PROGRAM_VERSION
)


def read_config_file(ctx: typer.Context, file: Path | None) -> Path | None:
    """Callback of --config: make the values of a TOML file the defaults of this command's options and arguments.

    Raises UsageError for a file that cannot be read, is larger than MAX_CONFIG_BYTES, is not TOML, or has unknown or
    repeated keys, and BadParameter for a value of the wrong type.
    """
    if file is None or ctx.resilient_parsing:  # shell completion
        return file
    try:
        ctx.default_map = {**(ctx.default_map or {}), **_read_defaults(ctx, file)}
    except UsageError as error:
        show_options(ctx, error)
        raise
    return file


def _read_defaults(ctx: typer.Context, file: Path) -> dict[str, Any]:
    """The values of a TOML file, by the names of the running command's options and arguments."""
    values = _parse_toml(file)
    parameters: dict[Any, Any] = {
        parameter.name: parameter for parameter in ctx.command.params if parameter.expose_value
    }
    unknown = [key for key in values if key.replace("-", "_") not in parameters]
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        known = [name.replace("_", "-") for name in parameters]
        is_option = len(unknown) == 1 and not isinstance(values[unknown[0]], dict)
        meant = suggest_options(unknown[0], known) if is_option else []
        advice = f"use {' or '.join(meant)}." if meant else f"see {ctx.command_path} --help."
        raise UsageError(
            f"`config` {file} sets {', '.join(key[:60] for key in unknown[:3])}{more}, which {ctx.command_path} "
            f"does not have; {advice}"
        )
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in defaults:
            raise UsageError(f"`config` {file} sets {key} twice, once with hyphens and once with underscores.")
        if name == "config":
            raise UsageError(f"`config` {file} sets config; a config file cannot name another one.")
        parameter = parameters[name]
        takes_list = getattr(parameter, "multiple", False) or parameter.nargs == -1
        entries = value if takes_list and isinstance(value, list) else [value]
        for entry in entries:
            if problem := _toml_problem(parameter, entry):
                raise typer.BadParameter(f"{problem} (in the file {file})", ctx=ctx, param=parameter)
        defaults[name] = entries if takes_list else value
    return defaults


def _parse_toml(file: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a FIFO or a device may never end
            raise UsageError(f"Cannot read `config` {file}: it is not a regular file.")
        with file.open("rb") as opened:
            data = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise UsageError(f"Cannot read `config` {file}: {error.strerror}.") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise UsageError(f"`config` {file} is larger than {MAX_CONFIG_BYTES >> 10} kB; name a file of options.")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise UsageError(f"`config` {file} is not valid TOML: it is nested too deeply.") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, and integers with more digits than Python parses
        raise UsageError(f"`config` {file} is not valid TOML: {str(error)[:200].rstrip('.')}.") from error


def _toml_problem(parameter: Any, value: Any) -> str | None:
    """Why a TOML value cannot be given to an option, for its type or a NUL character; `None` if it can.

    Typer parses the value later.
    """
    if getattr(parameter, "is_flag", False):
        return None if isinstance(value, bool) else f"{describe_value(value)} is neither true nor false"
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        described = "true or false" if isinstance(value, bool) else describe_value(value)
        return f"{described} is not a value of this option"
    if isinstance(value, str) and "\0" in value:
        return "the value contains a NUL character"
    return None


def warn_about_unknown_variables(console: Console, ctx: typer.Context) -> None:
    """Warn about each environment variable TINYLM_... that no command reads and that may therefore be misspelled."""
    variables = {name for name in os.environ if name.upper().startswith("TINYLM_")} - set(VARIABLES_WITHOUT_OPTION)
    known = _known_variables(ctx) if variables else set()  # this imports all commands
    for name in sorted(variables - known):
        near = difflib.get_close_matches(name.upper(), sorted(known), 1)
        suggestion = f"; did you mean {near[0]}?" if near else "."
        console.warn(f"tinylm does not read the environment variable {name[:60]}{suggestion}")


def _known_variables(ctx: typer.Context) -> set[str]:
    """TINYLM_<COMMAND>_<OPTION> for each option of each command, and VARIABLES_WITHOUT_OPTION."""
    root: Any = ctx.find_root().command
    of_options = {
        _variable_of(name, parameter)
        for name, command in root.commands.items()
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.expose_value  # arguments and -h have no variable
    }
    return {*VARIABLES_WITHOUT_OPTION, *of_options}


def _variable_of(command: str, parameter: Any) -> str:
    return f"TINYLM_{command.replace('-', '_')}_{parameter.name}".upper()


def settings_to_flags(ctx: typer.Context, message: str) -> str:
    """Replace each setting in backticks by its flag, if the running command has that option or argument.

    `bias=False` becomes --no-bias, and `position="learned"` becomes --position learned. Other words in backticks stay.
    """

    def replacement(quoted: re.Match[str]) -> str:
        name, value = quoted.groups()
        option = find_option(ctx, name)
        if option is None:
            return quoted[0]
        if value is None or getattr(option, "is_flag", False):
            return long_flag(option, {"False": False}.get(value))
        return long_flag(option) + " " + value.strip('"')

    return SETTING.sub(replacement, message)


def show_options(ctx: typer.Context, error: TinyLMError, next_step: str = "") -> None:
    """Show settings as flags in the message of an error, and append the next step to it.

    For a UsageError, append also the environment variables or the --config file that its settings come from, and the
    arguments of the command.
    """
    sentences = [settings_to_flags(ctx, str(error)), next_step]
    if isinstance(error, UsageError):
        named = [
            parameter
            for parameter in ctx.command.params
            if parameter.name in error.settings or parameter.param_type_name == "argument"
        ]
        sources = {long_flag(parameter): describe_source(ctx, parameter) for parameter in named}
        origins = "; ".join(f"{flag} comes from {source}" for flag, source in sources.items() if source)
        sentences.append(f"{origins}." if origins else "")
    error.args = (" ".join(filter(None, sentences)),)


def describe_source(ctx: typer.Context, parameter: Any) -> str | None:
    """The source of an option's value as a phrase: an environment variable or the --config file; otherwise `None`."""
    source = ctx.get_parameter_source(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        return f"the environment variable {_variable_of(str(ctx.info_name), parameter)}"
    if source is not None and source.name == "DEFAULT_MAP":
        return f"the file {ctx.params.get('config')}"
    return None
