"""x W^T + b, in fp32 on a CPU by oneDNN, which torch has in it and uses for 16 bits alone (decision 013). On
Intel's processors it is MKL's, as elsewhere in torch, which is made for them (decision 015).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# For fewer, arranging a matrix as oneDNN wants it costs more than it gains; `PackedLinear` keeps it so.
FEWEST_ROWS = 32
HAS_ONEDNN = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)


def _suits_mkl() -> bool:
    """Whether this is a processor of Intel's, as newer versions of torch can tell."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.backends.mkl.is_available() and "Intel" in capabilities.get("cpu_name", "")


USES_ONEDNN = HAS_ONEDNN and not _suits_mkl()


class Linear(nn.Linear):
    """torch's, but for the kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., in), (out, in) and (out,) -> (..., out)"""
    if not _is_for_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _OneDNNLinear.apply(x, weight, bias)
    return onednn_product(x, weight, bias)


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` by oneDNN, without a gradient. The weight may be one that oneDNN has arranged."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        USES_ONEDNN
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() >= FEWEST_ROWS * x.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # which knows oneDNN's products without gradients alone
    )


class _OneDNNLinear(torch.autograd.Function):
    """dx = g W, dW = g^T x and db = the sum of g over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = g.flatten(0, -2)  # (N, out)
        dx = None if weight is None else onednn_product(g, weight.t())
        dw = None if x is None else _transposed_product(rows, x.flatten(0, -2))  # (out, in)
        return dx, dw, rows.sum(dim=0) if ctx.needs_input_grad[2] else None


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """a^T b of (N, P) and (N, Q): (P, Q). oneDNN copies its first argument here, so that is the smaller one."""
    if a.shape[1] <= b.shape[1]:
        return onednn_product(a.t(), b.t())
    return onednn_product(b.t(), a.t()).t()
