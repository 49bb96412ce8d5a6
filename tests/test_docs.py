"""The documents agree with the code: commands parse, files exist, decisions are complete, the diagram is current."""

import ast
import importlib
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import tinylm
from tests.shell import environment, run_child
from tinylm.cli import app
from tinylm.config.run import FORMAT

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs"))
check = importlib.import_module("check")
drawing = importlib.import_module("imports")
options = importlib.import_module("options")

OTHER_PAGES = ("SECURITY.md", "CHANGELOG.md", "data/README.md", "checkpoints/README.md")
PAGES = [*check.documents(), *(ROOT / name for name in OTHER_PAGES)]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
ALL_PAGES = [*PAGES, *DECISIONS]
COMMANDS = typer.main.get_command(app).commands
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PARTS = ["Context", "Decision", "Consequences", "Measurements"]
FOLDERS = (".ci", "benchmarks", "docs", "tests", "tinylm")


def inline_code(page: Path) -> list[str]:
    """The inline code of a page: the text between backticks outside of fenced blocks, with line ends as spaces."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def commands_of(page: Path) -> list[str]:
    """The commands in fenced blocks, and inline code that begins with tinylm, make or python."""
    fenced = [command.text for block in check.blocks(page) for command in check.commands(block)]
    return [*fenced, *(code for code in inline_code(page) if re.match(r"(tinylm|make|python) \S", code))]


def simple_commands(line: str) -> list[list[str]]:
    """The words of each command of a pipeline or list, without variables set before it and without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;()"):
            found.append([])
        else:
            found[-1].append(word)
    return [words[next((i for i, word in enumerate(words) if "=" not in word), 0) :] for words in found if words]


def problems(words: list[str]) -> list[str]:
    """The errors in a command line of tinylm, make or a script of this project; other programs are not checked."""
    program, *arguments = words
    if Path(program).name.startswith("python") and arguments[:2] == ["-m", "tinylm"]:
        program, arguments = "tinylm", arguments[2:]
    if Path(program).name == "tinylm":
        return _tinylm_problems(arguments)
    if program == "make":
        return [f"make has no target {name}" for name in arguments if name not in TARGETS]
    if Path(program).name.startswith("python") and arguments and arguments[0].endswith(".py"):
        return _script_problems(*arguments)
    return []


def _tinylm_problems(arguments: list[str]) -> list[str]:
    if arguments[0].startswith("-"):
        return [] if arguments[0] in ("--help", "--version", "--install-completion") else [f"no option {arguments[0]}"]
    if arguments[0] not in COMMANDS:
        return [] if arguments[0].isupper() else [f"no command {arguments[0]}"]
    parameters = {name: parameter for parameter in COMMANDS[arguments[0]].params for name in _names(parameter)}
    found = []
    for word, following in itertools.pairwise([*arguments[1:], ""]):
        option, _, value = word.partition("=")
        if not re.match(r"--?[a-z]", word) or option == "--help":
            continue
        if option not in parameters:
            found.append(f"{arguments[0]} has no option {option}")
            continue
        values = (parameters[option].metavar or "").split("|")
        value = value or following
        if len(values) > 1 and not any(name.isupper() for name in (*values, value)) and value not in values:
            found.append(f"{option} cannot be {value}")
    return found


def _names(parameter: object) -> list[str]:
    return [*getattr(parameter, "opts", ()), *getattr(parameter, "secondary_opts", ())]


def _script_problems(script: str, *arguments: str) -> list[str]:
    file = ROOT / script
    if not file.is_file():
        return [f"no script {script}"]
    known = file.read_text(encoding="utf-8") + (ROOT / "benchmarks/measure.py").read_text(encoding="utf-8")
    options = [word.partition("=")[0] for word in arguments if re.match(r"--[\w-]+(=|$)", word)]
    shape = ("--layers", "--heads", "--width", "--context", "--vocab-size", "--rounds", "--warmup")
    return [f"{script} has no option {name}" for name in options if f'"{name}"' not in known and name not in shape]


def test_every_command_in_a_document_parses() -> None:
    found = [
        f"{page.name}: {line}: {problem}"
        for page in ALL_PAGES
        for line in commands_of(page)
        for part in simple_commands(line)
        for problem in problems(part)
    ]
    assert not found, "\n".join(found)


def test_every_program_in_a_document_uses_names_that_tinylm_has() -> None:
    for block in (block for page in ALL_PAGES for block in check.blocks(page) if block.language == "python"):
        ast.parse(block.text)
        assert set(re.findall(r"\btinylm\.([a-z_]+)\(", block.text)) <= set(dir(tinylm)), block.text


