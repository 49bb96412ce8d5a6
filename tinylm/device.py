"""Which device, which number format, and whether to compile; each choice with its reason."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tinylm.errors import UsageError
from tinylm.machine import identify_processor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_BF16_GAIN = 1.2  # in products, which pays for the conversions around them


@dataclass(frozen=True)
class Choice:
    """What was chosen, and the words that say why."""

    value: str
    reason: str


def choose_device(wanted: str) -> Choice:
    """`auto` is CUDA, then MPS, then the CPU. Raises UsageError when the wanted device is not there."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if wanted == "auto":
        value = next(device for device, there in available.items() if there)
        return Choice(value, "no GPU was found" if value == "cpu" else "the fastest device found")
    if wanted not in available:
        raise UsageError(f"--device is {wanted!r}; it must be one of: auto, {', '.join(available)}.")
    if not available[wanted]:
        others = ", ".join(device for device, there in available.items() if there)
        raise UsageError(f"--device {wanted} is not available to torch {torch.__version__} here; use one of: {others}.")
    return Choice(wanted, "asked for")


def choose_training_dtype(wanted: str, device: str, product_speed: Callable[[str], float]) -> Choice:
    """bf16 where the device computes in it, else fp32. fp16 only when asked for, and never on a CPU.

    `product_speed` returns the recorded rate of matrix products in a format. It decides where the capabilities of a
    CPU do not: without AMX, some compute in bf16 at half the speed of fp32 (decision 015).

    Raises UsageError for an unknown format and for fp16 on a CPU.
    """
    if wanted == "auto":
        if not computes_bf16(device):
            return Choice("fp32", "the device has no fast bf16")
        if must_compare_bf16(device) and product_speed("bf16") < LEAST_BF16_GAIN * product_speed("fp32"):
            return Choice("fp32", "the device's bf16 is no faster")
        return Choice("bf16", "the device computes in it")
    _known_dtype(wanted)
    if wanted == "fp16" and device == "cpu":
        raise UsageError("--dtype fp16 needs a GPU; on a CPU use bf16 or fp32.")
    return Choice(wanted, "asked for")


def choose_inference_dtype(wanted: str, device: str) -> Choice:
    """fp32 on a CPU, where answers matter more than time; bf16 on CUDA where the device computes in it."""
    if wanted == "auto":
        if device == "cuda" and computes_bf16(device):
            return Choice("bf16", "the device computes in it")
        return Choice("fp32", "exact")
    _known_dtype(wanted)
    return Choice(wanted, "asked for")


def _known_dtype(wanted: str) -> None:
    if wanted not in DTYPES:
        raise UsageError(f"--dtype is {wanted!r}; it must be one of: auto, {', '.join(DTYPES)}.")


def computes_bf16(device: str) -> bool:
    """Whether the hardware multiplies in bf16, rather than converting to fp32 and back."""
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    if device == "cpu" and platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False


def must_compare_bf16(device: str) -> bool:
    """Whether the device multiplies in bf16, and its capabilities do not tell whether that is faster than fp32."""
    return device == "cpu" and computes_bf16(device) and not torch.cpu._is_amx_tile_supported()


def identify_device(device: str) -> dict[str, Any]:
    """What the speed of torch on a device depends on, as JSON: processor, device, libraries and threads."""
    capabilities = json.dumps(getattr(torch.cpu, "get_capabilities", dict)(), sort_keys=True, default=str)
    return {
        **identify_processor(),
        "capabilities": _digest(capabilities),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "libraries": _digest(torch.__config__.show()),  # MKL, oneDNN and the instructions that torch uses
        "threads": torch.get_num_threads(),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def autocast(device: str, dtype: str) -> AbstractContextManager[object]:
    """The context in which a forward pass computes in `dtype` with fp32 weights."""
    return nullcontext() if dtype == "fp32" else torch.autocast(device, dtype=DTYPES[dtype])


def can_compile(device: str) -> bool:
    """torch.compile needs a C++ compiler for a CPU, and Triton for CUDA."""
    if device == "cpu":
        return shutil.which(os.environ.get("CXX", "c++")) is not None or shutil.which("g++") is not None
    return device == "cuda"


def describe_device(device: str) -> str:
    if device == "cuda":
        return f"cuda ({torch.cuda.get_device_name()})"
    if device == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return device


def empty_cache(device: torch.device) -> None:
    """Give back the memory that torch keeps for later tensors; on a CPU it keeps none."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def free_memory(device: str) -> int | None:
    """Bytes that could still be taken without swapping; `None` where the system does not say."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    limits = [limit for limit in (_meminfo_available(), _cgroup_room(), _physical_memory()) if limit is not None]
    return min(limits, default=None)


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_room() -> int | None:
    try:
        limit, used, stat = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current", "stat"))
    except OSError:
        return None
    # Pages of files that nobody reads any more are counted as used, and given up when someone needs the room.
    idle = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
    return None if limit.strip() == "max" else max(0, int(limit) - int(used) + idle)
