"""RMSNorm in training on a CPU, for which torch has neither a forward nor a backward kernel (decision 010)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_AVAILABLE = hasattr(torch.ops.aten, "native_layer_norm_backward")


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x: (..., D) and (D,) -> (..., D)."""
    if _AVAILABLE and x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps)
    # Under autocast the weight is fp32, and the fused kernel needs x and weight in the same dtype.
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps).

    dx = r (g w - x r^2 mean(g w x)) and dw = sum(g x r). torch has a kernel for the gradient of LayerNorm, which at a
    mean of 0 has one more term, -r mean(g w). 16-bit inputs are computed in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)  # (..., 1)
        r = (norm * norm).div_(x.shape[-1]).add_(eps).rsqrt_()  # (..., 1)
        ctx.save_for_backward(x, r, weight)
        y = x * r
        return (y if weight is None else y.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, r, weight = ctx.saved_tensors
        g = g.to(r.dtype)
        gain = None if weight is None else weight.to(r.dtype)
        output_mask = [True, ctx.needs_input_grad[1], False]
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            g, x.to(r.dtype), x.shape[-1:], torch.zeros_like(r), r, gain, None, output_mask
        )
        # Add r mean(g w), which the kernel has subtracted.
        sum_gw = g.sum(dim=-1, keepdim=True) if gain is None else (g @ gain).unsqueeze(-1)  # (..., 1)
        return dx.addcmul_(sum_gw, r, value=1 / x.shape[-1]).to(x.dtype), dw, None
