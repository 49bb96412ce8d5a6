"""A machine to plan for, which is not probed."""

from tinylm.config import RuntimeConfig
from tinylm.cost import Machine


def machine(device: str = "cpu", flops: float = 1e11, dtype: str = "fp32") -> Machine:
    return Machine(RuntimeConfig(device=device, dtype=dtype, compile=False, threads=1), "because", flops)
