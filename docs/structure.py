"""The size of tinylm's code, of its functions and of its paths, at one or several commits (decision 035).

    python docs/structure.py [COMMIT ...]

prints a Markdown table with a column per commit; without arguments, of the working tree. The modules of a path are
those with a function that runs, outside of imports, before a new run is saved or a text is printed. A feature is
mentioned in a file if its pattern is found in a name, or in a text that is no docstring; HOMES are not counted.
"""

import ast
import io
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

from imports import ROOT, package_imports, reduced

Function = ast.FunctionDef | ast.AsyncFunctionDef
SAVING = "RunDirectory.save_for_inference save_best"  # today's and the earlier name
TRACE = """
import sys
last, home, *sys.argv = sys.argv[1:]
modules, imports = set(), []
def profile(frame, event, argument):
    code = frame.f_code
    if code.co_name == "<module>" and event in ("call", "return"):
        imports.append(None) if event == "call" else imports.pop()
    if event == "call" and code.co_flags & 1 and not imports and code.co_filename.startswith(home):
        modules.add(code.co_filename)
        if {code.co_name, code.co_qualname} & set(last.split()):
            print("modules:", len(modules), flush=True)
            sys.setprofile(None)
from tinylm.__main__ import main
sys.setprofile(profile)
main()
"""


def checkout(commit: str, folder: Path) -> Path:
    """Write the package at a commit to a new folder in `folder`; returns its path."""
    archive = folder / f"{commit}.tar"
    subprocess.run(["git", "archive", "-o", archive, commit, "tinylm"], cwd=ROOT, check=True)
    shutil.unpack_archive(archive, folder / commit, filter="data")
    return folder / commit / "tinylm"


def path_modules(package: Path, last: str, command: str) -> int:
    """The number of modules that a command passes until it calls a function of `last`, names separated by spaces."""
    words = [sys.executable, "-c", TRACE, last, f"{package.resolve()}/", "tinylm", *command.split()]
    printed = subprocess.run(words, cwd=package.parent, capture_output=True, text=True, check=True, timeout=300).stdout
    return next(int(line.split()[-1]) for line in printed.splitlines() if line.startswith("modules:"))


def code_lines(source: str, tree: ast.AST) -> int:
    """The number of lines without blank ones, docstrings and imports."""
    left = {number for number, line in enumerate(source.splitlines(), 1) if line.strip()}
    for node in ast.walk(tree):
        documented = node.body[0] if isinstance(node, ast.Module | ast.ClassDef | Function) and node.body else None
        is_text = isinstance(documented, ast.Expr) and isinstance(documented.value, ast.Constant)
        for out in (documented if is_text else None, node if isinstance(node, ast.Import | ast.ImportFrom) else None):
            left -= set() if out is None else {*range(out.lineno, (out.end_lineno or 0) + 1)}
    return len(left)


# By feature: the pattern of a mention, and the beginnings of the paths of its home, today's and earlier ones.
FEATURES = {
    "labels": (r"label(?!_smoothing)|classif", "jobs/labels commands/classify text/labels generation/classify"),
    "preferences": (r"preference|dpo_|\"dpo", "jobs/preferences text/preferences"),
    "distillation": (r"distil|teacher", "jobs/distillation models/teachers models/find_base objectives/distillation"),
    "chat": ("chat|conversation", "jobs/chat text/chat text/chat_format text/template_worker commands/chat"),
    "pairs": (
        r"encoder.?decoder|sequence.to.sequence|bleu|chrf|[\"' ]pairs\b|_pairs\b|Pair[A-Z]",
        "jobs/pairs text/pairs evaluation/translation generation/translate",
    ),
    "masked tokens": (
        r"masked.?(token|window|job|eval)|fill_mask|mask_id|\"masked",
        "jobs/masked generation/fill_mask",
    ),
    "ranks, shards": (r"rank(?!_stab)|shard|ddp|fsdp", "distributed/ training/parallel system/ranks system/launch"),
    "adapters": (
        "adapter|lora|peft|bottleneck",
        "adapters/ models/adapter models/load_adapter models/peft models/merge formats/peft commands/finetune "
        "commands/merge",
    ),
    "experts": (r"expert|router|moe\b", "transformer/experts"),
}
HOMES = {
    "labels": ("objectives/classification", "evaluation/classification"),
    "preferences": ("objectives/preferences", "evaluation/preferences"),
}


def words_of(source: str) -> str:
    """The names and texts of a module, one per line, without docstrings."""
    documented = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | Function) and node.body and isinstance(node.body[0], ast.Expr)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kinds = (tokenize.NAME, tokenize.STRING)
    return "\n".join(token.string for token in tokens if token.type in kinds and token.start[0] not in documented)


def mentions(package: Path) -> dict[str, int]:
    """For each feature, the number of files outside of its home that mention it."""
    words = {path.relative_to(package).as_posix(): words_of(path.read_text("utf-8")) for path in package.rglob("*.py")}

    def count(feature: str) -> int:
        pattern, home = FEATURES[feature]
        homes = (*home.split(), *HOMES.get(feature, ()))
        return sum(bool(re.search(pattern, words[path], re.I)) for path in words if not path.startswith(homes))

    return {f"files that mention {feature}": count(feature) for feature in FEATURES}


def measure(package: Path, text: Path) -> dict[str, int]:
    """The figures of a package by name. A run on `text` is written beside it."""
    files = sorted(package.rglob("*.py"))
    sources = [file.read_text(encoding="utf-8") for file in files]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    asserts = [ast.unparse(node) for node in nodes if isinstance(node, ast.Assert)]
    graph, counts = package_imports(package), [source.count("\n") for source in sources]
    run = text.with_name(f"run-{package.parent.name}")
    bodies = [node for node in nodes if isinstance(node, Function)]
    return {
        "files": len(files),
        "lines": sum(counts),
        "median of the lines of a file": int(statistics.median(counts)),
        "lines of code": sum(code_lines(source, ast.parse(source)) for source in sources),
        "modules beside the packages": sum(file.parent == package for file in files),
        "modules before the first save": path_modules(package, SAVING, f"train {text} --steps 1 --out {run}"),
        "modules before a sample is printed": path_modules(package, "result", f"sample -m {run} -n 3 --stream"),
        "class names that stand twice": len(classes) - len(set(classes)),
        "asserts of `is not None`": sum(text.endswith("is not None") for text in asserts),
        "functions of more than 50 lines": sum((node.end_lineno or 0) - node.lineno >= 50 for node in bodies),
        "imports between packages": sum(map(len, graph.values())),
        "of these, not implied by others": sum(map(len, reduced(graph).values())),
        **mentions(package),
    }


def main(commits: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        text.write_text((ROOT / "data" / "corpus.txt").read_text(encoding="utf-8")[:50_000])
        packages = {commit: checkout(commit, Path(folder)) for commit in commits} or {"now": ROOT / "tinylm"}
        columns = [measure(package, text) for package in packages.values()]
    print(f"| | {' | '.join(packages)} |\n{'| --- ' * (len(columns) + 1)}|")
    for row in columns[0]:
        print(f"| {row} | {' | '.join(f'{column[row]:,}' for column in columns)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
