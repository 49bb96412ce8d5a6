"""Position schemes, one class each, and the frequencies of RoPE.

A scheme adds vectors to the embeddings (`add`), or rotates queries and keys (`rotations`). Positions are (T,), or
(B, T) if they differ between rows. Relative positions are part of attention: see `RelativeDotProduct`. Shape letters:
R rotated features per head, others in `tinylm.transformer`.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn


def rope_frequencies(width: int, theta: float) -> Tensor:
    """theta^(-2i/width) for every pair i of `width` features: (width/2,)."""
    evens = torch.arange(0, width, 2, dtype=torch.float64, device="cpu")
    return torch.exp(evens * (-math.log(theta) / width))


def scale_linearly(frequencies: Tensor, factor: float) -> Tensor:
    """Position interpolation, every frequency divided by the factor (Chen et al. 2023): (N) -> (N)."""
    return frequencies / factor


def scale_as_llama3(
    frequencies: Tensor, factor: float, original_context: int, low_freq_factor: float, high_freq_factor: float
) -> Tensor:
    """Divide frequencies with few periods in the original context by the factor; keep those with many (Llama 3.1).

    Between `low_freq_factor` and `high_freq_factor` periods, interpolate linearly in the number of periods: (N) -> (N).
    """
    periods = original_context * frequencies / (2 * math.pi)
    kept = ((periods - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def scale_by_yarn(
    frequencies: Tensor, theta: float, factor: float, original_context: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """As `scale_as_llama3`, but interpolated linearly in the pair's index (Peng et al. 2023, sections 3.2 and 3.4).

    (N) -> (N). Interpolation runs from the pair with `beta_fast` periods in the original context (index rounded down)
    to the pair with `beta_slow` periods (index rounded up).
    """
    width = 2 * len(frequencies)

    def pair_with(periods: float) -> float:
        return width * math.log(original_context / (2 * math.pi * periods)) / (2 * math.log(theta))

    first = max(math.floor(pair_with(beta_fast)), 0)
    last = min(math.ceil(pair_with(beta_slow)), width - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float64, device="cpu")
    # If both ends are equal, the ramp has a width of 0.001, to avoid a division by zero.
    scaled = ((pairs - first) / (last - first if last != first else 0.001)).clamp(0, 1)
    return scaled * frequencies / factor + (1 - scaled) * frequencies


def yarn_attention_factor(factor: float) -> float:
    """Default factor of the rotated features of queries and keys (Peng et al. 2023, equation 22)."""
    return 0.1 * math.log(factor) + 1


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

    def __init__(self, *args: Any, local: RotaryPosition, local_layers: Collection[int]) -> None:
        super().__init__(*args)
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
