"""Who may import whom, held by reading every import, those within functions too."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tinylm

HOME = Path(tinylm.__file__).parent
LEVELS = (
    {"__main__"},
    {"cli"},
    {"commands"},
    {"plan", "training", "console"},
    {"tasks", "evaluation", "inference", "adapters", "checkpoint", "weights", "place", "baselines", "cost"},
    {"objective", "model", "text", "device"},
    {"machine", "compiler", "spinning"},
    {"cache", "files"},
    {"config", "presets", "checks", "records", "errors", "interrupts", "streams"},
)
MODULES = {".".join(path.relative_to(HOME.parent).with_suffix("").parts): path for path in sorted(HOME.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """The dotted names that a file imports; relative imports are not used here."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES or f"{name}.__init__" in MODULES else str(node.module) for name in names}
    return found


def level(module: str) -> int:
    """Of a module of ours by its dotted name, counted from the top."""
    room = module.split(".")[1]
    return next(index for index, rooms in enumerate(LEVELS) if room in rooms)


def ours(module: str) -> set[str]:
    """What of tinylm itself it imports; the version in tinylm/__init__.py is anyone's."""
    return {name for name in imports(MODULES[module]) if name.startswith("tinylm.") and name != "tinylm.__init__"}


@pytest.mark.parametrize("module", [name for name in MODULES if name != "tinylm.__init__"])
def test_nothing_imports_upward(module: str) -> None:
    upward = {name for name in ours(module) if level(name) < level(module)}
    assert not upward


def test_nothing_imports_in_a_circle() -> None:
    graph = {module: {name for name in ours(module) if name in MODULES} for module in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_commands_are_the_only_users_of_the_console_besides_the_cli() -> None:
    users = {module for module in MODULES if "tinylm.console" in ours(module)}
    assert {module.split(".")[1] for module in users} == {"cli", "commands"}
    assert ours("tinylm.console") == set()


def test_only_the_console_imports_rich_or_tqdm() -> None:
    users = {m for m, path in MODULES.items() if {n.split(".")[0] for n in imports(path)} & {"rich", "tqdm"}}
    assert users == {"tinylm.console"}


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("tinylm.model.")])
def test_a_model_imports_torch_config_and_errors_and_nothing_else(module: str) -> None:
    for name in imports(MODULES[module]):
        root = name.split(".")[0]
        own = name.startswith("tinylm.model") or name in ("tinylm.config", "tinylm.errors")
        assert root == "torch" or root in sys.stdlib_module_names or own, name


def test_leaves_import_nothing_but_the_standard_library_and_each_other() -> None:
    leaves = {f"tinylm.{room}" for room in LEVELS[-1]}
    for module in leaves:
        foreign = {name.split(".")[0] for name in imports(MODULES[module])} - sys.stdlib_module_names
        assert foreign <= {"tinylm"}
        assert ours(module) <= leaves
    assert ours("tinylm.errors") == set()


def test_only_the_build_reads_the_model_config() -> None:
    readers = {m for m in MODULES if m.startswith("tinylm.model.") and "tinylm.config" in ours(m)}
    assert readers == {"tinylm.model.build"}


def test_every_room_has_its_level() -> None:
    rooms = {module.split(".")[1] for module in MODULES} - {"__init__"}
    assert rooms <= set().union(*LEVELS)
