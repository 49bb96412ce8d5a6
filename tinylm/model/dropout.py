"""Dropout (Srivastava et al. 2014), whose random numbers cost a fifth of torch's own on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """x / (1 - p) where a 16-bit random number is p * 2^16 or more, else 0, and in training alone.

    torch draws a double for each entry from one thread; of 64 random bits, this makes four.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (...)"""
        if not self.training or self.p == 0.0:
            return input
        if input.device.type != "cpu":
            return F.dropout(input, self.p)
        count = input.numel()
        bits = torch.empty(-(-count // 4), dtype=torch.int64)
        (_compiled_draw if torch.compiler.is_compiling() else _draw)(bits)
        numbers = bits.view(torch.int16)[:count].view(input.shape)  # evenly from -2^15 to 2^15 - 1
        kept = numbers >= round(self.p * 2**16) - 2**15
        return input * (kept.to(input.dtype) * (1 / (1 - self.p)))


def _draw(bits: Tensor) -> None:
    """Fill with random bits."""
    bits.random_(torch.iinfo(torch.int64).min, None)


@torch.library.custom_op("tinylm::draw_bits", mutates_args=("bits",), tags=torch.Tag.nondeterministic_seeded)
def _compiled_draw(bits: Tensor) -> None:
    """The same as an operation of its own, since a compiler would draw them in its way, more slowly. It changes its
    input, since two that only return something would become one.
    """
    _draw(bits)
