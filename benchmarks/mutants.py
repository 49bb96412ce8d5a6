"""Mutation testing: insert faults at random places of tinylm, and record which test detects each of them.

    python benchmarks/mutants.py --cases 60 --seed 0 --out mutants.json
    python benchmarks/mutants.py --replay mutants.json --tests "-m ''"     # the same faults, slow tests as well

Each fault is inserted into a temporary copy of the tree, never into the checkout. A file is drawn with a probability
proportional to its number of statements, then one of its lines, then one of the mutants that the operators of
`mutation_operators.py` make of the line. The tests that execute the line run first, starting with those in the file's
own test file. Tests of the command line run tinylm in processes that are not traced, so the other tests of the file's
folder and those of tests/commands follow. The first failure ends a case. Which test executes which line is recorded
once per tree, by running all of --tests under coverage, and stored in --cache.

Prints a table. --out writes the cases for --replay, which locates each fault in the current tree and skips faults whose
lines have changed. A survivor shows a missing test, or an equivalent mutant: a change that no test can detect, such as
a larger buffer. Needs coverage (the extra [bench]) and Linux or macOS. Run it with a low priority: nice -n 10.
"""

import argparse
import ast
import hashlib
import json
import os
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mutation_operators import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "dist", "*.egg-info", "shared")
SURVIVED, UNDECIDED, NOT_FOUND = "SURVIVED", "undecided: time limit", "not found in this tree"


@dataclass(frozen=True)
class Verdict:
    """The result of the tests of one mutant."""

    mutant: Mutant
    killed_by: str  # the first test that failed, or SURVIVED, UNDECIDED, NOT_FOUND
    seconds: float

    def cells(self) -> list[str]:
        """The cells of the table."""
        place = f"{self.mutant.path}:{self.mutant.line}"
        fault = self.mutant.difference().replace("|", "\\|")
        return [place, self.mutant.operator, fault, self.killed_by.replace("|", "\\|"), f"{self.seconds:.0f}"]


@dataclass(frozen=True)
class Suite:
    """The tests of a tree, and for each file and line of the package the tests that execute it."""

    tests: list[str]
    executing: dict[str, dict[str, list[int]]]  # by path and line, the numbers of the tests

    def first(self, mutant: Mutant) -> list[str]:
        """The tests that execute the statement; for code that runs at import, those that execute any of the file."""
        lines = self.executing.get(mutant.path, {})
        last = mutant.line + mutant.before.count("\n")
        wanted = map(str, range(mutant.statement, last + 1)) if mutant.in_function else lines
        executing = set().union(*(lines.get(line, ()) for line in wanted))
        tests = [self.tests[number] for number in sorted(executing)]
        return sorted(tests, key=lambda test: -_nearness(test, mutant.path))

    def rest(self, mutant: Mutant) -> list[str]:
        """The other tests of the same folder, and the tests of commands."""
        first = set(self.first(mutant))
        near = (test for test in self.tests if _nearness(test, mutant.path) or test.startswith("tests/commands/"))
        return [test for test in near if test not in first]


def _nearness(test: str, path: str) -> int:
    """2 for the file of tests for this source file, 1 for the same folder, 0 for others."""
    file, source = Path(test.split("::")[0]), Path(path)
    if file.parent.parts[1:] != source.parent.parts[1:]:
        return 0
    return 2 if file.name == f"test_{source.name}" else 1


