"""The position-wise feed-forward layer (seeds 000, 002, 003, 004)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.model.routing import Routing


class FeedForward(nn.Module):
    """activation(x W1 + b1) W2 + b2 (Vaswani et al. 2017): (..., D) -> (..., D), and no routing."""

    def __init__(self, width: int, ffn_width: int, bias: bool, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, ffn_width, bias)
        self.down_proj = nn.Linear(ffn_width, width, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        return self.down_proj(self.activation(self.up_proj(x))), None


class GatedFeedForward(nn.Module):
    """(activation(x Wg) * x W1) W2, each with an optional bias (Shazeer 2020): (..., D) -> (..., D), and no routing."""

    def __init__(self, width: int, ffn_width: int, bias: bool, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, ffn_width, bias)
        self.up_proj = nn.Linear(width, ffn_width, bias)
        self.down_proj = nn.Linear(ffn_width, width, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x)), None


def gelu(x: Tensor) -> Tensor:
    """GELU by the tanh approximation, as GPT-2 has it (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")
