"""Run the commands that the documents show.

    python docs/check.py [DOCUMENT ...]

Commands are the lines of fenced `sh` blocks and the lines of `console` blocks that begin with `$ `; a line that ends
with a backslash continues. `python` blocks run as programs, `diff` blocks are applied. A document's commands run in
its order in one temporary folder, a copy of the checkout without its runs. A failure is an exit code other than 0.
The commands of a block whose opening fence ends with `skip: REASON` are skipped and counted; readers do not see it.

Commands run as they are written, except for these substitutions:

1. Texts. data/corpus.txt is cut to its first CORPUS_CHARACTERS characters. A .txt or .tsv file that a command names and
   no earlier command has written is made from it; so are two files in texts/ if a command names that folder.
2. Length. `tinylm train` and `finetune-*` run two steps, or four with --resume, instead of --steps, --epochs or --time;
   a new model without a size option has --size nano. In Python, `time=`, `steps=` and `epochs=` are replaced likewise.
3. Benchmarks run with the options of TINY_BENCHMARKS added, which come after the document's own.
4. `make TARGET` becomes `make -n TARGET`, which fails without the target; the tinylm commands that it prints are run.
5. pytest only collects the tests, except in CONTRIBUTING.md, where it runs them. Installing (pip, venv and its
   activation) is left to `make wheel-check`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = (".ci", "benchmarks", "data", "docs", "tests", "tinylm")
LIMIT = 600  # seconds for one command
CORPUS_CHARACTERS = 40_000
SKIPPED = " skip: "  # in the info string of a fence, of which only the language is shown
BUDGET = re.compile(r"--(?:time|steps|epochs)[ =](?!N\b)\S+")
PYTHON_BUDGET = re.compile(r"\b(?:time|steps|epochs)=[^,)]+")
SIZED = re.compile(r"--(?:size|layers|heads|width|context|resume|init-from|config)\b")
TRAINING = re.compile(r"\btinylm (train|finetune-lora|finetune-adapter)(?= )")
INSTALLING = re.compile(r"^(\S*/)?(pip3?|python3? -m (pip|venv)|py -3|\.|\.venv\\\S+) ")
SMALL = "--layers 1 --heads 2 --width 16 --context 24 --rounds 1 --warmup 0"
TINY_RUN = "--size nano --context 16 --batch-size 2"
TINY_BENCHMARKS = {  # by program, or by program and its first argument
    "ablation.py": f'--steps 2 --seeds 1 --groups positions --options "{TINY_RUN}"',
    "finetuning.py": "--shape tiny",
    "formats.py differences": "--families gpt2",
    "formats.py encoding": "--megabytes 1 --vocab-size 300 --rounds 1",
    "formats.py opening": "--layers 2 --width 64",
    "formats.py startup": "--rounds 1",
    "gpu.py": "--small --rounds 1",
    "learning.py": "--times 5s --seeds 1",
    "sampling.py": "--models 4x128 --kinds f32 --rounds 1",
    "scale.py corpora": "--gigabytes 0.15",
    "scale.py memory": "--models 1x32 --kinds adamw",
    "scale.py ranks": f"{SMALL} --rows 2 --dtypes fp32",
    "training.py": f"{SMALL} --batch-size 2",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the document where the text begins.

    skipped: the reason for which its commands are not run.
    """

    document: Path
    line: int
    language: str
    text: str
    skipped: str | None = None


@dataclass(frozen=True)
class Command:
    """A shell command of a document. `skipped` is the reason for which it is not run."""

    document: Path
    line: int
    text: str
    skipped: str | None = None


def documents() -> list[Path]:
    """The pages whose commands are run. Decisions record what was run once."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path) -> Iterator[Block]:
    """The fenced blocks of a document."""
    info, begun, held = None, 0, []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.lstrip().startswith("```"):
            held.append(line)
        elif info is None:
            info, begun, held = line.strip().removeprefix("```"), number + 1, []
        else:
            language, _, reason = info.partition(SKIPPED)
            yield Block(document, begun, language, "\n".join(held) + "\n", reason or None)
            info = None


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block of shell commands, with continued lines joined."""
    if block.language not in ("sh", "console"):
        return
    prompt = "$ " if block.language == "console" else ""
    lines = iter(enumerate(block.text.splitlines(), start=block.line))
    for number, line in lines:
        if not line.startswith(prompt) or not line.strip() or line.startswith("#"):
            continue
        text = line.removeprefix(prompt)
        while text.endswith("\\"):
            text = text[:-1].rstrip() + " " + next(lines)[1].strip()
        text = re.sub(r"\s{2,}# .*", "", text).strip()
        yield Command(block.document, number, text, block.skipped)


