"""Position schemes, one class each.

A scheme adds vectors to the embeddings (`add`), or rotates queries and keys (`rotations`). Positions are (T,), or
(B, T) if they differ between rows. Relative positions are part of attention: see `RelativeDotProduct`. Shape letters:
R rotated features per head, others in `tinylm.transformer`.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from tinylm.transformer.rope_frequencies import rope_frequencies

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines; see `Position.rotation`


class Position(nn.Module):
    """No position encoding; the base class of all schemes."""

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        return x

    def rotation(self, positions: Tensor) -> Rotation | None:
        """Cosines and signed sines for `rotate`, each (T, R) or (B, 1, T, R); `None` for schemes without rotation."""
        return None

    def rotations(self, positions: Tensor, layers: int) -> list[Rotation | None]:
        """The rotation of each layer, as `rotation` returns it: two tensors (T, R) or (B, 1, T, R), or `None`."""
        return [self.rotation(positions)] * layers


class LearnedPosition(Position):
    """A learned vector per position, added to the embedding (Radford et al. 2019)."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(context, width))

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        return x + self.weight[positions]


class SinusoidalPosition(Position):
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(p / 10000^(2i/D)), added (Vaswani et al. 2017)."""

    table: Tensor

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        angles = _angles(context, rope_frequencies(width, 10_000.0))  # (context, D/2)
        table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (context, D)
        self.register_buffer("table", table.float(), persistent=False)

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        return x + self.table[positions]


class RotaryPosition(Position):
    """RoPE: rotates pairs of features of each query and key by position times frequency (Su et al. 2021).

    frequencies: (R/2,), of the pairs (i, i + R/2) of the first R features of each head: see `rope_frequencies`.
    magnitude: factor of the R rotated features.

    The features of a pair are R/2 apart, as for GPT-NeoX, Llama and Qwen in transformers, and not adjacent as in the
    paper. The two layouts differ by a fixed permutation of each head's features.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, context: int, frequencies: Tensor, magnitude: float = 1.0) -> None:
        super().__init__()
        angles = _angles(context, frequencies)  # (context, R/2)
        cosines, sines = ((part * magnitude).float() for part in (angles.cos(), angles.sin()))
        self.register_buffer("cosines", torch.cat((cosines, cosines), dim=-1), persistent=False)  # (context, R)
        self.register_buffer("sines", torch.cat((-sines, sines), dim=-1), persistent=False)

    def rotation(self, positions: Tensor) -> Rotation:
        cosines, sines = self.cosines[positions], self.sines[positions]
        if positions.dim() == 2:
            cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)  # (B, 1, T, R)
        return cosines, sines


class LocalRotaryPosition(RotaryPosition):
    """RoPE in which the layers `local_layers`, numbered from 0, use the frequencies of `local` (Gemma 3)."""

    def __init__(
        self,
        context: int,
        frequencies: Tensor,
        magnitude: float = 1.0,
        *,
        local: RotaryPosition,
        local_layers: Collection[int],
    ) -> None:
        super().__init__(context, frequencies, magnitude)
        self.local = local
        self.local_layers = local_layers

    def rotations(self, positions: Tensor, layers: int) -> list[Rotation | None]:
        everywhere, local = self.rotation(positions), self.local.rotation(positions)
        return [local if layer in self.local_layers else everywhere for layer in range(layers)]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first R features of each query or key by the angles of its position: (B, H, T, W) -> (B, H, T, W).

    Feature i becomes x_i cos - x_(i + R/2) sin for i < R/2, and x_i cos + x_(i - R/2) sin for R/2 <= i < R. The sines
    in `rotation` have these signs.
    """
    cosines, sines = (table.to(x.dtype) for table in rotation)
    rotated = cosines.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], rotation), x[..., rotated:]), dim=-1)
    return torch.addcmul(x * cosines, x.roll(rotated // 2, dims=-1), sines)


def _angles(context: int, frequencies: Tensor) -> Tensor:
    """The angle p f of every position p < context and frequency f, in float64: (N,) -> (context, N).

    Computed on the CPU even for a model on the meta device, because the weights file does not contain these buffers.
    """
    return torch.outer(torch.arange(context, dtype=torch.float64, device="cpu"), frequencies)
