"""Which module may import which. Every import statement is read, also those inside of functions."""

import ast
import itertools
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import tinylm
from tinylm.config.jobs import all_data

HOME = Path(tinylm.__file__).parent
LEVELS = tuple(
    set(line.split())
    for line in """
__main__ cli
commands
run_report serving
training analysis
models
jobs.labels jobs.preferences jobs.masked jobs.distillation
jobs.text jobs.pairs jobs.chat
jobs
evaluation
generation
adapters
planning run_directory
formats machine objectives
transformer
text kernels distributed run_directory.tensor_file
config system
errors reporter
""".strip().splitlines()
)
# Modules with the tables of kinds of data, and with what follows from a kind.
KINDS_OF_DATA = ("tinylm.config.run", "tinylm.text.", "tinylm.jobs.")
MODULES = {".".join(path.relative_to(HOME.parent).with_suffix("").parts): path for path in sorted(HOME.rglob("*.py"))}


def imports(path: Path, *, types: bool = True) -> set[str]:
    """The dotted names that a file imports; relative imports are not used here. types: also those for types only"""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if not types else ():
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES or f"{name}.__init__" in MODULES else str(node.module) for name in names}
    return found


def level(module: str) -> int:
    """The level of a module of tinylm by its dotted name, counted from the top; an error if it has none."""
    _, *names = module.split(".")
    for name in (".".join(names[:2]), names[0]):  # a module or a folder with a level of its own, or else its package
        for index, level in enumerate(LEVELS):
            if name in level:
                return index
    raise AssertionError(f"{module} has no level")


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
    users = {module for module in MODULES if "tinylm.commands.console" in own_imports(module)}
    assert {module.split(".")[1] for module in users} == {"cli", "commands"}
    assert own_imports("tinylm.commands.console") == {"tinylm.reporter"}


def test_only_the_console_imports_rich_and_tqdm_except_for_the_bar_of_python_programs() -> None:
    users = {m for m, path in MODULES.items() if {n.split(".")[0] for n in imports(path)} & {"rich", "tqdm"}}
    assert users == {"tinylm.commands.console", "tinylm.training.progress_bar"}


def test_models_and_kernels_import_only_torch_and_what_they_need() -> None:
    for package, others in (
        ("transformer", ("tinylm.kernels.", "tinylm.config.model", "tinylm.errors")),
        ("kernels", ("tinylm.system.", "tinylm.errors", "tinylm.reporter")),
    ):
        modules = [module for module in MODULES if module.startswith(f"tinylm.{package}.")]
        assert modules
        used = {(module, name) for module in modules for name in imports(MODULES[module])}
        foreign = {use for use in used if not use[1].startswith((f"tinylm.{package}.", *others))}
        assert {use for use in foreign if use[1].split(".")[0] not in {"torch", *sys.stdlib_module_names}} == set()


def test_config_and_system_import_neither_torch_nor_numpy_when_they_run() -> None:
    for module in (f"tinylm.{name}" for name in ("config.", "system.", "errors", "reporter")):
        for path in (path for name, path in MODULES.items() if name.startswith(module)):
            used = {name.split(".")[0] for name in imports(path, types=False)} - sys.stdlib_module_names
            assert used <= {"tinylm", "filelock"}, path
    assert own_imports("tinylm.errors") == own_imports("tinylm.reporter") == set()


def test_planning_imports_no_kernel_no_device_and_of_the_model_only_the_build() -> None:
    """It takes the properties of the machine from `tinylm.machine.measure`."""
    used = set().union(*(own_imports(m) for m in MODULES if m.startswith("tinylm.planning.")))
    assert {name for name in used if name.startswith(("tinylm.kernels", "tinylm.machine.device"))} == set()
    assert {name for name in used if name.startswith("tinylm.transformer.")} == {"tinylm.transformer.build"}


def test_only_the_build_reads_the_model_config() -> None:
    readers = {m for m in MODULES if m.startswith("tinylm.transformer.") and "tinylm.config.model" in own_imports(m)}
    assert readers == {"tinylm.transformer.build"}


def test_formats_import_models_and_texts_but_not_runs_and_adapters() -> None:
    used = set().union(*(own_imports(module) for module in MODULES if module.startswith("tinylm.formats.")))
    assert {name.split(".")[1] for name in used if level(name) == level("tinylm.formats.gguf_file")} == {"formats"}


def compared_kinds(source: str) -> list[str]:
    """The comparisons and cases of a kind of data with a literal or with the kind of a class of corpora, as text."""

    def is_literal(node: ast.AST) -> bool:
        parts = [*ast.walk(node)]
        values = {part.value for part in parts if isinstance(part, ast.Constant)} & {*all_data()}
        return bool(values) or any(
            ast.unparse(p).endswith("Corpus.kind") for p in parts if isinstance(p, ast.Attribute)
        )

    def pairs(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
        if isinstance(node, ast.Compare):
            return list(itertools.permutations([node.left, *node.comparators], 2))
        return [(node.subject, case.pattern) for case in node.cases] if isinstance(node, ast.Match) else []

    return [
        ast.unparse(one)
        for node in ast.walk(ast.parse(source))
        for one, other in pairs(node)
        if ast.unparse(one).rpartition(".")[2] == "kind" and is_literal(other)
    ]


def test_only_the_modules_with_tables_of_data_compare_a_kind_of_data() -> None:
    users = {module: compared_kinds(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}
    assert {m: found for m, found in users.items() if found and not m.startswith(KINDS_OF_DATA)} == {}
    for source in (
        'x = 1 if "pairs" != kind else 2',
        'kind in ("text", "pairs")',
        "self.data.kind == PairCorpus.kind",
        'match model.data.kind:\n    case "text" | "chat":\n        pass',
    ):
        assert compared_kinds(source), source
    for source in ('adapter.kind == "lora"', 'format == "pairs"', 'x = {"text": 1}[data.kind]', "kind == other"):
        assert compared_kinds(source) == [], source
