"""The position-wise feed-forward layer (seeds 000, 002, 003, 004)."""

from abc import abstractmethod
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.model.linear import Linear
from tinylm.model.routing import Routing

Projection = Callable[[str, Tensor], Tensor]


class _Formula(nn.Module):
    """(..., D) -> (..., D), and no routing. `entries` name the projections of the input."""

    entries: tuple[str, ...]
    up_proj: nn.Linear

    def __init__(
        self,
        width: int,
        ffn_width: int,
        bias: bool,
        activation: Callable[[Tensor], Tensor],
        linear: type[nn.Linear] = Linear,
    ) -> None:
        super().__init__()
        for name in self.entries:
            setattr(self, name, linear(width, ffn_width, bias))
        self.down_proj = linear(ffn_width, width, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        return self.compose(x, lambda name, y: self.get_submodule(name)(y)), None

    @abstractmethod
    def compose(self, x: Tensor, project: Projection) -> Tensor:
        """The formula, with any way to apply the projections by their names."""


class FeedForward(_Formula):
    """activation(x W1 + b1) W2 + b2 (Vaswani et al. 2017)."""

    entries = ("up_proj",)

    def compose(self, x: Tensor, project: Projection) -> Tensor:
        return project("down_proj", self.activation(project("up_proj", x)))


class GatedFeedForward(_Formula):
    """(activation(x Wg) * x W1) W2, each with an optional bias (Shazeer 2020)."""

    entries = ("gate_proj", "up_proj")
    gate_proj: nn.Linear

    def compose(self, x: Tensor, project: Projection) -> Tensor:
        return project("down_proj", self.activation(project("gate_proj", x)) * project("up_proj", x))


def gelu(x: Tensor) -> Tensor:
    """GELU by the tanh approximation, as GPT-2 has it (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")
