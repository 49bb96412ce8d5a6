"""Dropout (Srivastava et al. 2014), on a CPU in about a quarter of the time of `F.dropout` (decision 005).

torch draws a double for each entry, in one thread; here 64 random bits are used as four 16-bit numbers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, p: float) -> Tensor:
    """x / (1 - p) with probability 1 - p, else 0: (...) -> (...).

    On a CPU, the probability is rounded to a multiple of 2^-16.
    """
    if x.device.type != "cpu":
        return F.dropout(x, p)
    count = x.numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64)
    (_draw_compiled if torch.compiler.is_compiling() else _draw)(bits)
    numbers = bits.view(torch.int16)[:count].view(x.shape)  # (...), uniform in [-2^15, 2^15)
    kept = numbers >= round(p * 2**16) - 2**15
    return x * (kept.to(x.dtype) * (1 / (1 - p)))


def _draw(bits: Tensor) -> None:
    """Fill an int64 tensor with random bits."""
    bits.random_(torch.iinfo(torch.int64).min, None)


@torch.library.custom_op("tinylm::draw_bits", mutates_args=("bits",), tags=(torch.Tag.nondeterministic_seeded,))
def _draw_compiled(bits: Tensor) -> None:
    """`_draw` as an operation that torch.compile calls instead of compiling its own, which is slower (decision 014).

    It mutates its argument, because the compiler would merge two equal operations that return a new tensor.
    """
    _draw(bits)
