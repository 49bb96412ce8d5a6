"""The table of options in docs/options.md.

    python docs/options.py

writes the page. tests/test_docs.py compares it with the commands.
"""

import re
from pathlib import Path
from typing import Any

import typer.main

from tinylm.cli import app

PAGE = Path(__file__).with_name("options.md")
TITLE = """# Options

An option can also be given as the environment variable `TINYLM_COMMAND_OPTION`, such as `TINYLM_TRAIN_LR`, and in
the TOML file of `--config`, as `lr = 0.003`. The Python API has the same names with underscores.
`python docs/options.py` makes this page.
"""


def table() -> str:
    """The page: all options of all commands, by panel, those with the same help in one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    commands: Any = typer.main.get_command(app)
    for command, found in commands.commands.items():
        for parameter in found.params:
            if parameter.param_type_name == "option":
                panel = parameter.rich_help_panel or "Model and text"
                rows.setdefault((panel, _flags(parameter), parameter.help), []).append(command)
    lines = [TITLE]
    for panel in dict.fromkeys(panel for panel, _, _ in rows):
        lines += [f"## {panel}", "", "| option | commands | |", "| --- | --- | --- |"]
        for (title, flags, help_), names in rows.items():
            if title == panel:
                shown = "all" if len(names) == len(commands.commands) else ", ".join(names)
                lines.append(f"| {flags} | {shown} | {_escaped(help_)} |")
        lines.append("")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"[\\|<]", r"\\\g<0>", text)


def _flags(parameter: Any) -> str:
    """The flags of an option as code, with its value."""
    flags = sorted(
        [*parameter.opts, *parameter.secondary_opts], key=lambda flag: (len(flag) > 2, flag.startswith("--no-"))
    )
    if not parameter.is_flag and parameter.metavar:
        flags[-1] += f" {parameter.metavar}"
    return ", ".join(f"`{flag}`" for flag in flags).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(table(), encoding="utf-8")
