"""A machine for plans in tests, without measurements."""

from pathlib import Path
from typing import Any

import pytest

from tinylm.kernels.process import wake_up_entry
from tinylm.machine.measure import COMPARED_DTYPES, Machine, layer_seconds_entry, matmul_rates_entry

MATMUL_RATE = 1e11  # FLOP/s
LAYER_SECONDS = 5e-5  # per token and layer
GIB = 1 << 30


def machine(device: str = "cpu", **properties: Any) -> Machine:
    """A machine with one thread, enough memory, no special kernels, and the given properties."""
    plain: dict[str, Any] = {"dtype": "fp32", "threads": 1, "matmul_rate": MATMUL_RATE, "layer_seconds": None}
    plain |= {"free_memory": 64 * GIB, "compiled_is_faster": True, "max_unfused_keys": 0, "reasons": "because"}
    return Machine(device=device, **{**plain, **properties})


def write_profile(cache: Path) -> None:
    """Records in a cache folder what a command would measure in a second: bf16 is not faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLM_CACHE", str(cache))
        for dtypes in (COMPARED_DTYPES, ("fp32",), ("bf16",)):
            matmul_rates_entry("cpu", dtypes).write(dict.fromkeys(dtypes, MATMUL_RATE))
        for dtype in COMPARED_DTYPES:
            layer_seconds_entry("cpu", dtype).write({dtype: LAYER_SECONDS})
        wake_up_entry().write({"seconds": 1e-6})
