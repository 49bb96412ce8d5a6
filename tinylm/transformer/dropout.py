"""Dropout (Srivastava et al. 2014) as a layer."""

from torch import Tensor, nn

from tinylm.kernels.dropout_bits import dropout


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` with the kernel of `tinylm.kernels.dropout_bits`."""

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (...)"""
        return dropout(input, self.p) if self.training and self.p else input
