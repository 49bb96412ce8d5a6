"""Every public class, function and method has a docstring, and those that map tensors to tensors name their shapes.

A method that overrides a documented one of a class of tinylm needs no docstring: it inherits that one.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import tinylm

HOME = Path(tinylm.__file__).parent
WITH_SHAPES = ("model", "generation", "adapters", "objectives")
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
    for path, name, node in DEFINITIONS:
        place, text = path.relative_to(HOME), ast.get_docstring(node) or ""
        needs_shape = place.parts[0] in WITH_SHAPES and maps_tensors(node)
        if not (SHAPE.search(text) if needs_shape else text) and not overrides_a_documented_method(path, name):
            wrong.append(f"{place}:{node.lineno} {name} has no docstring{' with shapes' if needs_shape else ''}")
    assert not wrong, "\n".join(wrong)