def test_every_option_that_a_document_mentions_exists() -> None:
    options = {name for command in COMMANDS.values() for parameter in command.params for name in _names(parameter)}
    scripts = [*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "data").glob("*.py"))]
    sources = "".join(script.read_text(encoding="utf-8") for script in scripts)
    codes = [(page.name, code) for page in ALL_PAGES for code in inline_code(page)]
    mentioned = {(page, code.split()[0].split("=")[0]) for page, code in codes if re.match(r"--[a-z]", code)}
    known = options | {"--help"}
    assert {(page, name) for page, name in mentioned if name not in known and f'"{name}"' not in sources} == set()


def test_every_file_that_a_document_mentions_exists() -> None:
    missing = []
    for page in ALL_PAGES:
        text = page.read_text(encoding="utf-8")
        links = {page.parent / link.partition("#")[0] for link in re.findall(r"\]\(([^)#:]+[^):]*)\)", text)}
        words = {word.rstrip(".,;:") for code in inline_code(page) for word in code.split()}
        paths = {
            ROOT / word
            for word in words
            if re.fullmatch(r"[\w./-]+", word) and word.split("/")[0] in FOLDERS and "/" in word
        }
        missing += [f"{page.name}: {path}" for path in links | paths if not path.exists()]
    assert not missing, "\n".join(missing)


def test_every_link_to_a_heading_leads_to_one() -> None:
    broken = []
    for page in ALL_PAGES:
        for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            target = (page.parent / link if link else page).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", target, re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            broken += [f"{page.name}: {link}#{anchor}"] if anchor not in anchors else []
    assert not broken, "\n".join(broken)


def test_no_document_shows_its_readers_what_is_meant_for_the_checker() -> None:
    """The reason for which commands are not run stands in the info string of their fence, which is not shown."""
    wrong = [page.name for page in ALL_PAGES if "not run:" in page.read_text(encoding="utf-8")]
    skipped = [block.language for page in ALL_PAGES for block in check.blocks(page) if block.skipped]
    assert not wrong and set(skipped) == {"sh", "console", "python"}


def test_a_decision_has_a_title_that_names_its_file_four_parts_one_table_and_at_most_45_lines() -> None:
    wrong = []
    for decision in DECISIONS:
        lines = decision.read_text(encoding="utf-8").splitlines()
        starts = [index for index, line in enumerate(lines) if line.startswith("## ")]
        tables = [index for index, line in enumerate(lines) if re.match(r"\| *-", line)]
        checks = {
            "title": re.sub("[^a-z0-9]+", "-", lines[0].removeprefix("# ").lower()) == decision.stem,
            "parts": [lines[index].removeprefix("## ") for index in starts] == PARTS,
            "lines": len(lines) <= 45,
            "width": all(len(line) <= 150 for line in lines if not line.startswith("|")),
            "tables": len(tables) <= 1 and all(index > starts[-1] for index in tables),
        }
        wrong += [f"{decision.name}: {name}" for name, holds in checks.items() if not holds]
    assert DECISIONS and not wrong, "\n".join(wrong)


def test_every_decision_that_is_referred_to_exists() -> None:
    numbers = {decision.name[:3] for decision in DECISIONS}
    files = [*ALL_PAGES, *(file for name in FOLDERS for file in sorted((ROOT / name).rglob("*.py")))]
    for file in files:
        for sequence in re.findall(
            r"decisions?[ /](0\d\d(?:(?:, | and | to )0\d\d)*)", file.read_text(encoding="utf-8")
        ):
            assert set(re.findall(r"\d{3}", sequence)) <= numbers, f"{file}: {sequence}"


def test_the_drawing_of_the_imports_is_current() -> None:
    """If it is not, run `python docs/imports.py`."""
    page = drawing.PAGE.read_text(encoding="utf-8")
    graph = drawing.package_imports(ROOT / "tinylm")
    assert drawing.with_drawing(page, drawing.draw(graph, drawing.base_modules(graph))) == page


