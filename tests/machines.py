"""A machine for plans in tests, without measurements."""

import os
from pathlib import Path
from typing import Any

import pytest

from tinylm.machine.measure import COMPARED_DTYPES, Machine, layer_seconds_entry, matmul_rates_entry

MATMUL_RATE = 1e11  # FLOP/s
LAYER_SECONDS = 5e-5  # per token and layer
GIB = 1 << 30
AUTO_DTYPE = os.environ.get("TINYLM_TEST_DTYPE", "fp32")  # what `dtype="auto"` chooses on a CPU with bf16 instructions


def machine(device: str = "cpu", **properties: Any) -> Machine:
    """A machine with one thread, enough memory, no special kernels, and the given properties."""
    plain: dict[str, Any] = {"dtype": "fp32", "threads": 1, "matmul_rate": MATMUL_RATE, "layer_seconds": None}
    plain |= {"free_memory": 64 * GIB, "compiled_is_faster": True, "max_unfused_keys": 0, "reasons": "because"}
    return Machine(device=device, **{**plain, **properties})


def pretend_bf16(monkeypatch: pytest.MonkeyPatch, has_instructions: bool) -> None:
    """A processor with or without instructions for bf16."""
    monkeypatch.setattr("tinylm.kernels.cpu.computes_bf16", lambda: has_instructions)


def write_profile(cache: Path) -> None:
    """Records in a cache folder what a command would measure in a second: AUTO_DTYPE is the faster number format."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLM_CACHE", str(cache))
        rates = {"fp32": MATMUL_RATE, "bf16": MATMUL_RATE * (1.25 if AUTO_DTYPE == "bf16" else 1.0)}
        for dtypes in (COMPARED_DTYPES, ("fp32",), ("bf16",)):
            matmul_rates_entry("cpu", dtypes).write({dtype: rates[dtype] for dtype in dtypes})
        for dtype in COMPARED_DTYPES:
            layer_seconds_entry("cpu", dtype).write({dtype: LAYER_SECONDS})
