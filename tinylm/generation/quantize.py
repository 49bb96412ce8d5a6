"""Int8 weights for generation: each row of a weight matrix is stored as int8 with one scale."""

import torch
from torch import Tensor, nn

from tinylm.adapters.inject import replace_modules, unwrapped_name
from tinylm.kernels import int8


class Int8Linear(nn.Module):
    """x W^T + b with W ~ scale * round(W / scale), where the scale of a row is its largest magnitude over 127, in bf16.

    The kernel takes scales in bf16. Weights are divided by the rounded scales, which avoids an error of that rounding.
    """

    weight: Tensor  # (out, in'), int8, with padded inputs; see `int8.align`
    scale: Tensor  # (out,), bf16
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).bfloat16()
        self.register_buffer("weight", int8.align((weight / scale.unsqueeze(1)).round().to(torch.int8)))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        y = int8.linear(x, self.weight, self.scale)
        return (y if self.bias is None else self.bias + y).to(x.dtype)


def quantize_int8(model: nn.Module) -> None:
    """Replace every linear layer except routers by an `Int8Linear`, in place.

    Routers are small, and rounding them could change the choice of experts. The embedding and an output layer tied to
    it are not quantized either; `fuse_model` unties a large one first.
    """

    def quantized(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return Int8Linear(module)

    replace_modules(
        model,
        lambda name, module: isinstance(module, nn.Linear) and not unwrapped_name(name).endswith(".router"),
        quantized,
    )
