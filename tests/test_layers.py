"""Which module may import which. Every import statement is read, also those inside of functions."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tinylm
from tinylm.run_config import CORPUS_KINDS

HOME = Path(tinylm.__file__).parent
LEVELS = (
    {"__main__"},
    {"cli"},
    {"commands"},
    {
        "training",
        "report",
        "sinks",
        "loaded_model",
        "open_generator",
        "chat_session",
        "comparison",
        "memorisation",
        "importing",
        "exporting",
        "doctor",
        "console",
    },
    {"task_kinds"},
    {"evaluation", "planning", "generation", "adapters"},
    {"open_model"},
    {"run_directory", "formats"},
    {"ranks", "rendezvous"},
    {"objectives", "model", "text", "device", "machine"},
    {"kernels"},
    {"machine_profile", "machine_load"},
    {"cache_directory", "files"},
    {
        "model_config",
        "run_config",
        "training_config",
        "duration",
        "presets",
        "sequence_growth",
        "validation",
        "serialization",
        "errors",
        "launch",
        "process_signals",
        "reporter",
        "streams",
    },
)
# Modules with the tables of kinds of data, and with what follows from a kind.
KINDS_OF_DATA = ("tinylm.run_config", "tinylm.text.", "tinylm.objectives.", "tinylm.evaluation.")
ALLOWED_IN_KERNELS = ("tinylm.machine_profile", "tinylm.cache_directory", "tinylm.errors", "tinylm.reporter")
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
    """The level of a module of tinylm by its dotted name, counted from the top."""
    package = module.split(".")[1]
    return next(index for index, packages in enumerate(LEVELS) if package in packages)


def own_imports(module: str) -> set[str]:
    """The modules of tinylm that a module imports, except tinylm/__init__.py, whose version any module may read."""
    return {name for name in imports(MODULES[module]) if name.startswith("tinylm.") and name != "tinylm.__init__"}


def test_no_module_imports_one_of_a_higher_level() -> None:
    modules = [name for name in MODULES if name != "tinylm.__init__"]
    assert {
        (module, name) for module in modules for name in own_imports(module) if level(name) < level(module)
    } == set()


def test_there_are_no_import_cycles() -> None:
    graph = {module: {name for name in own_imports(module) if name in MODULES} for module in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_only_the_cli_and_the_commands_import_the_console() -> None:
    users = {module for module in MODULES if "tinylm.console" in own_imports(module)}
    assert {module.split(".")[1] for module in users} == {"cli", "commands"}
    assert own_imports("tinylm.console") == set()


def test_only_the_console_imports_rich_or_tqdm() -> None:
    users = {m for m, path in MODULES.items() if {n.split(".")[0] for n in imports(path)} & {"rich", "tqdm"}}
    assert users == {"tinylm.console"}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("tinylm.model.", ("tinylm.model.", "tinylm.kernels.", "tinylm.model_config", "tinylm.errors")),
        ("tinylm.kernels.", ("tinylm.kernels.", *ALLOWED_IN_KERNELS)),
    ],
)
def test_models_and_kernels_import_only_torch_and_what_they_need(package: str, allowed: tuple[str, ...]) -> None:
    modules = [module for module in MODULES if module.startswith(package)]
    used = {(module, name) for module in modules for name in imports(MODULES[module]) if not name.startswith(allowed)}
    assert modules
    assert {use for use in used if use[1].split(".")[0] not in {"torch", *sys.stdlib_module_names}} == set()


def test_the_lowest_level_imports_only_the_standard_library_and_itself() -> None:
    leaves = {f"tinylm.{module}" for module in LEVELS[-1]}
    for module in leaves:
        foreign = {name.split(".")[0] for name in imports(MODULES[module])} - sys.stdlib_module_names
        assert foreign <= {"tinylm"}
        assert own_imports(module) <= leaves
    assert own_imports("tinylm.errors") == set()


def test_planning_imports_no_kernel_no_device_and_of_the_model_only_the_build() -> None:
    """It takes the properties of the machine from `tinylm.machine`."""
    used = set().union(*(own_imports(m) for m in MODULES if m.startswith("tinylm.planning.")))
    assert {name for name in used if name.startswith(("tinylm.kernels", "tinylm.device"))} == set()
    assert {name for name in used if name.startswith("tinylm.model.")} == {"tinylm.model.build"}


def test_only_the_build_reads_the_model_config() -> None:
    readers = {m for m in MODULES if m.startswith("tinylm.model.") and "tinylm.model_config" in own_imports(m)}
    assert readers == {"tinylm.model.build"}


def test_every_package_has_a_level() -> None:
    packages = {module.split(".")[1] for module in MODULES} - {"__init__"}
    assert packages <= set().union(*LEVELS)


def test_formats_import_models_and_texts_but_not_runs_and_adapters() -> None:
    used = set().union(*(own_imports(module) for module in MODULES if module.startswith("tinylm.formats.")))
    assert {name.split(".")[1] for name in used if level(name) == level("tinylm.formats.gguf")} == {"formats"}


def compared_kinds(source: str) -> list[str]:
    """The comparisons of a kind of data with a literal or with the kind of a class of corpora, as source text."""

    def is_kind(node: ast.expr) -> bool:
        return ast.unparse(node).rpartition(".")[2] == "kind"

    def is_literal(node: ast.AST) -> bool:
        return any(
            (isinstance(part, ast.Constant) and part.value in CORPUS_KINDS)
            or (isinstance(part, ast.Attribute) and ast.unparse(part).endswith("Corpus.kind"))
            for part in ast.walk(node)
        )

    found: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(is_kind(side) and any(map(is_literal, sides[:i] + sides[i + 1 :])) for i, side in enumerate(sides)):
                found.append(node)
        elif isinstance(node, ast.Match) and is_kind(node.subject):
            found += [case.pattern for case in node.cases if is_literal(case.pattern)]
    return [ast.unparse(node) for node in found]


def test_only_the_modules_with_tables_of_data_compare_a_kind_of_data() -> None:
    users = {module: compared_kinds(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}
    assert {m: found for m, found in users.items() if found and not m.startswith(KINDS_OF_DATA)} == {}


def test_comparisons_of_kinds_of_data_are_found() -> None:
    compared = (
        'if data.kind == "chat": pass',
        'x = 1 if "pairs" != kind else 2',
        'kind in ("text", "pairs")',
        "self.data.kind == PairCorpus.kind",
        'match model.data.kind:\n    case "text" | "chat":\n        pass',
    )
    for source in compared:
        assert len(compared_kinds(source)) == 1, source
    for source in ('adapter.kind == "lora"', 'format == "pairs"', 'x = {"text": 1}[data.kind]', "kind == other"):
        assert compared_kinds(source) == [], source
