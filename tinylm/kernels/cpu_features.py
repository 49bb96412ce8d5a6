"""Features of this processor, as this version of torch reports them, and the identity that measurements depend on."""

import hashlib
import json
import platform
from collections.abc import Mapping
from typing import Any

import torch

from tinylm.system.machine_profile import identify_processor


def capabilities() -> Mapping[str, Any]:
    """Instruction sets, cache sizes and name of the processor; empty if torch does not report them, as in torch 2.9."""
    return getattr(torch.cpu, "get_capabilities", dict)()


def is_intel() -> bool:
    """Whether the processor is known to be an Intel CPU."""
    return "Intel" in (capabilities().get("cpu_name") or identify_processor().get("vendor_id", ""))


def computes_bf16() -> bool:
    """Whether an x86 processor has bf16 dot-product or matrix instructions (AVX512_BF16, AMX)."""
    return is_x86() and (_supports("_is_avx512_bf16_supported", "avx512_bf16") or has_amx())


def computes_fp16() -> bool:
    """Whether torch reports fp16 arithmetic or matrix instructions of an x86 processor (AVX512_FP16, AMX_FP16)."""
    return bool(capabilities().get("avx512_fp16") or capabilities().get("amx_fp16"))


def is_x86() -> bool:
    """Whether this is a 64-bit x86 processor."""
    return platform.machine().lower() in ("x86_64", "amd64")


def has_avx512() -> bool:
    """Whether torch uses AVX-512 on this x86 processor. Other processors do not have it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def has_amx() -> bool:
    """Whether the processor has AMX, the matrix units of Intel CPUs."""
    return _supports("_is_amx_tile_supported", "amx_tile")


def _supports(function: str, capability: str) -> bool:
    if hasattr(torch.cpu, function):
        return getattr(torch.cpu, function)()
    return bool(capabilities().get(capability, False))


def identify_torch() -> dict[str, Any]:
    """Key of a speed measurement on this processor, as JSON values: processor, torch, libraries, threads."""
    return {
        **identify_processor(),
        "capabilities": _digest(json.dumps(capabilities(), sort_keys=True, default=str)),
        "torch": torch.__version__,
        "libraries": _digest(torch.__config__.show()),  # versions of MKL and oneDNN, instruction sets
        "threads": torch.get_num_threads(),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
