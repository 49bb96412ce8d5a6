"""A machine to plan for, which is not measured."""

from pathlib import Path

import pytest

from tinylm.config import RuntimeConfig
from tinylm.cost import COMPARED, Machine, products_entry
from tinylm.inference.threads import pace_entry
from tinylm.spinning import wake_up_entry

FLOPS = 1e11


def machine(device: str = "cpu", flops: float = FLOPS, dtype: str = "fp32") -> Machine:
    return Machine(RuntimeConfig(device=device, dtype=dtype, compile=False, threads=1), "because", flops)


def write_profile(cache: Path) -> None:
    """Record in a cache folder what a command would measure for a second: bf16 is no faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLM_CACHE", str(cache))
        for dtypes in (COMPARED, ("fp32",), ("bf16",)):
            products_entry("cpu", dtypes).write(dict.fromkeys(dtypes, FLOPS))
        pace_entry().write({"waking": 0.0, "reading": 1e10})
        wake_up_entry().write({"seconds": 1e-6})
        patch.setenv("GOMP_SPINCOUNT", "0")  # as a process of its own has, after that
        pace_entry().write({"waking": 0.0, "reading": 1e10})
