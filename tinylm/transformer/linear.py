"""The linear layer of all models except in experts and routers, computed by the fastest kernel."""

from torch import Tensor, nn

from tinylm.kernels import fp32_products, onednn


class Linear(nn.Linear):
    """`torch.nn.Linear` with the kernels of `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b by oneDNN or in fp32 where that is faster: (..., in), (out, in) and (out,) -> (..., out)."""
    kernel = fp32_products if fp32_products.is_faster(x, weight) else onednn
    return kernel.linear(x, weight, bias)