def shortened(command: str, document: Path) -> str:
    """The command after the substitutions 2 to 5."""
    pieces = TRAINING.split(command)  # what comes before, then a subcommand and what follows it, in turns
    for index in range(1, len(pieces), 2):
        rest, follower, after = pieces[index + 1].partition(" |")
        steps = 4 if "--resume" in rest else 2
        rest = BUDGET.sub("", rest)
        size = "" if pieces[index] != "train" or SIZED.search(rest) else " --size nano"
        pieces[index] = f"tinylm {pieces[index]} --steps {steps}{size}"
        pieces[index + 1] = rest + follower + after
    command = "".join(pieces)
    if match := re.search(r"\bbenchmarks/((\w+\.py)(?: \w+)?)", command):
        command = f"{command} {TINY_BENCHMARKS.get(match[1]) or TINY_BENCHMARKS.get(match[2], '')}"
    if re.search(r"\bpytest\b", command) and document.name != "CONTRIBUTING.md":
        command += " --collect-only"
    return re.sub(r"^make ", "make -n ", command)


class Workshop:
    """A temporary copy of the checkout in which a document's commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy(file, folder)
        corpus = folder / "data" / "corpus.txt"
        self._text = corpus.read_text(encoding="utf-8")[:CORPUS_CHARACTERS]
        corpus.write_text(self._text, encoding="utf-8")
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "TINYLM_CACHE": str(folder / ".cache"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def make_texts(self, command: str) -> None:
        """Make the texts that a command names: substitution 1."""
        made = set(re.findall(r"(?:>|--out|-o) *(\S+)", command))
        for name in set(re.findall(r"(?<![\w/*-])[\w./-]+\.(?:txt|tsv)\b", command)) - made:
            path = self.folder / name
            if not path.exists() and not Path(name).is_absolute():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._pairs() if path.suffix == ".tsv" else self._text, encoding="utf-8")
        if "texts/" in command and not (self.folder / "texts").exists():
            (self.folder / "texts").mkdir()
            for name in ("one.txt", "two.txt"):
                (self.folder / "texts" / name).write_text(self._text, encoding="utf-8")

    def _pairs(self) -> str:
        words = [line.split()[:6] for line in self._text.splitlines() if len(line.split()) > 2]
        return "".join(f"{' '.join(line).lower()}\t{' '.join(reversed(line)).lower()}\n" for line in words[:200])

    def run(self, command: str | Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a shell command, or a program with its arguments. stdout includes stderr; exit code 124 at the LIMIT."""
        shell = ["bash", "-o", "pipefail", "-c", command] if isinstance(command, str) else command
        try:
            return subprocess.run(
                shell,
                cwd=self.folder,
                env=self._environment,
                input=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            return subprocess.CompletedProcess(shell, 124, output.decode() if isinstance(output, bytes) else output)


def steps_of(block: Block) -> Iterator[tuple[int, str, str | Sequence[str], str]]:
    """Yield the program of a python or diff block: the line, the text to show, the command and its standard input."""
    if block.language == "python":
        lines = block.text.splitlines(keepends=True)
        program = "".join(PYTHON_BUDGET.sub("steps=4" if "resume=" in line else "steps=2", line) for line in lines)
        yield block.line, block.text.splitlines()[0], (sys.executable, "-"), program
    elif block.language == "diff":
        yield block.line, "patch", ("patch", "-p1", "--forward"), block.text


def check(document: Path) -> tuple[Counter[str], list[str]]:
    """Run a document's commands.

    Returns the number of commands that were run, and that were not run for each reason; and the messages of failures.
    """
    counts: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory(prefix="tinylm-docs-") as folder:
        workshop = Workshop(Path(folder))

        def attempt(line: int, shown: str, command: str | Sequence[str], stdin: str = "") -> str:
            print(f"  {document.name}:{line}: {shown[:100]}", flush=True)
            workshop.make_texts(command if isinstance(command, str) else stdin)
            result = workshop.run(command, stdin)
            counts["run"] += 1
            if result.returncode:
                end = "\n".join(result.stdout.splitlines()[-15:])
                failures.append(f"{document.name}:{line}: exit {result.returncode}: {command}\n{end}")
            return result.stdout

        for block in blocks(document):
            for line, shown, program, stdin in steps_of(block):
                if block.skipped:
                    counts[f"not run: {block.skipped}"] += 1
                else:
                    attempt(line, shown, program, stdin)
            for command in commands(block):
                reason = command.skipped or ("make wheel-check installs" if INSTALLING.match(command.text) else None)
                if reason:
                    counts[f"not run: {reason}"] += 1
                    continue
                output = attempt(command.line, command.text, shortened(command.text, document))
                if command.text.startswith("make "):
                    for recipe in re.findall(r"^\S*/(tinylm .*)$", output, re.MULTILINE):
                        attempt(command.line, recipe, shortened(recipe, document))
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", type=Path, metavar="DOCUMENT", help="default: all of them")
    chosen = [path.resolve() for path in parser.parse_args().documents] or documents()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(check, chosen))
    counts = sum((counted for counted, _ in results), Counter[str]())
    failures = [failure for _, failed in results for failure in failed]
    print(json.dumps(counts, indent=1))
    print(*failures, sep="\n\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
