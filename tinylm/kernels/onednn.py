"""fp32 matrix multiplication on a CPU by oneDNN, which torch itself uses on x86 for 16-bit formats only (decision 013).

CPUs from Intel (decision 015) and CPUs without AVX-512 (decision 038) use MKL, which is faster there.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinylm.kernels import cpu_features

MIN_ROWS = 32  # with fewer rows, converting the weight to oneDNN's layout takes longer than oneDNN gains

_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_MKL_IS_FASTER = torch.backends.mkl.is_available() and (cpu_features.is_intel() or not cpu_features.has_avx512())
_PREFERRED = _AVAILABLE and not _MKL_IS_FASTER


def is_preferred() -> bool:
    """Whether fp32 layers use oneDNN: if this version of torch has it, and MKL is absent or slower."""
    return _PREFERRED


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b by oneDNN where it is faster, else by `F.linear`: (..., in), (out, in) and (out,) -> (..., out)."""
    if not _is_faster(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _OneDNNLinear.apply(x, weight, bias)
    return _onednn_linear(x, weight, bias)


def _is_faster(x: Tensor, weight: Tensor) -> bool:
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
