"""Peak rates of a device: those that its vendor specifies, and those that large operations reach."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tinylm.device import DTYPES


@dataclass(frozen=True)
class Peak:
    """A peak rate of a device in units per second.

    measured: of one large operation. specified: by the vendor; `None` if the table does not have it.
    """

    unit: str
    measured: float
    specified: float | None

    def header(self) -> list[str]:
        """Titles of the columns of `shares`."""
        rates = {"measured": self.measured, "specified": self.specified}
        return [
            f"of {'unknown' if r is None else f'{r / 1e12:,.3g} T{self.unit}/s'}, {name}" for name, r in rates.items()
        ]

    def shares(self, rate: float) -> list[str]:
        """The rate as percentages of both peak rates."""
        return [f"{rate / self.measured:.1%}", "-" if self.specified is None else f"{rate / self.specified:.1%}"]


class Rates(NamedTuple):
    """FLOP/s of matrix products in bf16 and fp16, and bytes per second of the memory."""

    flops: float
    bandwidth: float


# By the name that torch gives the device. H100 80GB HBM3 and H100 PCIe are from NVIDIA's data sheet of H100, which
# prints twice these FLOP/s, for sparse matrices. The other rows were not compared with a data sheet: check them before
# quoting shares.
SPECIFIED = {
    "NVIDIA A100-PCIE-40GB": Rates(312e12, 1.555e12),
    "NVIDIA A100-SXM4-40GB": Rates(312e12, 1.555e12),
    "NVIDIA A100 80GB PCIe": Rates(312e12, 1.935e12),
    "NVIDIA A100-SXM4-80GB": Rates(312e12, 2.039e12),
    "NVIDIA H100 PCIe": Rates(756e12, 2.0e12),
    "NVIDIA H100 NVL": Rates(835e12, 3.9e12),
    "NVIDIA H100 80GB HBM3": Rates(989e12, 3.35e12),  # SXM
    "NVIDIA H200": Rates(989e12, 4.8e12),  # SXM
}


def peak_flops(device: str, dtype: str, size: int, rounds: int) -> Peak:
    """The rate of a product of two square matrices with `size` rows. The specified rate is `None` for fp32."""
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    measured = 2 * size**3 / seconds_of(lambda: a @ b, device, rounds)
    specified = _specified(device) if dtype != "fp32" else None
    return Peak("FLOP", measured, specified and specified.flops)


def peak_bandwidth(device: str, size: int, rounds: int) -> Peak:
    """The bytes read and written per second by a copy of `size` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    measured = 2 * size / seconds_of(lambda: target.copy_(source), device, rounds)
    specified = _specified(device)
    return Peak("B", measured, specified and specified.bandwidth)


def _specified(device: str) -> Rates | None:
    return SPECIFIED.get(torch.cuda.get_device_name()) if device == "cuda" else None


def seconds_of(work: Callable[[], object], device: str, rounds: int) -> float:
    """The median time of `rounds` calls after two warm-up calls, each with the device synchronised."""

    def timed() -> float:
        started = time.perf_counter()
        work()
        if device != "cpu":
            getattr(torch, device).synchronize()
        return time.perf_counter() - started

    return statistics.median([timed() for _ in range(2 + rounds)][2:])
