"""Memory that is returned to the system."""

import subprocess
import sys
from pathlib import Path

import pytest

from tinylm.kernels import allocator

PROGRAM = """
import sys
import torch
from tinylm.kernels.allocator import return_large_blocks

def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

assert return_large_blocks()
torch.zeros(7 << 20)  # freed: glibc would keep smaller blocks from now on
before = resident()
blocks = [torch.ones(1 << 20) for _ in range(40)]
last = torch.ones(1 << 20)  # at the end of the heap, if the blocks are there
assert resident() > before + 100e6
del blocks
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_freed_blocks_are_returned() -> None:
    if not allocator.return_large_blocks():
        pytest.skip("the C library has no mallopt")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) < 20e6


def test_a_c_library_without_the_setting_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert not allocator.return_large_blocks()
