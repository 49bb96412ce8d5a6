"""Frequencies of RoPE, and their scaling for contexts longer than that of pre-training.

Frequencies are in radians per token, one per pair of rotated features, in float64 on the CPU, even for a model on the
meta device, because weights files do not contain them.
"""

import math

import torch
from torch import Tensor


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
