"""How many of a CPU's threads write a token: waking one costs as much as a small product (decision 013)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tinylm.inference.arrange import PackedLinear
from tinylm.inference.quantize import Int8Linear

WAKING = 13e-6  # seconds, in each product that is shared out
READING = 40e9  # bytes of weights that one thread reads a second
COMPUTING = 100e9  # operations of one thread a second


@contextmanager
def threads_for(model: nn.Module, rows: int) -> Iterator[None]:
    """Use one thread meanwhile, where more would not gain what they cost in writing a token to each of so many rows."""
    threads = torch.get_num_threads()
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear | PackedLinear | Int8Linear)]
    reading = sum(weight.numel() * weight.element_size() for weight in weights) / READING
    computing = sum(2 * weight.numel() * rows for weight in weights) / COMPUTING
    gained = max(reading, computing) * (1 - 1 / threads)
    torch.set_num_threads(threads if gained > WAKING * len(weights) else 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
