"""Every promise of tests/promises.md names tests that exist; every guarantee and contract of the documents is there."""

import ast
import itertools
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS / "promises.md").read_text(encoding="utf-8")
DOCS = TESTS.parent / "docs"
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]


def test_every_promise_names_tests_and_each_of_them_exists() -> None:
    wrong = []
    for promise in itertools.chain.from_iterable(
        re.split(r"^- ", section, flags=re.MULTILINE)[1:] or [section] for section in SECTIONS
    ):
        named = re.findall(r"`([\w/]+\.py)::(\w+)", promise)
        wrong += [] if named else [f"no test: {promise}"]
        for file, name in named:
            path = TESTS / file
            tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
            functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            wrong += [] if name in functions else [f"{file}::{name} does not exist"]
    assert not wrong, "\n".join(wrong)


def test_every_guarantee_and_every_contract_of_the_documents_has_a_section() -> None:
    titles = {section.splitlines()[0] for section in SECTIONS}
    for page, heading in (("reliability.md", "Guarantees"), ("design.md", "Contracts")):
        text = (DOCS / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
        numbered = re.findall(r"^(\d+)\. \*\*(.+?)(?:\.|:)?\*\*", text, re.MULTILINE)
        assert numbered
        assert {f"{page} {number}: {title}" for number, title in numbered} <= titles
