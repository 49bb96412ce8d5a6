"""Normalisation of hidden vectors, with optional gain and bias (Ba et al. 2016; Zhang and Sennrich 2019)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.kernels.rms_norm import rms_norm


class _Norm(nn.Module):
    """The parameters of a norm over vectors of `width` features; `weight` is the gain."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, width: int, gain: bool = True, bias: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.shape = (width,)
        self.eps = eps
        self.register_parameter("weight", nn.Parameter(torch.ones(width)) if gain else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if bias else None)

    @property
    def gain(self) -> Tensor | None:
        """(width,), the factor of the normalised vector; `None` for 1."""
        return self.weight


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * gain + bias, over the last dimension (Ba et al. 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)"""
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * gain + bias, over the last dimension (Zhang and Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)"""
        x = rms_norm(x, self.weight, self.eps)
        return x if self.bias is None else x + self.bias


class UnitOffsetRMSNorm(RMSNorm):
    """RMSNorm with a gain of 1 + weight, in fp32 or more, since a 16-bit sum would round the weight (Gemma)."""

    weight: nn.Parameter

    def __init__(self, width: int, bias: bool = False, eps: float = 1e-6) -> None:
        super().__init__(width, True, bias, eps)
        nn.init.zeros_(self.weight)

    @property
    def gain(self) -> Tensor:
        """(width,), in fp32 or more."""
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)"""
        gain = self.gain
        y = rms_norm(x.to(torch.promote_types(x.dtype, gain.dtype)), gain, self.eps).to(x.dtype)
        return y if self.bias is None else y + self.bias
