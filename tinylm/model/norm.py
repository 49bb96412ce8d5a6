"""Normalisation of one token's hidden vector, with an optional gain and an optional bias (seeds 000, 001, 004)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Norm(nn.Module):
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, width: int, gain: bool = True, bias: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.shape = (width,)
        self.eps = eps
        self.register_parameter("weight", nn.Parameter(torch.ones(width)) if gain else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if bias else None)


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * gain + bias, over the last dimension (Ba et al. 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * gain + bias, over the last dimension (Zhang and Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            x = _RMSNormalise.apply(x, self.weight, self.eps)
        else:
            # Autocast leaves the gain in fp32, for which the fused kernel has no bf16 input.
            weight = None if self.weight is None else self.weight.to(x.dtype)
            x = F.rms_norm(x, self.shape, weight, self.eps)
        return x if self.bias is None else x + self.bias


class _RMSNormalise(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps), for a CPU, where torch has no kernel of its own (decision 010).

    The gradient is LayerNorm's about a mean of zero, for which there is one, without its last term:
    dx = r (g w - x r^2 mean(g w x)) and dw = sum(g x r). 16 bits are computed in 32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)
        r = (length * length).div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, r, weight)
        y = x * r
        return (y if weight is None else y.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, r, weight = ctx.saved_tensors
        g = g.to(r.dtype)
        wanted = [True, weight is not None, False]
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            g, x.to(r.dtype), x.shape[-1:], torch.zeros_like(r), r, weight, None, wanted
        )
        # LayerNorm's gradient has no part along the ones, since its output has none: RMSNorm's has.
        along_ones = g.sum(dim=-1, keepdim=True) if weight is None else (g @ weight).unsqueeze(-1)
        return dx.addcmul_(along_ones, r, value=1 / x.shape[-1]).to(x.dtype), dw, None
