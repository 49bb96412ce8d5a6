"""Build a wheel of the checkout, install it into clean environments, and use it.

    python tests/check_wheel.py        (make wheel-check)
    python tests/check_wheel.py none        (make wheel-smoke: without any extra)
    python tests/check_wheel.py --torch 2.9.0 translate        (another version of torch, and only some extras)

One environment has the wheel and its dependencies, in the versions of constraints.txt. For each extra there is another
one that adds what the extra needs; it reaches the first through a .pth file, so that torch is installed once. In each,
a process outside of the checkout trains a few steps, samples, does both from Python, and uses what the extra is for.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1200  # seconds for one command; installing torch takes most of it
TINY = ("--steps", "3", "--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--batch-size", "2")

TRANSLATE = """
ok("train", "pairs.tsv", "--architecture", "encoder-decoder", "--vocab-size", "300", "--out", "pairs", *TINY)
"""
# What each environment must be able to do besides training and sampling; `ok` and `fails` run tinylm.
USES = {
    "none": """
assert ok("sample", "--model", "run", "--max-tokens", "5", "--engine", "llama.cpp")
ok("export", "run", "--to", "gguf", "--out", "run.gguf")
ok("report", "run", "--out", "report.html")
assert "uPlot" in Path("report.html").read_text()
fails("train", "corpus.txt.zst", "--out", "zst", *TINY, message="zstandard")
for name, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
    fails("train", "corpus.txt", "--out", "log", "--log-to", name, *TINY, message=f"pip install {package}")
fails("train", "corpus.parquet", "--out", "parquet", *TINY, message="pyarrow")
"""
    + TRANSLATE
    + 'assert "BLEU" not in ok("eval", "pairs.tsv", "--model", "pairs")',
    "translate": TRANSLATE + 'assert "BLEU" in ok("eval", "pairs.tsv", "--model", "pairs")',
    "zstd": """
import zstandard
Path("corpus.txt.zst").write_bytes(zstandard.compress(Path("corpus.txt").read_bytes()))
ok("train", "corpus.txt.zst", "--out", "zst", *TINY)
""",
    "parquet": """
import pyarrow, pyarrow.parquet
texts = Path("corpus.txt").read_text().splitlines()
pyarrow.parquet.write_table(pyarrow.table({"text": texts}), "corpus.parquet")
ok("train", "corpus.parquet", "--out", "parquet", *TINY)
""",
    "notebook": """
import ipywidgets, matplotlib, tinylm
matplotlib.use("agg")
result = tinylm.train("corpus.txt", "plotted", size="nano", steps=2)
assert result.plot().get_ylabel().startswith("loss")
""",
    "tensorboard": """
ok("train", "corpus.txt", "--out", "tb", "--log-to", "tensorboard=logs", *TINY)
(events,) = Path("logs/tb").iterdir()
assert b"val_loss" in events.read_bytes()
""",
    "wandb": """
os.environ["WANDB_MODE"] = "offline"
ok("train", "corpus.txt", "--out", "wb", "--log-to", "wandb", *TINY)
(file,) = Path("wandb").glob("offline-run-*/*.wandb")
assert b"val_loss" in file.read_bytes()
""",
    "test": "import hypothesis, peft, playwright, pyarrow, pytest, sacrebleu, tensorboard, transformers, zstandard",
    "lint": "subprocess.run([sys.executable, '-m', 'ruff', '--version'], check=True, timeout=60)\nimport mypy",
    "bench": "import peft, transformers",
}
SMOKE_TEST = """
import importlib.metadata, os, subprocess, sys
from pathlib import Path

TINY = {tiny!r}
PROGRAM = Path(sys.executable).parent / "tinylm"

def run(*arguments):
    command = [str(PROGRAM)] if PROGRAM.exists() else [sys.executable, "-m", "tinylm"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)

def ok(*arguments):
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout

def fails(*arguments, message):
    result = run(*arguments)
    assert result.returncode == 2 and message in result.stderr, result.stderr

