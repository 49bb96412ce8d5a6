"""The products of linear layers, where a CPU computes them faster than `F.linear` does.

In fp32, oneDNN, which torch itself uses on x86 for 16-bit formats only (decision 013). CPUs from Intel (decision 015)
and CPUs without AVX-512 (decision 038) use MKL, which is faster there.

With 16-bit weights, on x86 processors that have no instructions for the format, fp32: there, torch multiplies many rows
in 16 bits several times slower (decision 038). Converting a weight at each use keeps the memory of the model at 16 bits
per weight.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinylm.kernels import cpu_features

MIN_ROWS = 32  # with fewer rows, converting the weight takes longer than a faster product gains

_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_MKL_IS_FASTER = torch.backends.mkl.is_available() and (cpu_features.is_intel() or not cpu_features.has_avx512())
_PREFERRED = _AVAILABLE and not _MKL_IS_FASTER


def prefers_onednn() -> bool:
    """Whether fp32 layers use oneDNN: if this version of torch has it, and MKL is absent or slower."""
    return _PREFERRED


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: (..., in), (out, in) and (out,) -> (..., out). In 16 bits, the result has the dtype of the weight."""
    if not is_widened(x, weight):
        return _multiply(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        y = _multiply(x.float(), weight.float(), None if bias is None else bias.float())
    return y.to(weight.dtype)


def is_widened(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` computes a product of 16-bit weights in fp32. Never with autograd, which would keep the fp32
    weight. x, weight: as for `linear`
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


@functools.cache
def _computes(dtype: torch.dtype) -> bool:
    """Whether the processor has instructions for a 16-bit format."""
    computes = cpu_features.computes_bf16 if dtype == torch.bfloat16 else cpu_features.computes_fp16
    return not cpu_features.is_x86() or computes()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _is_onednn_faster(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _OneDNNLinear.apply(x, weight, bias)
    return _onednn_linear(x, weight, bias)


def _is_onednn_faster(x: Tensor, weight: Tensor) -> bool:
    return (
        _PREFERRED
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() >= MIN_ROWS * x.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # torch.compile supports these operations without gradients only
    )


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


class _OneDNNLinear(torch.autograd.Function):
    """y = x W^T + b, with dx = g W, dW = g^T x, and db = the sum of g over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = g.flatten(0, -2)  # (N, out)
        dx = None if weight is None else _onednn_linear(g, weight.t())  # (..., in)
        dw = None if x is None else _transposed_matmul(rows, x.flatten(0, -2))  # (out, in)
        return dx, dw, rows.sum(dim=0) if ctx.needs_input_grad[2] else None


def _transposed_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a^T b: (N, P) and (N, Q) -> (P, Q). oneDNN copies its first argument, so the smaller one comes first."""
    if a.shape[1] <= b.shape[1]:
        return _onednn_linear(a.t(), b.t())  # (P, Q)
    return _onednn_linear(b.t(), a.t()).t()  # (P, Q)
