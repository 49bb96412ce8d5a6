"""What is set for the whole process: OpenMP, the garbage collector, and memory that malloc keeps or returns."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tinylm
import tinylm.training.run
from tinylm.__main__ import TORCH_COMMANDS, main
from tinylm.analysis import comparison
from tinylm.kernels import process
from tinylm.kernels.process import FOLDERS
from tinylm.models import model as evaluated


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The functions that are called at exit. The variables that `main` sets are unset, and restored afterwards, as are
    the arguments of the process and the thresholds of the garbage collector.
    """
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", *FOLDERS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    registered: list[object] = []
    monkeypatch.setattr("atexit.register", registered.append)
    arguments, thresholds = sys.argv[:], gc.get_threshold()
    yield registered
    sys.argv[:] = arguments
    gc.set_threshold(*thresholds)


def start(*arguments: str) -> None:
    sys.argv[:] = ["tinylm", *arguments]
    with pytest.raises(SystemExit):
        main()


def test_a_command_that_computes_sets_spin_count_and_compiler_folders_and_collects_garbage_less_often(
    at_exit: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset spin count makes threads wait actively, which is slow beside other programs."""
    assert {"train", "sample", "chat", "eval", "compare", "report", "doctor"} <= {*TORCH_COMMANDS}
    for number, command in enumerate(TORCH_COMMANDS, start=1):
        gc.set_threshold(700)
        for variable in ("GOMP_SPINCOUNT", *FOLDERS):
            monkeypatch.delenv(variable, raising=False)
        start(command, "--no-such-option")
        assert os.environ["GOMP_SPINCOUNT"] == "10000", command
        assert FOLDERS.keys() <= os.environ.keys(), command
        assert gc.get_threshold()[0] == 10_000 and at_exit == [gc.freeze] * number, command
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "5")):  # set by the user
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        monkeypatch.setenv(name, value)
        start("train", "--no-such-option")
        assert os.environ[name] == value
        assert os.environ.get("GOMP_SPINCOUNT", "5") == "5"


def test_a_command_that_computes_nothing_changes_no_setting(
    at_exit: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLM_CACHE", "/nowhere/at/all")
    before = dict(os.environ), torch.get_num_threads(), gc.get_threshold()
    commands = ("", "--help", "--version", "train --help", "nonsense", "runs", "info x", "import x y", "export x")
    for arguments in commands:
        start(*arguments.split())
        assert (dict(os.environ), torch.get_num_threads(), gc.get_threshold()) == before, arguments
        assert not at_exit
    assert not Path("/nowhere").exists()


needs_glibc = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists() or not hasattr(process.ctypes.CDLL(None), "mallopt"),
    reason="mallopt, and memory by the files of /proc: needs Linux with glibc",
)
HUGE_PAGES = """
import torch
from tinylm.kernels.process import keep_freed_blocks

def sizes():
    fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return [int(fields[name].split()[0]) << 10 for name in ("Rss", "AnonHugePages")]

before = sizes()
assert keep_freed_blocks()
middle = sizes()
blocks = [torch.ones(4 << 20) for _ in range(10)]  # 160 MB
after = sizes()
print(middle[0] - before[0], after[0] - middle[0], after[1] - middle[1])
"""


@needs_glibc
@pytest.mark.parametrize("limit", ["", "ulimit -v 20000000; "])
def test_the_heap_is_in_huge_pages_where_the_system_has_them_and_takes_memory_only_where_it_is_used(limit: str) -> None:
    """Not under a limit of the address space, of which the heap would take a part."""
    command = f'{limit}exec "$0" -c "$1"'
    run = ["sh", "-c", command, sys.executable, HUGE_PAGES]
    reserved, used, huge = map(int, subprocess.run(run, capture_output=True, text=True, check=True).stdout.split())
    assert reserved < 8e6 and 150e6 < used < 180e6
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if modes.exists() and "[madvise]" in modes.read_text():
        assert huge > 150e6 if not limit else huge == 0


PROGRAM = """
import resource
import torch
from tinylm.kernels.process import keep_freed_blocks, return_large_blocks

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

assert keep_freed_blocks() and return_large_blocks()
torch.zeros(7 << 20)  # freed: glibc would keep smaller blocks from now on
before = resident()
blocks = [torch.ones(1 << 20) for _ in range(40)]
last = torch.ones(1 << 20)  # at the end of the heap, if the blocks are there
assert resident() > before + 100e6
del blocks
print(resident() - before)

assert keep_freed_blocks()
for step in range(30):
    if step == 20:
        before = faults()
    torch.ones(10 << 20)  # 40 MB
print(faults() - before)
"""


@pytest.mark.slow
@needs_glibc
def test_freed_blocks_are_returned_or_kept_and_used_again_without_new_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    returned, kept = map(int, done.stdout.split())
    assert returned < 20e6
    assert kept < 1000  # pages; 40 MB have 10,000


def test_a_glibc_that_refuses_large_thresholds_maps_no_block_until_large_blocks_are_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parameters' numbers are those of malloc.h."""
    settings: dict[int, int] = {}

    def mallopt(parameter: int, value: int) -> int:
        if parameter == -3 and value > 32 << 20:
            return 0
        settings[parameter] = value
        return 1

    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr(process, "_has_huge_pages", lambda: False)
    assert process.keep_freed_blocks() and settings == {-4: 0, -1: -1}
    assert process.return_large_blocks() and settings == {-3: 1 << 20, -4: 65_536, -1: 2 << 20}


def test_a_c_library_without_the_settings_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: object())
    assert not process.keep_freed_blocks()
    assert not process.return_large_blocks()


def test_training_evaluation_and_comparison_keep_freed_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module in (tinylm.training.run, evaluated, comparison):
        monkeypatch.setattr(module, "keep_freed_blocks", lambda name=module.__name__: calls.append(name))
    (tmp_path / "text").write_text("It was cold by the sea, and the old man said so. " * 100)
    settings = {"layers": 1, "heads": 1, "width": 16, "context": 16, "device": "cpu"}
    tinylm.train(tmp_path / "text", tmp_path / "run", steps=1, **settings)
    assert calls == ["tinylm.training.run"]
    model = tinylm.load(tmp_path / "run", device="cpu")
    model.evaluate(text="It was cold.")
    comparison.compare_models(model, model)
    assert calls[1:] == ["tinylm.models.model", "tinylm.analysis.comparison"]