import tinylm
assert not Path(tinylm.__file__).is_relative_to({root!r}), tinylm.__file__
assert (Path(tinylm.__file__).parent / "py.typed").exists()
assert ok("--version").split() == ["tinylm", importlib.metadata.version("tinylm")]
ok("train", "corpus.txt", "--out", "run", *TINY)
result = tinylm.train(["corpus.txt"], out="api", steps=3, size="nano", context=16, batch_size=2)
assert result.step == 3 and isinstance(tinylm.load(result.run).generate("the", max_tokens=3), str)
assert ok("sample", "--model", "run", "--prompt", "the", "--max-tokens", "5", "--seed", "1").startswith("the")
{use}
"""


def call(*command: str | Path, folder: Path) -> str:
    """Run a command to its end; on failure its output ends this program."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TINYLM_CACHE"] = str(folder / "cache")
    result = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))[:300]}\n{result.stdout}")
    return result.stdout


class Environment:
    """A virtual environment. `base` is another one whose packages it can import; `constraints` is a file for pip."""

    def __init__(self, folder: Path, constraints: Path, base: "Environment | None" = None) -> None:
        venv.create(folder, with_pip=base is None, symlinks=os.name != "nt")
        self.folder = folder
        self.constraints = constraints
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        found = call(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder)
        self.packages = Path(found.strip())
        self.pip: Sequence[str | Path] = (self.python, "-m", "pip")
        if base is not None:
            (self.packages / "base.pth").write_text(f"{base.packages}\n")
            self.pip = (self.python, base.packages / "pip")

    def install(self, *packages: str) -> None:
        """With the versions of `constraints`; pip's cache makes this fast after the first time."""
        options = ("install", "--quiet", "--disable-pip-version-check", "--constraint", str(self.constraints))
        call(*self.pip, *options, *packages, folder=self.folder)


def smoke_test(environment: Environment, use: str, folder: Path) -> None:
    """Use the installed package in a folder of its own."""
    folder.mkdir()
    lines = [f"the cat number {n} sat on the mat\n" for n in range(200)]
    (folder / "corpus.txt").write_text("".join(lines))
    (folder / "corpus.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    (folder / "corpus.parquet").write_bytes(b"PAR1")
    (folder / "pairs.tsv").write_text("".join(f"the cat {n}\tdie katze {n}\n" for n in range(200)))
    program = SMOKE_TEST.format(tiny=TINY, root=str(ROOT), use=use)
    call(environment.python, "-c", program, folder=folder)


def write_constraints(file: Path, torch: str | None) -> None:
    """Write constraints.txt, with another version of torch if one is given."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if torch is not None:
        lines = [*(line for line in lines if not line.startswith("torch==")), f"torch=={torch}"]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = "extras to check, or none (default: all)"
    parser.add_argument("extras", nargs="*", help=whole)
    parser.add_argument("--torch", metavar="VERSION", help="the version of torch (default: that of constraints.txt)")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = sorted(project["optional-dependencies"])
    if unknown := {*extras} ^ {*USES} - {"none"}:
        sys.exit(f"USES does not say what these extras are for: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="tinylm-wheel-") as temporary:
        work = Path(temporary)
        source = work / "source"  # of its own: setuptools would pack what an earlier build left in the checkout
        shutil.copytree(ROOT / "tinylm", source / "tinylm", ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / file, source)
        call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", work, source, folder=work)
        (wheel,) = work.glob("*.whl")
        write_constraints(work / "constraints.txt", options.torch)
        base = Environment(work / "none", work / "constraints.txt")
        base.install(str(wheel))
        smoke_test(base, USES["none"], work / "none" / "work")
        print("no extra: ok", flush=True)

        def check(extra: str) -> None:
            environment = Environment(work / extra, work / "constraints.txt", base)
            environment.install(f"{wheel}[{extra}]")
            smoke_test(environment, USES[extra], work / extra / "work")
            print(f"extra {extra}: ok", flush=True)

        chosen = options.extras or extras
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # `list` raises the first error; environments that are being checked end first.
            list(pool.map(check, [extra for extra in chosen if extra != "none"]))


if __name__ == "__main__":
    main()