def draw(root: Path, cases: int, seed: int, under: Sequence[str]) -> list[Mutant]:
    """Draw different mutants: a file weighted by its statements, one of its lines with mutants, one of its mutants."""
    rng = random.Random(seed)
    files: list[list[list[Mutant]]] = []
    weights: list[int] = []
    folders = [root / name for name in under]
    for path in sorted(path for place in folders for path in (place.rglob("*.py") if place.is_dir() else [place])):
        source = path.read_bytes()
        by_line: dict[int, list[Mutant]] = {}
        for mutant in mutants_of(path.relative_to(root).as_posix(), source):
            by_line.setdefault(mutant.line, []).append(mutant)
        if by_line:
            files.append(list(by_line.values()))
            weights.append(sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(source))))
    drawn: dict[Mutant, None] = {}
    for _ in range(100 * cases):
        drawn[rng.choice(rng.choice(rng.choices(files, weights)[0]))] = None
        if len(drawn) == cases:
            return list(drawn)
    raise SystemExit(f"There are fewer than {cases} mutants under {', '.join(under)}.")


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """Make a temporary copy of the tree, with a folder beside it for the temporary files of its tests."""
    with tempfile.TemporaryDirectory(prefix="tinylm-mutants-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        (copy.parent / "tmp").mkdir()
        yield copy


def run_python(copy: Path, arguments: Sequence[str], limit: float) -> tuple[int, str] | None:
    """The exit status and output of Python in the copy; None if it took longer than `limit` seconds."""
    temporary = str(copy.parent / "tmp")
    environment = {**os.environ, "PYTHONPATH": str(copy), "TMPDIR": temporary, "XDG_CACHE_HOME": temporary}
    with (copy.parent / "output.txt").open("w+", errors="replace") as output:
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=copy,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as child:
            try:
                child.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGINT)  # so that tests end the processes that they started
                with suppress(subprocess.TimeoutExpired):
                    child.wait(20)
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                return None
        output.seek(0)
        return child.returncode, output.read()


def run_tests(copy: Path, tests: Iterable[str], limit: float) -> str | None:
    """The first test that fails, or UNDECIDED at the time limit; None if all pass. Without the name of a test, pytest's
    exit status. pytest's own limit ends a test that hangs.
    """
    listed = copy.parent / "tests.txt"
    for is_last, names in enumerate((list(tests), sorted({test.split("[")[0] for test in tests}))):
        if not names:
            return None
        listed.write_text("\n".join(names))
        arguments = ["-m", "pytest", "-x", "-q", "-m", "", "--tb=no", "-rfE", "-p", "no:cacheprovider", f"@{listed}"]
        result = run_python(copy, arguments, limit)
        if result is None:
            return UNDECIDED
        status, output = result
        if status in (0, 5):
            return None
        # 4: pytest finds no test of this name, if the fault changes ids of parameters or prevents the collection
        if status != 4 or is_last:
            failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.MULTILINE)
            return failed[1] if failed else f"pytest's exit status {status}"
    return None


def attempt(copy: Path, suite: Suite, mutant: Mutant, limit: float) -> Verdict:
    """Insert the mutant into the copy, run its tests, and restore the file."""
    file, started = copy / mutant.path, time.monotonic()
    source, times = file.read_bytes(), file.stat()
    faulty = mutant.apply(source)
    if faulty is None:
        return Verdict(mutant, NOT_FOUND, 0.0)
    try:
        file.write_bytes(faulty)
        # Python reuses bytecode if the size of a file and the whole second of its modification are the same.
        os.utime(file, (times.st_atime, times.st_mtime + 2 + mutant.start))
        killed_by = None
        for tests in (suite.first(mutant), suite.rest(mutant)):
            killed_by = killed_by or run_tests(copy, tests, max(0.0, limit - (time.monotonic() - started)))
    finally:
        file.write_bytes(source)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return Verdict(mutant, killed_by or SURVIVED, time.monotonic() - started)


def load_suite(copy: Path, selection: str, package: str, cache: Path) -> Suite:
    """Read the suite of the tree from the cache, or record it by running all tests under coverage."""
    digest = hashlib.sha256(selection.encode())
    for path in sorted(path for folder in (package, "tests") for path in (copy / folder).rglob("*.py")):
        digest.update(path.relative_to(copy).as_posix().encode() + b"\0" + path.read_bytes())
    file = cache / f"{digest.hexdigest()[:16]}.json"
    if not file.exists():
        print(f"Recording which tests execute which lines (kept in {file}) ...", file=sys.stderr)
        file.parent.mkdir(parents=True, exist_ok=True)
        arguments = [str(Path(__file__).resolve()), "--record", str(file), "--package", package, f"--tests={selection}"]
        status, output = run_python(copy, arguments, limit=4 * 3600) or (1, "It took longer than four hours.")
        if not file.exists():
            raise SystemExit(f"{output[-2000:]}\nCannot record the tests (exit status {status}).")
        print(output.strip().splitlines()[-1], file=sys.stderr)
    return Suite(**json.loads(file.read_text()))