def test_the_layout_names_every_package_and_module_of_tinylm() -> None:
    page = drawing.PAGE.read_text(encoding="utf-8")
    layout = page[page.index("    tinylm/\n") :].split("\n\n")[0]
    named = set(re.findall(r"\b\w+(?=\.py\b|/)", layout))
    found = {
        path.stem for path in (ROOT / "tinylm").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert found <= named
    assert named <= found | {path.stem for path in (ROOT / "tinylm").rglob("*.py")} | {"tinylm"}


def test_the_two_ways_through_the_code_name_modules_and_what_they_define() -> None:
    """In a row, a name in backticks belongs to the module before it, and a module without a folder to the last one."""
    ways = drawing.PAGE.read_text(encoding="utf-8").split("## Data flow")[0]
    missing, folder, source = [], ROOT / "tinylm", ""
    for cell in re.findall(r"^\| \d+ \| (.*?) \|", ways, re.MULTILINE):
        for name in re.findall(r"`([\w./]+)`", cell):
            if name.endswith(".py"):
                file = ROOT / "tinylm" / name if "/" in name else folder / name
                folder, source = file.parent, file.read_text(encoding="utf-8") if file.is_file() else ""
                missing += [] if source else [name]
            elif not all(re.search(rf"(def|class) {part}\b", source) for part in name.split(".")):
                missing.append(f"{cell}: {name}")
    assert ways and not missing, "\n".join(missing)


def test_pages_have_their_limits_and_name_the_format_of_a_run() -> None:
    for page, limit in {"README.md": 150, "CONTRIBUTING.md": 120, "CHANGELOG.md": 60}.items():
        assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= limit, page
    assert f"(`format`, today {FORMAT})" in (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")


NEW_OPTION = """
import inspect, json, pathlib, sys
import typer.main
from typer.testing import CliRunner
import tinylm
from tinylm.cli import app
pathlib.Path("text").write_text("abc def " * 200)
pathlib.Path("options.toml").write_text("clip-value = 0.25")
train = ["train", "text", "--steps", "1", "--layers", "1", "--width", "16", "--heads", "2", "--context", "16"]
dry = [*train, "--dry-run", "--json"]
def run(*words, **env):
    result = CliRunner().invoke(app, words, env=env)
    print(result.stderr, file=sys.stderr)
    return result
of = lambda result: json.loads(result.stdout)["training"]["clip_value"]
print(of(run(*dry)), of(run(*dry, "--clip-value", "0.5")), of(run(*dry, TINYLM_TRAIN_CLIP_VALUE="0.75")))
print(of(run(*dry, "--config", "options.toml")), inspect.signature(tinylm.train).parameters["clip_value"].default)
wrong = run(*dry, "--clip-value=-1")
print(wrong.exit_code, wrong.stderr.strip())
run(*train, "--clip-value", "0.5", "--out", "run")
print(json.loads(pathlib.Path("run/config.json").read_text())["training"]["clip_value"])
"""


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
def test_the_worked_example_of_an_option_is_one_line_and_its_use(tmp_path: Path) -> None:
    (block,) = (block for block in check.blocks(ROOT / "CONTRIBUTING.md") if block.language == "diff")
    assert len(re.findall(r"^\+(?!\+)", block.text, re.MULTILINE)) == 2
    for header, hunk in re.findall(r"^(@@ .*)\n((?:[ +-].*\n|\n)+?)(?=@@|--- |\Z)", block.text, re.MULTILINE):
        old, new = map(int, re.findall(r",(\d+)", header)[:2])  # patch ignores what is after as many lines
        signs = [line[:1] or " " for line in hunk.splitlines()]
        assert (len(signs) - signs.count("+"), len(signs) - signs.count("-")) == (old, new), header
    shutil.copytree(ROOT / "tinylm", tmp_path / "tinylm", ignore=shutil.ignore_patterns("__pycache__"))
    patch = ["patch", "-p1", "--fuzz=0"]
    subprocess.run(patch, cwd=tmp_path, input=block.text, text=True, check=True, timeout=60)
    found = run_child(
        [sys.executable, "-c", NEW_OPTION], cwd=tmp_path, env=environment() | {"PYTHONPATH": str(tmp_path)}
    )
    assert found.stdout.splitlines() == [
        "None 0.5 0.75",
        "0.25 None",
        "2 Error: --clip-value is -1.0; it must be from 0 to 1000000.0.",
        "0.5",
    ], found.stderr


def test_the_table_of_options_is_that_of_the_commands() -> None:
    assert options.PAGE.read_text(encoding="utf-8") == options.table(), "run: python docs/options.py"


# docs/check.py


def test_commands_are_found_in_blocks_and_those_that_do_not_parse_are_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ one \\\n    two\noutput\n```\ntext\n```sh skip: needs a GPU\n# remark\nthree   # remark\n```\n"
    )
    found = [command for block in check.blocks(page) for command in check.commands(block)]
    read = [(command.line, command.text, command.skipped) for command in found]
    assert read == [(2, "one two", None), (9, "three", "needs a GPU")]
    wrong = ("tinylm train a.txt --kv-hats 2", "tinylm trane", "make nothing", "tinylm sample --engine maybe")
    assert all(any(problems(part) for part in simple_commands(line)) for line in wrong)
