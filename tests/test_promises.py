"""Every promise of tests/promises.md names tests that exist; every guarantee and contract of the documents is there."""

import ast
import functools
import itertools
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS / "promises.md").read_text(encoding="utf-8")
DOCS = TESTS.parent / "docs"
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]


@functools.cache
def functions_of(file: str) -> set[str]:
    """The names of the functions of a file below tests/; none if it does not exist."""
    path = TESTS / file
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_tests_and_each_of_them_exists() -> None:
    wrong = []
    for promise in itertools.chain.from_iterable(
        re.split(r"^- ", section, flags=re.MULTILINE)[1:] or [section] for section in SECTIONS
    ):
        named = re.findall(r"`([\w/]+\.py)::(\w+)", promise)
        wrong += [] if named else [f"no test: {promise}"]
        wrong += [f"{file}::{name} does not exist" for file, name in named if name not in functions_of(file)]
    assert not wrong, "\n".join(wrong)


def test_every_guarantee_and_every_contract_of_the_documents_has_a_section() -> None:
    titles = {section.splitlines()[0] for section in SECTIONS}
    for page, heading in (("reliability.md", "Guarantees"), ("design.md", "Contracts")):
        text = (DOCS / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
        numbered = re.findall(r"^(\d+)\. \*\*(.+?)(?:\.|:)?\*\*", text, re.MULTILINE)
        assert numbered
        assert {f"{page} {number}: {title}" for number, title in numbered} <= titles
