"""Linear layers with int8 weights by torch's CPU kernel `_weight_int8pack_mm` (decision 013)."""

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16  # the kernel reads blocks of this many inputs, the last one past the end of an unpadded row

_AVAILABLE = hasattr(torch.ops.aten, "_weight_int8pack_mm")


def align(weight: Tensor) -> Tensor:
    """Pad an int8 weight with zeros to a multiple of ALIGNMENT inputs: (out, in) -> (out, in'), contiguous."""
    return F.pad(weight, (0, -weight.shape[1] % ALIGNMENT)).contiguous()  # (out, in')


def linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """scale * (x W^T): (..., in), an aligned int8 weight (out, in') and scales (out,) in bf16 -> (..., out).

    The kernel gets x rounded to bf16, the only format in which it is fast, and returns bf16. The fallback computes and
    returns the dtype of x.
    """
    padding = weight.shape[1] - x.shape[-1]
    if padding:
        x = F.pad(x, (0, padding))  # (..., in')
    if _AVAILABLE and x.device.type == "cpu":
        rows = x.reshape(-1, x.shape[-1]).bfloat16().contiguous()  # (N, in')
        return torch.ops.aten._weight_int8pack_mm(rows, weight, scale).view(*x.shape[:-1], -1)  # (..., out)
    return F.linear(x, weight.to(x.dtype)) * scale
