"""Memory that malloc keeps or returns to the system."""

import subprocess
import sys
from pathlib import Path

import pytest

import tinylm
import tinylm.training.run
from tinylm.analysis import comparison
from tinylm.kernels import process
from tinylm.models import model as evaluated

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
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or not hasattr(process.ctypes.CDLL(None), "mallopt"),
    reason="needs Linux with glibc",
)
def test_freed_blocks_are_returned_or_kept_and_used_again_without_new_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    returned, kept = map(int, done.stdout.split())
    assert returned < 20e6
    assert kept < 1000  # pages; 40 MB have 10,000


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
