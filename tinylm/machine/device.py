"""Choice of device and number format, each with its reason, and the properties of a device."""

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tinylm.config.validation import check_choice
from tinylm.errors import UsageError
from tinylm.kernels import cpu
from tinylm.reporter import counted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIN_BF16_SPEEDUP = 1.2  # of matrix products; a smaller one does not outweigh the conversions (decision 015)


@dataclass(frozen=True)
class Choice:
    """A value and the reason for it."""

    value: str
    reason: str


def available_devices() -> tuple[str, ...]:
    """The devices of this machine that torch can use, the fastest first."""
    gpus = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return (*(device for device, is_available in gpus.items() if is_available), "cpu")


def choose_device(wanted: str, available: Sequence[str] | None = None) -> Choice:
    """The device: cuda, mps or cpu. `auto` is the first of the available ones, by default `available_devices`.

    Raises UsageError for an unknown or unavailable device.
    """
    available = available_devices() if available is None else available
    if wanted == "auto":
        value = available[0]
        return Choice(value, "no GPU was found" if value == "cpu" else "the fastest device found")
    check_choice("device", wanted, ("auto", "cuda", "mps", "cpu"))
    if wanted not in available:
        others = ", ".join(available)
        message = f'`device="{wanted}"` is not available to torch {torch.__version__} here; use one of: {others}.'
        raise UsageError(message)
    return Choice(wanted, "requested")


def choose_training_dtype(wanted: str, device: str, matmul_rate: Callable[[str], float]) -> Choice:
    """The number format: fp32, bf16 or fp16. `auto` is bf16 if the device has fast bf16 instructions, else fp32.

    `matmul_rate` returns the FLOP/s of matrix multiplication in a format. It is called for CPUs with bf16 instructions,
    since some of these compute in bf16 at half the speed of fp32 (decision 015).

    Raises UsageError for an unknown format and for fp16 on a CPU.
    """
    if wanted == "auto":
        if not computes_bf16(device):
            return Choice("fp32", "the device has no fast bf16")
        if must_compare_bf16(device) and matmul_rate("bf16") < MIN_BF16_SPEEDUP * matmul_rate("fp32"):
            return Choice("fp32", "bf16 is less than 1.2 times as fast as fp32")
        return Choice("bf16", "the device computes in it")
    check_choice("dtype", wanted, ("auto", *DTYPES))
    if wanted == "fp16" and device == "cpu":
        raise UsageError('`dtype="fp16"` needs a GPU; on a CPU use bf16 or fp32.')
    return Choice(wanted, "requested")


def choose_generation_dtype(wanted: str, device: str, weights: torch.dtype = torch.float32) -> Choice:
    """The number format of generation: fp32, bf16 or fp16. For 16-bit weights, `auto` is their format. For fp32
    weights, it is bf16 on CUDA devices with bf16 instructions, else fp32.

    weights: dtype of the weights, as from `weights_dtype`.

    Raises UsageError for an unknown format.
    """
    if wanted == "auto":
        if weights != torch.float32:
            return Choice(next(name for name, dtype in DTYPES.items() if dtype == weights), "that of the weights")
        if device == "cuda" and computes_bf16(device):
            return Choice("bf16", "the device computes in it")
        return Choice("fp32", "exact")
    check_choice("dtype", wanted, ("auto", *DTYPES))
    return Choice(wanted, "requested")


def weights_dtype(model: nn.Module) -> torch.dtype:
    """The 16-bit dtype of a model's weights; fp32 if no parameter has one. The adapters of a 16-bit model are fp32."""
    return next((p.dtype for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)), torch.float32)


def computes_bf16(device: str) -> bool:
    """Whether a CUDA GPU has bf16 matrix instructions, or an x86 CPU has bf16 dot-product or matrix instructions.

    False for other devices.
    """
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    return device == "cpu" and cpu.computes_bf16()


def computes(device: str, dtype: str) -> bool:
    """Whether the device has instructions for a number format."""
    if dtype == "bf16":
        return computes_bf16(device)
    return dtype == "fp32" or device != "cpu"


def must_compare_bf16(device: str) -> bool:
    """Whether the device is a CPU with bf16 instructions, on which bf16 may be slower than fp32."""
    return device == "cpu" and computes_bf16(device)


def identify_device(device: str) -> dict[str, Any]:
    """Key of a speed measurement on a device, as JSON values: processor, device, libraries, threads."""
    return {**cpu.identify_torch(), "device": torch.cuda.get_device_name() if device == "cuda" else device}


def autocast(device: str, dtype: str) -> AbstractContextManager[object]:
    """Context manager of torch.autocast to `dtype`; it does nothing for fp32.

    With CUDA, casts of weights are not cached, since a cached one would be missing in a CUDA graph.
    """
    if dtype == "fp32":
        return nullcontext()
    return torch.autocast(device, dtype=DTYPES[dtype], cache_enabled=device != "cuda")


def can_compile(device: str) -> bool:
    """Whether torch.compile supports the device: CUDA, or a CPU if a C++ compiler is installed."""
    if device == "cpu":
        return shutil.which(os.environ.get("CXX", "c++")) is not None or shutil.which("g++") is not None
    return device == "cuda"


def describe_device(device: str) -> str:
    """The device, with the name of a CUDA GPU or the number of threads of a CPU, as in "cpu (2 threads)"."""
    if device == "cuda":
        return f"cuda ({torch.cuda.get_device_name()})"
    if device == "cpu":
        return f"cpu ({counted(torch.get_num_threads(), 'thread')})"
    return device


def mark(device: torch.device) -> Callable[[], None] | None:
    """A function that waits until the device has done what was started so far; `None` if an operation on the device
    ends before Python starts the next one.
    """
    return torch.cuda.current_stream(device).record_event().synchronize if device.type == "cuda" else None


def empty_cache(device: torch.device) -> None:
    """Free the device memory that torch has cached. Does nothing on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def physical_memory() -> int | None:
    """Size of the memory in bytes; `None` if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def free_memory(
    device: str, root: Path = Path("/"), physical: Callable[[], int | None] = physical_memory
) -> int | None:
    """Free bytes of a CUDA device, else of the system: available memory, limited by the cgroup.

    Without /proc/meminfo, as on macOS, this is the size of the memory. `None` if the system reports none of these.
    root: the folder of `proc` and `sys`
    """
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    limits = [] if (size := physical()) is None else [size]
    with contextlib.suppress(OSError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError):
        cgroup = root / "sys/fs/cgroup"
        limit, used, stat = ((cgroup / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        # `current` includes cached file pages, which the kernel frees when memory is needed.
        freed = sum(int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file "))
        limits += [max(0, int(limit) - int(used) + freed)] if limit.strip() != "max" else []
    return min(limits, default=None)
