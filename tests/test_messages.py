"""Library code names settings, not flags or commands, and prints nothing."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import tinylm
from tinylm.cli import app
from tinylm.model_config import ModelConfig, RopeScaling
from tinylm.run_config import SpecialTokens

HOME = Path(tinylm.__file__).parent
COMMAND_LAYER = ("__main__.py", "cli.py", "commands", "console.py")
LIBRARY = [path for path in sorted(HOME.rglob("*.py")) if path.relative_to(HOME).parts[0] not in COMMAND_LAYER]
COMMANDS = typer.main.get_command(app).commands
OPTIONS = {option.name for command in COMMANDS.values() for option in command.params}
# Set by imported models, whose files the user can look into.
IMPORTED = {"chat_template"} | {
    field.name for kind in (ModelConfig, RopeScaling, SpecialTokens) for field in dataclasses.fields(kind)
}
by_name = pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(HOME)))


def strings(path: Path) -> Iterator[str]:
    """The string constants of a module, parts of f-strings included, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = (node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and node.body)
    docstrings = {id(statement.value) for statement in first if isinstance(statement, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@by_name
def test_a_message_of_the_library_names_no_flag_and_no_command(path: Path) -> None:
    pattern = re.compile(rf"--[a-z]|\btinylm ({'|'.join(COMMANDS)})\b")
    assert [text for text in strings(path) if pattern.search(text)] == []


@by_name
def test_a_name_in_backticks_in_a_message_is_an_option_or_set_by_an_import(path: Path) -> None:
    named = {name for text in strings(path) for name in re.findall(r"`([a-z][a-z0-9_]*)(?:=[^`]*)?`", text)}
    assert named - OPTIONS - IMPORTED == set()


@by_name
def test_library_code_prints_nothing(path: Path) -> None:
    if path.name == "streams.py":  # replaces the standard streams
        return
    names = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name)
    ]
    assert {"print", "sys.stdout", "sys.stderr", "sys.argv"} & {*names} == set()
