"""Mutation testing, tried on a package of one file with a test that misses one of its faults."""

import importlib
import json
from pathlib import Path

import pytest

mutants = importlib.import_module("mutants")
operators = importlib.import_module("mutation_operators")
pytestmark = pytest.mark.slow

SOURCE = '''\
"""Larger than 3."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1


def clipped(value: int, low: int = 0, *, high: int = 9) -> int:
    """At most 9."""
    if value < low:
        return low
    if not value <= high:
        raise ValueError(f"{value + 1} is too large for {clipped(1, 2)}")
    while value > 1000:
        value = divided(value, 10)
    return value


def divided(value: int, by: int) -> int:
    return value // by
'''
TEST = """\
import pytest
from package.clip import clipped


@pytest.mark.parametrize(("value", "expected"), [(5, 5), (-1, 0)])
def test_small_values(value, expected):
    assert clipped(value) == expected


def test_a_large_value():
    with pytest.raises(ValueError):
        clipped(10)
"""


def differences() -> list[str]:
    return [f"{mutant.operator}: {mutant.difference()}" for mutant in operators.mutants_of("clip.py", SOURCE.encode())]


def mutant_of(difference: str) -> "operators.Mutant":
    found = operators.mutants_of("package/clip.py", SOURCE.encode())
    return next(mutant for mutant in found if difference in mutant.difference())


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis takes most of a short run
    root = tmp_path / "project"
    for name, text in {"package/__init__.py": "", "package/clip.py": SOURCE, "tests/test_clip.py": TEST}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_each_operator_produces_its_fault() -> None:
    assert differences() == [
        "off by one: def clipped(value: int, low: int = [0 -> 1], *, high: int = 9) -> int:",
        "off by one: ...alue: int, low: int = 0, *, high: int = [9 -> 10]) -> int:",
        "negated condition: if [value < low -> not (value < low)]:",
        "comparison: if value [< -> <=] low:",
        "returned None: return [low -> None]",
        "dropped not: if [not value <= high -> value <= high]:",
        "comparison: if not value [<= -> <] high:",
        'removed statement: [raise ValueError(f"{value + 1} is too large for {clipped(1, ... -> pass]',
        "negated condition: while [value > 1000 -> not (value > 1000)]:",
        "comparison: while value [> -> >=] 1000:",
        "constant: while value > [1000 -> 2000]:",
        "swapped arguments: value = divided([value, 10 -> 10, value])",
        "off by one: value = divided(value, [10 -> 11])",
        "returned None: return [value -> None]",
        "returned None: return [value // by -> None]",
        "arithmetic: return value [// -> *] by",
    ]


def test_a_mutant_is_located_after_its_line_moved_but_not_after_it_changed() -> None:
    mutant = mutant_of("[> -> >=]")
    moved = SOURCE.replace("LIMIT = 1", "LIMIT = 1\n    OTHER = 2").encode()
    assert mutant.apply(moved) == moved.replace(b"value > 1000", b"value >= 1000")
    assert mutant.apply(SOURCE.replace("1000", "2000").encode()) is None


def test_the_same_seed_draws_the_same_mutants(tree: Path) -> None:
    first = mutants.draw(tree, 5, seed=1, under=["package"])
    assert len(set(first)) == 5
    assert first == mutants.draw(tree, 5, seed=1, under=["package"])
    assert first != mutants.draw(tree, 5, seed=2, under=["package/clip.py"])
    with pytest.raises(SystemExit, match="fewer than 99 mutants"):
        mutants.draw(tree, 99, seed=1, under=["package"])


@pytest.mark.slow
def test_faults_are_inserted_in_a_copy_and_detected_or_survive(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [mutant_of("value [< -> <=] low"), mutant_of("raise ValueError"), mutant_of("int = [0 -> 1]")]
    cases = [{"mutant": mutants.asdict(mutant)} for mutant in chosen]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    folders = ["--root", str(tree), "--package", "package", "--cache", str(tmp_path / "cache")]
    report = tmp_path / "report.json"
    mutants.main([*folders, "--replay", str(tmp_path / "cases.json"), "--out", str(report), "--limit", "100"])
    assert [case["killed_by"] for case in json.loads(report.read_text())] == [
        "SURVIVED",
        "tests/test_clip.py::test_a_large_value",
        "tests/test_clip.py::test_small_values[-1-0]",
    ]
    assert "2 of 3 faults were detected. 1 SURVIVED." in capsys.readouterr().out
    assert (tree / "package" / "clip.py").read_text() == SOURCE
    mutants.main([*folders, "--replay", str(report), "--only", "2", "--tests=-k small"])
    assert "0 of 1 faults were detected. 1 SURVIVED." in capsys.readouterr().out


def test_a_fault_that_prevents_the_collection_of_tests_is_detected(tree: Path) -> None:
    with mutants.copy_of(tree) as copy:
        text = (copy / "tests" / "test_clip.py").read_text()
        (copy / "tests" / "test_clip.py").write_text(text.replace("[(5, 5)", "[clipped(10), (5, 5)"))
        found = mutants.run_tests(copy, ["tests/test_clip.py::test_small_values[5-5]"], limit=100)
        assert found == "tests/test_clip.py"


def test_a_fault_is_undecided_at_its_time_limit(tree: Path) -> None:
    with mutants.copy_of(tree) as copy:
        (copy / "tests" / "test_clip.py").write_text("def test_forever():\n    while True: pass\n")
        assert mutants.run_tests(copy, ["tests/test_clip.py"], limit=3) == mutants.UNDECIDED
