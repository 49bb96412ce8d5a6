"""Weights in eight bits for sampling: each output row is stored as int8 with one scale."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.adapters.inject import plain_name, replace_modules

KERNEL_INPUTS = 16  # the CPU kernel reads so many at a time, past the end where they do not divide by it


class Int8Linear(nn.Module):
    """x W^T + b with W ~ scale * round(W / scale), where scale is a row's largest magnitude over 127."""

    weight: Tensor
    scale: Tensor
    ones: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()  # a scale in bf16 would be coarser than the weights
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
        self.padding = -linear.in_features % KERNEL_INPUTS
        self.register_buffer("weight", F.pad((weight / scale.unsqueeze(1)).round().to(torch.int8), (0, self.padding)))
        self.register_buffer("scale", scale)
        # The kernel is fast for bf16 alone, which is too coarse for the scales: those are applied after it.
        self.register_buffer("ones", torch.ones_like(scale, dtype=torch.bfloat16))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        if self.padding:
            x = F.pad(x, (0, self.padding))
        if x.device.type == "cpu":
            rows = x.reshape(-1, x.shape[-1]).bfloat16()  # (N, in)
            product = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.ones)  # (N, out)
            y = (product * self.scale).to(x.dtype).view(*x.shape[:-1], -1)  # (..., out)
        else:
            y = (F.linear(x, self.weight.to(x.dtype)) * self.scale).to(x.dtype)
        return y if self.bias is None else y + self.bias


def quantize_int8(model: nn.Module) -> None:
    """Replace every linear layer but routers, which are small, and where a small error makes another choice.

    The embedding stays, and so does an output layer that shares it.
    """

    def quantized(name: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return Int8Linear(module)

    replace_modules(
        model,
        lambda name, module: isinstance(module, nn.Linear) and not plain_name(name).endswith(".router"),
        quantized,
    )
