"""fp32 matrix multiplication on a CPU by oneDNN, which torch itself uses on x86 for 16-bit formats only (decision 013).

CPUs from Intel use MKL, which is faster there (decision 015). So do other CPUs without AVX-512, except for weights that
are prepacked (decision 038).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinylm.kernels import cpu_features

MIN_ROWS = 32  # with fewer rows, converting the weight to oneDNN's layout takes longer than oneDNN gains
PREPACK_ROWS = 32  # number of input rows the packed layout is tuned for; fewer rows are as fast

_AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)
_PREFERRED_PREPACKED = _AVAILABLE and not (torch.backends.mkl.is_available() and cpu_features.is_intel())
_PREFERRED = _PREFERRED_PREPACKED and not (torch.backends.mkl.is_available() and not cpu_features.has_avx512())


def is_available() -> bool:
    """Whether this version of torch has oneDNN and the private operations that this module calls."""
    return _AVAILABLE


def is_preferred() -> bool:
    """Whether fp32 layers use oneDNN: where it is available, except on CPUs from Intel or without AVX-512 if torch has
    MKL, which is faster there.
    """
    return _PREFERRED


def is_preferred_prepacked() -> bool:
    """Whether fp32 layers are faster with oneDNN if `prepack` prepares their weights: except on Intel CPUs with MKL."""
    return _PREFERRED_PREPACKED


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: (..., in), (out, in) and (out,) -> (..., out).

    Uses oneDNN where it is faster, else `F.linear`. A weight from `prepack` always uses oneDNN, without autograd.
    """
    if weight.is_mkldnn:
        return _onednn_linear(x, weight, bias)
    if not _is_faster(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _OneDNNLinear.apply(x, weight, bias)
    return _onednn_linear(x, weight, bias)


def prepack(weight: Tensor) -> Tensor:
    """The fp32 weight (out, in) in the layout that is fastest for `linear`: an opaque tensor of the same shape.

    Requires `is_available()`. The result has no gradient.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PREPACK_ROWS)


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
