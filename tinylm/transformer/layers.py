"""The layers that every architecture uses: linear layers, norms, dropout, and the cross-entropy of the logits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.kernels.layers import linear, random_dropout, rms_norm


class Linear(nn.Linear):
    """`torch.nn.Linear` with the kernels of `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        return linear(input, self.weight, self.bias)


def as_product_input(x: Tensor) -> Tensor:
    """x in the format of autocast, (...) -> (...), so that it is not cast again by each product that reads it."""
    kind = x.device.type
    is_cast = x.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if is_cast else x


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

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)"""
        gain = 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))  # (width,)
        y = rms_norm(x.to(torch.promote_types(x.dtype, gain.dtype)), gain, self.eps).to(x.dtype)
        return y if self.bias is None else y + self.bias


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` with the kernel `random_dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (...)"""
        return random_dropout(input, self.p) if self.training and self.p else input


IGNORED = -100  # in place of a target that does not count


class CrossEntropy(nn.Module):
    """Summed cross-entropies of the same logits with each row of targets.

    With label smoothing s, the target distribution is (1 - s) on the target plus s / V on each of the V ids, so that
    -log p(target) becomes -(1 - s) log p(target) - s / V sum_v log p(v) (Szegedy et al. 2016). Only the first row is
    smoothed; in the others, targets that are IGNORED do not count.
    """

    def forward(self, logits: Tensor, targets: Tensor, smoothing: float) -> list[Tensor]:
        """The sums in nats: (N, V) and (K, N) -> K of ()."""
        log_p = log_softmax(logits)  # (N, V)
        return [cross_entropy(log_p, row, smoothing if k == 0 else 0.0) for k, row in enumerate(targets.unbind())]


def log_softmax(logits: Tensor) -> Tensor:
    """The logarithm of the softmax in at least fp32: (..., V) -> (..., V)."""
    return F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def cross_entropy(log_p: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The sum over the targets that are not IGNORED: (N, V) and (N,) -> (). With smoothing, none may be IGNORED."""
    loss = F.nll_loss(log_p, targets, ignore_index=IGNORED, reduction="sum")
    return loss if smoothing == 0 else (1 - smoothing) * loss - smoothing * log_p.mean(dim=-1).sum()
