"""Weights in eight bits for sampling: each output row is stored as int8 with one scale."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.adapters.inject import plain_name, replace_modules

KERNEL_INPUTS = 16  # the CPU kernel reads so many at a time, past the end where they do not divide by it


class Int8Linear(nn.Module):
    """x W^T + b with W ~ scale * round(W / scale), where scale is a row's largest magnitude over 127, in bf16.

    The CPU kernel is fast for bf16 alone, and takes the scales in the format of its inputs. Rounded before the weights
    are divided by them, they cost nothing.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).bfloat16()
        self.padding = -linear.in_features % KERNEL_INPUTS
        self.register_buffer("weight", F.pad((weight / scale.unsqueeze(1)).round().to(torch.int8), (0, self.padding)))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        if self.padding:
            x = F.pad(x, (0, self.padding))
        if x.device.type == "cpu":
            rows = x.reshape(-1, x.shape[-1]).bfloat16()  # (N, in)
            product = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)  # (N, out)
            y = product.view(*x.shape[:-1], -1)  # (..., out)
        else:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return (y if self.bias is None else self.bias + y).to(x.dtype)


def quantize_int8(model: nn.Module) -> None:
    """Replace every linear layer but routers, which are small, and where a small error makes another choice.

    The embedding stays, and so does an output layer that shares it, unless it was made a layer of its own before.
    """

    def quantized(name: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return Int8Linear(module)

    replace_modules(
        model,
        lambda name, module: isinstance(module, nn.Linear) and not plain_name(name).endswith(".router"),
        quantized,
    )
