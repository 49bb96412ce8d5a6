"""Products with 16-bit weights, computed in fp32 on x86 processors that have no instructions for the 16-bit format.

There, torch multiplies many rows in 16 bits several times slower than in fp32 (decision 038). Converting a weight at
each use keeps the memory of the model at 16 bits per weight.
"""

import functools

import torch
from torch import Tensor

from tinylm.kernels import cpu_features, onednn

MIN_ROWS = 32  # with fewer rows, converting the weight takes longer than the faster product gains


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` is faster than the product in 16 bits. Never with autograd, which would keep the fp32 weight.

    x, weight: as for `linear`.
    """
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and weight.device.type == "cpu"
        and x.numel() >= MIN_ROWS * x.shape[-1]
        and (torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype) == weight.dtype
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not _computes(weight.dtype)
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, summed in fp32: (..., in), (out, in) and (out,) -> (..., out) in the dtype of the weight."""
    with torch.autocast("cpu", enabled=False):
        y = onednn.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return y.to(weight.dtype)


@functools.cache
def _computes(dtype: torch.dtype) -> bool:
    computes = cpu_features.computes_bf16 if dtype == torch.bfloat16 else cpu_features.computes_fp16
    return not cpu_features.is_x86() or computes()
