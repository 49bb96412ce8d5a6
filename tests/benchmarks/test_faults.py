"""A few cases of each class of fault of benchmarks/faults.py, which tries thousands, and its parts."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.shell import ROOT, run_child

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="the attacks use signals and forks"),
]
FEW = {
    "kills": 2,
    "disks": 6,
    "flips": 4,
    "forgeries": 8,
    "foreign": 4,
    "options": 16,
    "combinations": 4,
    "interrupts": 2,
}


@pytest.mark.parametrize("name", FEW)
def test_a_few_cases_of_each_class_of_fault_are_survived(name: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/faults.py"), "--class", name, "--cases", str(FEW[name])]
    result = run_child([*command, "--limit", "60"], limit=280)
    assert result.returncode == 0, result.stdout + result.stderr
    cells = [cell.strip() for cell in result.stdout.splitlines()[-1].split("|")]
    assert cells[2:4] == [str(FEW[name])] * 2


def test_the_table_in_the_documents_has_a_row_for_each_class() -> None:
    faults = importlib.import_module("faults")
    rows = [line for line in (ROOT / "docs/reliability.md").read_text().splitlines() if line.startswith("| ")]
    commands = [match[1] for row in rows if (match := re.search(r"`python benchmarks/faults.py --class (\w+)", row))]
    assert commands == list(faults.CLASSES)


def test_options_that_take_a_number_get_extreme_ones() -> None:
    faults = importlib.import_module("faults")
    names = [(command, option.name) for command, option in faults.all_options()]
    alone = {(*names[index], value) for _, index, value in faults.plan_options(None, 0, 0) if value is not None}
    assert {("train", "lr", 1e308), ("train", "vocab_size", 1 << 63), ("sample", "top_k", -1)} <= alone
    assert not {("train", "steps", 1 << 31), ("train", "out", -1)} & alone


def ran(**how: object) -> list[str]:
    fault_process = importlib.import_module("fault_process")
    values = {"words": ("runs",), "code": 0, "stdout": "", "stderr": "", "seconds": 1.0, "hung": False}
    return fault_process.Ran(**{**values, **how}).defects()


@pytest.mark.parametrize(
    "how, defect",
    [
        ({"code": -signal.SIGSEGV}, "killed by SIGSEGV"),
        ({"code": -signal.SIGKILL, "hung": True}, "no end within 1 s"),
        ({"code": 120, "stderr": "x"}, "exit code 120: x"),
        ({"code": 1}, "exit code 1 without a message"),
        ({"code": 1, "stderr": "Traceback (most recent call last):\nKeyError: 1"}, "traceback: KeyError: 1"),
        ({"code": 1, "stderr": "Error: Internal error of tinylm (x)."}, "internal error"),
        ({"code": 0, "stderr": "thread '<unnamed>' panicked at src/lib.rs"}, "panic: panicked at"),
        ({"stdout": "canary-7f3a"}, "content of a file outside its folders was printed"),
    ],
)
def test_forbidden_outcomes_are_found(how: dict[str, object], defect: str) -> None:
    (found,) = ran(**how)
    assert found.startswith(defect)


def test_an_ordinary_error_and_an_allowed_traceback_are_no_defects() -> None:
    assert ran(code=2, stderr="Error: There is no run.") == []
    assert ran(code=1, stderr="Traceback (most recent call last):\nError: x", debug=True) == []


@pytest.mark.parametrize(
    "how, defect",
    [
        ({"code": 1, "stderr": "Error: evil is bad.\nError: again."}, "2 lines of error"),
        ({"code": 1, "stderr": "Error: evil is bad.\nmore"}, "1 lines of error, and 'more' at the end"),
        ({"code": 1, "stderr": "Error: It is bad."}, "the error does not name the model"),
        ({"code": 1, "stderr": f"Error: evil {'x' * 1000}"}, "an error of 1012 characters"),
        ({"code": 1, "stderr": "Error: Out of memory in evil."}, "3 MB of memory"),
        ({"stdout": "\x1b[2J"}, "control characters on the terminal: ['\\x1b']"),
        ({"words": ("eval", "--json"), "stdout": '{"loss": NaN}'}, "no JSON"),
        ({"code": 1, "stderr": "Error: Cannot read evil.gguf as GGUF: it is empty."}, None),
        ({"stdout": "a text\n"}, None),
    ],
)
def test_what_a_command_may_not_do_with_a_forged_model_is_found(
    how: dict[str, object], defect: str | None, tmp_path: Path
) -> None:
    fault_process, fault_foreign = (importlib.import_module(name) for name in ("fault_process", "fault_foreign"))
    values = {"words": ("info",), "code": 0, "stdout": "", "stderr": "", "seconds": 1.0, "hung": False}
    (tmp_path / "resident").write_text(str(3 << 20))
    ended = fault_process.Ran(**{**values, **how})
    found = fault_foreign.defects_of_message(ended, "evil", tmp_path / "resident", True)
    assert [text.partition(": ")[2].startswith(defect or "") for text in found] == ([] if defect is None else [True])


def test_a_gguf_file_that_is_taken_apart_and_put_together_is_the_same_model(tmp_path: Path) -> None:
    """So that a forgery has no fault but its own."""
    gguf_files = importlib.import_module("tests.formats.gguf_files")
    fault_foreign = importlib.import_module("fault_foreign")
    gguf_reader = importlib.import_module("tinylm.formats.gguf_reader")
    gguf_files.save_peer("llama 3", tmp_path / "model.gguf")
    (tmp_path / "again.gguf").write_bytes(fault_foreign.Raw(tmp_path / "model.gguf").to_bytes())
    one, other = (gguf_reader.read_gguf(tmp_path / name) for name in ("model.gguf", "again.gguf"))
    assert (one.config, one.tokenizer, one.special) == (other.config, other.tokenizer, other.special)
    assert all((one.tensors[name] == other.tensors[name]).all() for name in one.tensors)


def test_a_change_of_any_file_is_found(tmp_path: Path) -> None:
    fault_process = importlib.import_module("fault_process")
    for name in ("same", "content", "mode", "time", "gone"):
        (tmp_path / name).write_text("x")
    (tmp_path / "link").symlink_to("same")
    before = fault_process.snapshot(tmp_path)
    assert fault_process.changes(before, fault_process.snapshot(tmp_path)) == []
    (tmp_path / "content").write_text("y")
    (tmp_path / "mode").chmod(0o600)
    os.utime(tmp_path / "time", (1, 1))
    (tmp_path / "gone").unlink()
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("content")
    (tmp_path / "new").mkdir()
    found = fault_process.changes(before, fault_process.snapshot(tmp_path))
    assert found == ["content", "gone", "link", "mode", "new", "time"]


DISK = """
import sys
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import fault_disk
folder = Path({folder!r})
fault_disk.load(folder)
fault_disk.full_at(folder, 4, {lasting})()
for number in range(3):
    try:
        (folder / f"{{number}}.txt").write_text("x")  # a call that creates and one that writes
    except OSError as error:
        print(number, error.strerror)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is Linux's")
@pytest.mark.parametrize("lasting, failing", [(False, [1]), (True, [1, 2])])
def test_a_disk_is_full_at_the_write_that_was_chosen(lasting: bool, failing: list[int], tmp_path: Path) -> None:
    program = DISK.format(benchmarks=str(ROOT / "benchmarks"), folder=str(tmp_path), lasting=lasting)
    (tmp_path / "program.py").write_text(program)
    result = run_child([sys.executable, str(tmp_path / "program.py")])
    assert result.stdout == "".join(f"{number} No space left on device\n" for number in failing), result.stderr


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_command_and_its_children_are_killed_at_the_time_limit() -> None:
    fault_process = importlib.import_module("fault_process")

    def work() -> None:
        subprocess.run(["sleep", "100"], check=False, timeout=100)

    begun = time.monotonic()
    assert not fault_process.in_fork(work, limit=0.3)
    assert time.monotonic() - begun < 60
