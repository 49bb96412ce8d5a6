"""The rings: a core that trains, resumes, samples and evaluates on plain text, the jobs, and the borders around it.

The core finds jobs through the table of `tinylm.config.jobs` only. The borders that it still imports by name are listed
here, so that no new one appears unseen.
"""

import ast
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import tinylm
from tests.shell import CHILD_LIMIT, story

HOME = Path(tinylm.__file__).parent
JOBS = {path.name for path in (HOME / "jobs").iterdir() if path.is_dir() and (path / "job.py").exists()} - {"text"}
COMMANDS = ("train", "training_display", "sample", "evaluate", "runs", "info")
BORDERS = {  # with their packages and modules
    "adapters": ("adapters", *(f"models.{name}" for name in ("load_adapter", "adapter_kinds", "merge"))),
    "analysis": ("analysis",),
    "distributed": ("distributed",),
    "formats": ("formats", "models.importing", "models.exporting"),
    "run_report": ("run_report",),
    "serving": ("serving",),
    "doctor": ("machine.doctor",),
    "llama.cpp": ("generation.llama_cpp", "generation.conversion_cache"),
    "graphs": ("generation.graph_engine",),
}
# Without these, the core works (the last test): no module of the core imports them when it starts.
REMOVABLE = ("analysis", "run_report", "serving", "machine/doctor.py")
# The number of modules of the core that import a border. Of formats, one is models/open.py, the table of openers.
STILL_IMPORTED = dict.fromkeys(BORDERS, 0) | {"adapters": 3, "distributed": 3, "formats": 5, "run_report": 2}
STILL_IMPORTED |= {"llama.cpp": 3, "graphs": 1}
SETTINGS = ("--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--batch-size", "4", "--quiet")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(HOME).with_suffix("").parts)


def runtime_imports(path: Path) -> set[str]:
    """The modules of tinylm that a file imports outside of `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name.removeprefix("tinylm.") for name in names if name.startswith("tinylm.")}


def is_in(module: str, packages: tuple[str, ...]) -> str | None:
    """The package that a module, or a name in it, belongs to."""
    return next((package for package in packages if f"{module}.".startswith(f"{package}.")), None)


def core() -> dict[str, Path]:
    """The modules of the core."""
    paths = {module_of(path): path for path in sorted(HOME.rglob("*.py"))}
    outside = (*itertools.chain(*BORDERS.values()), *(f"jobs.{job}" for job in JOBS))
    inside = {module: path for module, path in paths.items() if is_in(module, outside) is None}
    commands = {f"commands.{name}" for name in COMMANDS}
    return {m: path for m, path in inside.items() if not m.startswith("commands.") or m in commands}


def test_the_core_imports_no_job_but_plain_text() -> None:
    assert len(JOBS) >= 6
    jobs = tuple(f"jobs.{job}" for job in JOBS)
    users = {module: {name for name in runtime_imports(path) if is_in(name, jobs)} for module, path in core().items()}
    assert {module: found for module, found in users.items() if found} == {}


def test_the_borders_that_the_core_still_imports_are_no_more_than_these() -> None:
    found = {
        (module, border)
        for module, path in core().items()
        for name in runtime_imports(path)
        for border, packages in BORDERS.items()
        if is_in(name, packages)
    }
    by_border = {border: sorted(module for module, other in found if other == border) for border in BORDERS}
    assert {border: len(modules) for border, modules in by_border.items()} == STILL_IMPORTED, by_border


def reduced_copy(folder: Path) -> Path:
    """A copy of the package with plain text as its only job, and without the borders of REMOVABLE."""
    copy = folder / "tinylm"
    shutil.copytree(HOME, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*REMOVABLE, *(f"jobs/{job}" for job in JOBS)):
        path = copy / name
        if path.is_dir():
            shutil.rmtree(path)
            path.mkdir()
        # Raises, since an installed package may be found in place of one that is missing.
        (path / "__init__.py" if path.is_dir() else path).write_text("raise ImportError(__name__)\n", encoding="utf-8")
    table = copy / "config/jobs.py"
    tree = ast.parse(table.read_text(encoding="utf-8"))
    (rows,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "JOBS" and isinstance(node.value, ast.Dict)
    )
    kept = [
        (key, row) for key, row in zip(rows.keys, rows.values, strict=True) if "tinylm.jobs.text." in ast.unparse(row)
    ]
    rows.keys, rows.values = [key for key, _ in kept], [row for _, row in kept]
    table.write_text(ast.unparse(tree), encoding="utf-8")
    return folder


def test_the_core_alone_trains_resumes_samples_and_evaluates(tmp_path: Path) -> None:
    home, here = reduced_copy(tmp_path / "copy"), tmp_path / "work"
    here.mkdir()
    (here / "text").write_text(story(20_000))

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(home), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tinylm", *arguments]
        found = subprocess.run(
            command, cwd=here, env=environment, capture_output=True, text=True, timeout=CHILD_LIMIT, check=False
        )
        assert found.returncode == 0, found.stderr
        return found.stdout

    where = [sys.executable, "-c", "import tinylm; print(tinylm.__file__)"]
    found = subprocess.run(where, cwd=here, env={**os.environ, "PYTHONPATH": str(home)}, capture_output=True, text=True)
    assert found.stdout.strip() == str(home / "tinylm/__init__.py")
    run("train", "text", "--out", "run", "--steps", "4", *SETTINGS)
    run("train", "--resume", "run", "--steps", "8", "--quiet")
    assert len(run("sample", "-m", "run", "--engine", "torch", "-n", "20", "--seed", "1", "--quiet")) > 1
    assert "bits per byte" in run("eval", "text", "-m", "run", "--quiet")
