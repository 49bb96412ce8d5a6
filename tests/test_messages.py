"""Library code names settings, not flags or commands, and prints nothing."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

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


def strings(path: Path) -> Iterator[str]:
    """The string constants of a module, parts of f-strings included, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = (node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and node.body)
    docstrings = {id(statement.value) for statement in first if isinstance(statement, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_a_message_of_the_library_names_no_flag_and_no_command() -> None:
    pattern = re.compile(rf"--[a-z]|\btinylm ({'|'.join(COMMANDS)})\b")
    assert [(path.name, text) for path in LIBRARY for text in strings(path) if pattern.search(text)] == []


def test_a_name_in_backticks_in_a_message_is_an_option_or_set_by_an_import() -> None:
    texts = [(path.name, text) for path in LIBRARY for text in strings(path)]
    named = {(path, name) for path, text in texts for name in re.findall(r"`([a-z][a-z0-9_]*)(?:=[^`]*)?`", text)}
    assert {(path, name) for path, name in named if name not in OPTIONS | IMPORTED} == set()


def test_library_code_prints_nothing() -> None:
    forbidden = {"print", "sys.stdout", "sys.stderr", "sys.argv"}
    found = {
        (path.name, ast.unparse(node))
        for path in LIBRARY
        if path.name != "streams.py"  # replaces the standard streams
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in forbidden
    }
    assert found == set()
