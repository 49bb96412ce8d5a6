"""Where the values of options come from when nobody typed them: a --config file, and TINYLM_ variables.

On the command line a value wins over the environment, and the environment over the file.
"""

import difflib
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import typer

from tinylm.checks import flag, shown
from tinylm.console import Console
from tinylm.errors import UsageError

MOST_CONFIG_BYTES = 1 << 16
OTHER_VARIABLES = (
    "TINYLM_CACHE",
    "TINYLM_VERSION",  # images of containers set such a variable for each program in them
)


def read_config_file(context: typer.Context, file: Path | None) -> Path | None:
    """Make a TOML file's values the defaults of this command's options, below the environment and the command line.

    Raises UsageError for a file that is not TOML or has unknown keys, and BadParameter for a value of the wrong kind.
    """
    if file is None or context.resilient_parsing:
        return file
    values = _parse_toml(file)
    parameters: dict[Any, Any] = {parameter.name: parameter for parameter in context.command.params}
    unknown = [key for key in values if key.replace("-", "_") not in parameters]
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UsageError(
            f"--config {file} sets {', '.join(key[:60] for key in unknown[:3])}{more}, which {context.command_path} "
            f"does not have; see {context.command_path} --help."
        )
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in defaults:
            raise UsageError(f"--config {file} sets {key} twice, once with hyphens and once with underscores.")
        if name == "config":
            raise UsageError(f"--config {file} sets config; a file cannot name another one.")
        parameter = parameters[name]
        several = getattr(parameter, "multiple", False) or parameter.nargs == -1
        entries = value if several and isinstance(value, list) else [value]
        for entry in entries:
            if problem := _problem(parameter, entry):
                raise typer.BadParameter(f"{problem} (in the file {file})", ctx=context, param=parameter)
        defaults[name] = entries if several else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return file


def _parse_toml(file: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a FIFO or a device may never end
            raise UsageError(f"Cannot read --config {file}: it is not a regular file.")
        with file.open("rb") as opened:
            data = opened.read(MOST_CONFIG_BYTES + 1)
    except OSError as error:
        raise UsageError(f"Cannot read --config {file}: {error.strerror}.") from error
    if len(data) > MOST_CONFIG_BYTES:
        raise UsageError(f"--config {file} is larger than {MOST_CONFIG_BYTES >> 10} kB; name a file of options.")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except RecursionError:
        raise UsageError(f"--config {file} is not valid TOML: it is nested too deeply.") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError, and numbers of thousands of digits
        raise UsageError(f"--config {file} is not valid TOML: {str(error)[:200].rstrip('.')}.") from error


def _problem(parameter: Any, value: Any) -> str | None:
    """Why a value cannot be one of this option, as far as its kind tells; the rest is checked as if it was typed."""
    if getattr(parameter, "is_flag", False):
        return None if isinstance(value, bool) else f"{shown(value)} is neither true nor false"
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        kind = "true or false" if isinstance(value, bool) else shown(value)
        return f"{kind} is no value for this option"
    if isinstance(value, str) and "\0" in value:
        return "there is a NUL character in it"
    return None


def warn_of_unknown_variables(console: Console, invocation: typer.Context) -> None:
    """Warn of each variable TINYLM_... in the environment that no command reads: it may be a mistyped one."""
    unknown = [name for name in os.environ if name.upper().startswith("TINYLM_")]
    known = known_variables(invocation) if unknown else set()
    for name in sorted(set(unknown) - known):
        near = difflib.get_close_matches(name.upper(), sorted(known), 1)
        console.warn(
            f"The environment variable {name[:60]} is not one that tinylm reads"
            + (f"; did you mean {near[0]}?" if near else ".")
        )


def known_variables(invocation: typer.Context) -> set[str]:
    """The variables that are read: TINYLM_<COMMAND>_<OPTION> for each option of each command, and a few others."""
    root: Any = invocation.find_root().command
    own = {
        _variable(name, parameter)
        for name, command in root.commands.items()
        for parameter in command.params
        if parameter.param_type_name == "option"  # arguments are read from the command line alone
    }
    return {*OTHER_VARIABLES, *own}


def _variable(command: str, parameter: Any) -> str:
    return f"TINYLM_{command.replace('-', '_')}_{parameter.name}".upper()


def name_sources(invocation: typer.Context, error: UsageError) -> None:
    """Say in the error of each option that it names and that nobody typed where its value came from."""
    named = set(re.findall(r"--[a-z0-9-]+", str(error)))
    said = [
        origin
        for parameter in invocation.command.params
        if parameter.name and named & _spellings(parameter) and (origin := _origin(invocation, parameter))
    ]
    if said:
        error.args = (f"{error} {'; '.join(said)}.",)


def _spellings(parameter: Any) -> set[str]:
    return {*parameter.opts, *parameter.secondary_opts, flag(parameter.name)}


def _origin(invocation: typer.Context, parameter: Any) -> str | None:
    source = invocation.get_parameter_source(parameter.name)
    name = flag(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        return f"{name} comes from the environment variable {_variable(str(invocation.info_name), parameter)}"
    if source is not None and source.name == "DEFAULT_MAP":
        return f"{name} comes from the file {invocation.params.get('config')}"
    return None
