"""How a token knows its place: one class a scheme.

A scheme may add to the embeddings (`add`), or rotate queries and keys (`rotation`). Positions are (T,), or (B, T) where
the rows of a batch start at different places.
"""

import math

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]


class Position(nn.Module):
    """No positions: what a scheme does not change, it inherits."""

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        return x

    def rotation(self, positions: Tensor) -> Rotation | None:
        """The cosines and sines to turn queries and keys by, each (T, W) or (B, 1, T, W): see `rotate`."""
        return None


class LearnedPosition(Position):
    """A learned vector a position, added to the embedding (seed 001; Radford et al. 2019)."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(context, width))

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.weight[positions]


class SinusoidalPosition(Position):
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(p / 10000^(2i/D)), added (seed 004; Vaswani et al. 2017)."""

    table: Tensor

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        angles = _angles(context, width, 10_000.0)  # (context, D/2)
        table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (context, D)
        self.register_buffer("table", table.float(), persistent=False)

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table[positions]


class RotaryPosition(Position):
    """Rotates the pairs (i, i + W/2) of each query and key by p * theta^(-2i/W) (seed 002; Su et al. 2021).

    The halves are split as in GPT-NeoX, LLaMA and Qwen, not interleaved as in the paper: a fixed permutation of a
    head's features, which a trained model does not notice.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, context: int, head_width: int, theta: float) -> None:
        super().__init__()
        angles = _angles(context, head_width, theta).repeat(1, 2)  # (context, W)
        self.register_buffer("cosines", angles.cos().float(), persistent=False)
        signs = torch.tensor([-1.0, 1.0], device="cpu").repeat_interleave(head_width // 2)
        self.register_buffer("sines", (angles.sin() * signs).float(), persistent=False)

    def rotation(self, positions: Tensor) -> Rotation:
        cosines, sines = self.cosines[positions], self.sines[positions]
        if positions.dim() == 2:
            cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)  # (B, 1, T, W)
        return cosines, sines


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each head's vector by its position's angles: (B, H, T, W) -> (B, H, T, W).

    x_i cos - x_(i + W/2) sin in the first half, and x_i cos + x_(i - W/2) sin in the second: the sines have the signs.
    """
    cosines, sines = (table.to(x.dtype) for table in rotation)
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, dims=-1), sines)


def _angles(context: int, width: int, theta: float) -> Tensor:
    """p * theta^(-2i/width) for every position p and i < width/2, in float64: (context, width/2).

    On the CPU even when the model is built without storage, on the meta device, for weights to be loaded into.
    """
    evens = torch.arange(0, width, 2, dtype=torch.float64, device="cpu")
    frequencies = torch.exp(evens * (-math.log(theta) / width))
    return torch.outer(torch.arange(context, dtype=torch.float64, device="cpu"), frequencies)
