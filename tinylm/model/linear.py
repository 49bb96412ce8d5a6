"""The linear layer of all models except in experts and routers, computed by oneDNN where that is faster."""

from torch import Tensor, nn

from tinylm.kernels import onednn


class Linear(nn.Linear):
    """`torch.nn.Linear` with the kernel of `tinylm.kernels.onednn`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        return onednn.linear(input, self.weight, self.bias)
