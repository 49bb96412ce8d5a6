"""The size of tinylm's code, and of its functions, at one or several commits (decision 035).

    python docs/structure.py [COMMIT ...]

prints a Markdown table with a column per commit, and how many of the first commit's names are no longer in use at the
last one; without arguments, a table of the working tree.

    python docs/structure.py --imports COMMIT

prints the diagram of the imports at a commit, as docs/imports.py draws it.
"""

import ast
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from imports import ROOT, base_modules, draw, package_imports, reduced

Function = ast.FunctionDef | ast.AsyncFunctionDef


def checkout(commit: str, folder: Path) -> Path:
    """Write the package at a commit to a new folder in `folder`; returns its path."""
    target = folder / commit
    target.mkdir()
    archive = subprocess.run(
        ["git", "archive", commit, "tinylm"], cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=60
    )
    subprocess.run(["tar", "-x", "-C", target], input=archive.stdout, check=True, timeout=60)
    return target / "tinylm"


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, Function]]:
    """All functions with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield owner + node.name, node
            yield from functions(node, f"{owner}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{owner}{node.name}.")
        else:
            yield from functions(node, owner)


def arguments(function: Function) -> int:
    """The number of arguments without `self` and `cls`."""
    positional = [*function.args.posonlyargs, *function.args.args]
    owned = bool(positional) and positional[0].arg in ("self", "cls")
    return len(positional) - owned + len(function.args.kwonlyargs)


def lines(function: Function) -> int:
    """The number of lines, decorators and docstring included."""
    return (
        (function.end_lineno or function.lineno)
        - min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        + 1
    )


def code_lines(source: str, tree: ast.AST) -> int:
    """The number of lines without blank ones, docstrings and imports."""
    left = {number for number, line in enumerate(source.splitlines(), 1) if line.strip()}
    for node in ast.walk(tree):
        documented = node.body[0] if isinstance(node, ast.Module | ast.ClassDef | Function) and node.body else None
        is_text = isinstance(documented, ast.Expr) and isinstance(documented.value, ast.Constant)
        for out in (documented if is_text else None, node if isinstance(node, ast.Import | ast.ImportFrom) else None):
            if out is not None:
                left -= set(range(out.lineno, (out.end_lineno or out.lineno) + 1))
    return len(left)


def measure(package: Path) -> tuple[dict[str, str], set[str]]:
    """The figures of a package by name, and the names of its functions and classes."""
    files = sorted(package.rglob("*.py"))
    sources = [file.read_text(encoding="utf-8") for file in files]
    trees = [ast.parse(source) for source in sources]
    found = [item for tree in trees for item in functions(tree)]
    classes = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = set(classes) | {name.rpartition(".")[2] for name, _ in found}
    longest = max(found, key=lambda item: lines(item[1]))
    widest = max(found, key=lambda item: arguments(item[1]))
    graph = package_imports(package)
    counts = [source.count("\n") for source in sources]
    figures = {
        "files": f"{len(files):,}",
        "lines": f"{sum(counts):,}",
        "median of the lines of a file": f"{statistics.median(counts):.0f}",
        "lines of code": f"{sum(map(code_lines, sources, trees)):,}",
        "modules beside the packages": str(sum(file.parent == package for file in files)),
        "class names that stand twice": str(len(classes) - len(set(classes))),
        "names of functions and classes": f"{len(names):,}",
        "longest function": f"`{longest[0]}`, {lines(longest[1])} lines",
        "functions of more than 50 lines": str(sum(lines(function) > 50 for _, function in found)),
        "most arguments": f"`{widest[0]}`, {arguments(widest[1])}",
        "functions of more than 7 arguments": str(sum(arguments(function) > 7 for _, function in found)),
        "imports between packages and top-level modules": str(sum(map(len, graph.values()))),
        "of these, not implied by others": str(sum(map(len, reduced(graph).values()))),
    }
    return figures, names


def compare(packages: dict[str, Path]) -> str:
    """A Markdown table of the figures, with a column per package."""
    columns = {title: measure(package) for title, package in packages.items()}
    (first, names), (_, last_names) = next(iter(columns.values())), list(columns.values())[-1]
    rows = [f"| | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    rows += [f"| {name} | {' | '.join(figures[name] for figures, _ in columns.values())} |" for name in first]
    return "\n".join([*rows, "", f"{len(names - last_names)} of the first {len(names)} names are no longer in use."])


def main(arguments: list[str]) -> None:
    commits = [argument for argument in arguments if argument != "--imports"]
    with tempfile.TemporaryDirectory() as folder:
        packages = {commit: checkout(commit, Path(folder)) for commit in commits} or {"now": ROOT / "tinylm"}
        if commits == arguments:
            print(compare(packages))
            return
        for package in packages.values():
            graph = package_imports(package)
            print(draw(graph, base_modules(graph, package)))


if __name__ == "__main__":
    main(sys.argv[1:])