def record(file: Path, package: str, selection: str) -> None:
    """Run the tests of the current folder under coverage, and write the tests that pass and the lines they execute."""
    import coverage
    import pytest

    measured = coverage.Coverage(data_file=None, source=[package], config_file=False)
    passed: dict[str, int] = {}

    class Contexts:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            measured.switch_context(nodeid)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" and report.passed:
                passed[report.nodeid] = len(passed)

    measured.start()
    pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", *shlex.split(selection)], plugins=[Contexts()])
    measured.stop()
    data, executing = measured.get_data(), {}
    for path in data.measured_files():
        lines = {
            line: [passed[test] for test in tests if test in passed]
            for line, tests in data.contexts_by_lineno(path).items()
        }
        executing[Path(path).relative_to(Path.cwd()).as_posix()] = lines
    file.write_text(json.dumps({"tests": list(passed), "executing": executing}))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60, help="number of faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", nargs="+", help="folders or files that receive faults (default: the package)")
    parser.add_argument("--replay", type=Path, help="file written by --out: repeat its faults")
    parser.add_argument("--only", type=int, help="only the fault with this number")
    parser.add_argument("--tests", default="", help="pytest's arguments that select the suite (default: none)")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each fault (default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=1, help="faults tried in parallel, each in its own copy of the tree"
    )
    parser.add_argument("--out", type=Path, help="write the cases and verdicts to this file")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "tinylm-mutants")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)  # another project, for the test
    parser.add_argument("--package", default="tinylm", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)  # the step that runs in the copy
    options = parser.parse_args(arguments)
    if options.record:
        record(options.record, options.package, options.tests)
        return
    from measure import table  # imports tinylm, which `record` has to import under coverage

    if options.replay:
        mutants = [Mutant(**case["mutant"]) for case in json.loads(options.replay.read_text())]
    else:
        mutants = draw(options.root, options.cases, options.seed, options.under or [options.package])
    numbered = [(number, mutant) for number, mutant in enumerate(mutants, 1) if options.only in (None, number)]
    verdicts = judge(numbered, options)
    if options.out:
        options.out.write_text(json.dumps([asdict(verdict) for verdict in verdicts.values()], indent=1))
    rows = [[str(number), *verdict.cells()] for number, verdict in sorted(verdicts.items())]
    print(table(["", "place", "operator", "fault", "detected by", "seconds"], rows))
    counts = Counter(verdict.killed_by for verdict in verdicts.values())
    others = {outcome: counts[outcome] for outcome in (SURVIVED, UNDECIDED, NOT_FOUND) if counts[outcome]}
    detected = len(verdicts) - sum(others.values())
    print(
        f"\n{detected} of {len(verdicts)} faults were detected.", *(f"{n} {outcome}." for outcome, n in others.items())
    )


def judge(numbered: Sequence[tuple[int, Mutant]], options: argparse.Namespace) -> dict[int, Verdict]:
    """The verdicts by the numbers of the mutants. Prints each verdict to stderr when its tests end."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def one(case: tuple[int, Mutant]) -> tuple[int, Verdict]:
        copy = copies.get()
        try:
            verdict = attempt(copy, suite, case[1], options.limit)
        finally:
            copies.put(copy)
        place, _, fault, killed_by, _ = verdict.cells()
        print(f"{case[0]}. {place} {fault}: {killed_by}", file=sys.stderr)
        return case[0], verdict

    with ExitStack() as stack:
        trees = [stack.enter_context(copy_of(options.root)) for _ in range(options.workers)]
        suite = load_suite(trees[0], options.tests, options.package, options.cache)
        for tree in trees:
            copies.put(tree)
        with ThreadPoolExecutor(options.workers) as pool:
            return dict(pool.map(one, numbered))


if __name__ == "__main__":
    main()
