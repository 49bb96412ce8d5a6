"""Library code names settings, prints nothing, and has docstrings with the shapes of tensors."""

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import typer.main

import tinylm
from tinylm.cli import app
from tinylm.config.model import ModelConfig, RopeScaling
from tinylm.config.run import SpecialTokens

HOME = Path(tinylm.__file__).parent
COMMAND_LAYER = ("__main__.py", "cli.py", "commands")
LIBRARY = [path for path in sorted(HOME.rglob("*.py")) if path.relative_to(HOME).parts[0] not in COMMAND_LAYER]
COMMANDS = typer.main.get_command(app).commands
OPTIONS = {option.name for command in COMMANDS.values() for option in command.params}
# Set by imported models, whose files the user can look into.
IMPORTED = {"chat_template"} | {
    field.name for kind in (ModelConfig, RopeScaling, SpecialTokens) for field in dataclasses.fields(kind)
}
IN_SCHEMAS = {"multipleOf"}  # of JSON, which the user writes


def strings(path: Path) -> Iterator[str]:
    """The string constants of a module, parts of f-strings included, without docstrings and settings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = (node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and node.body)
    docstrings = {id(statement.value) for statement in first if isinstance(statement, ast.Expr)}
    declared = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Setting"]
    docstrings |= {id(part) for node in declared for part in ast.walk(node)}  # the help and the flags of an option
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_a_message_of_the_library_names_no_flag_and_no_command() -> None:
    pattern = re.compile(rf"--[a-z]|\btinylm ({'|'.join(COMMANDS)})\b")
    assert [(path.name, text) for path in LIBRARY for text in strings(path) if pattern.search(text)] == []


def test_a_name_in_backticks_in_a_message_is_an_option_or_set_by_an_import() -> None:
    texts = [(path.name, text) for path in LIBRARY for text in strings(path)]
    named = {(path, name) for path, text in texts for name in re.findall(r"`([a-z][a-z0-9_]*)(?:=[^`]*)?`", text)}
    assert {(path, name) for path, name in named if name not in OPTIONS | IMPORTED | IN_SCHEMAS} == set()


def test_library_code_prints_nothing_but_the_progress_of_python_programs() -> None:
    forbidden = {"print", "sys.stdout", "sys.stderr", "sys.argv"}
    found = {
        (path.name, ast.unparse(node))
        for path in LIBRARY
        if path.name != "progress_bar.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in forbidden
    }
    assert found == set()


WITH_SHAPES = ("transformer", "generation", "adapters", "objectives", "jobs")
# "(B, T, D)", "(..., W)", "(N)": the first size is a capital letter or "...", so that other remarks do not count.
SHAPE = re.compile(r"\((?:[A-Z]['\d]?|\.\.\.)(?:, ['\w.+*/ -]+)*\)")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_definitions(body: list[ast.stmt], owners: tuple[str, ...] = ()) -> Iterator[tuple[str, Definition]]:
    """The public classes, functions and methods with their dotted names; none that is defined inside of a function."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from public_definitions(node.body + node.orelse, owners)
        elif isinstance(node, Definition) and not node.name.startswith("_"):
            yield ".".join((*owners, node.name)), node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, (*owners, node.name))


DEFINITIONS = [
    (path, name, node)
    for path in sorted(HOME.rglob("*.py"))
    for name, node in public_definitions(ast.parse(path.read_text(encoding="utf-8")).body)
]
PROTOCOLS = {  # their members need no docstring of their own
    node.name
    for path in sorted(HOME.rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
}


def overrides_a_documented_method(path: Path, name: str) -> bool:
    """Whether the method has a docstring in a base class of tinylm."""
    owner, _, method = name.rpartition(".")
    if not owner:
        return False
    found = importlib.import_module(".".join(path.relative_to(HOME.parent).with_suffix("").parts))
    for part in owner.split("."):
        found = getattr(found, part)
    bases = [base for base in found.__mro__[1:] if base.__module__.startswith("tinylm.")]
    return any(method in vars(base) and vars(base)[method].__doc__ for base in bases)


def maps_tensors(node: Definition) -> bool:
    """Whether a function has a parameter and a result with tensors."""
    if isinstance(node, ast.ClassDef) or node.returns is None:
        return False
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    parameters = [argument.annotation for argument in arguments if argument.annotation is not None]
    return any("Tensor" in ast.unparse(one) for one in parameters) and "Tensor" in ast.unparse(node.returns)


def test_public_definitions_have_docstrings_or_inherit_them_and_tensors_have_shapes() -> None:
    wrong = []
    assert all((HOME / package).is_dir() for package in WITH_SHAPES)
    for path, name, node in DEFINITIONS:
        if name.rpartition(".")[0] in PROTOCOLS:
            continue
        place, text = path.relative_to(HOME), ast.get_docstring(node) or ""
        needs_shape = place.parts[0] in WITH_SHAPES and maps_tensors(node)
        if not (SHAPE.search(text) if needs_shape else text) and not overrides_a_documented_method(path, name):
            wrong.append(f"{place}:{node.lineno} {name} has no docstring{' with shapes' if needs_shape else ''}")
    assert not wrong, "\n".join(wrong)
