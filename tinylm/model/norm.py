"""Normalisation of one token's hidden vector, with an optional gain and an optional bias (seeds 000, 001, 004)."""

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
        # Autocast leaves the gain in fp32, for which the fused kernel has no bf16 input.
        weight = None if self.weight is None else self.weight.to(x.dtype)
        x = F.rms_norm(x, self.shape, weight, self.eps)
        return x if self.bias is None else x + self.bias
