"""The position-wise feed-forward layer (Vaswani et al. 2017; gated: Shazeer 2020)."""

from abc import abstractmethod
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.transformer.linear import Linear
from tinylm.transformer.routing import Routing

Projection = Callable[[str, Tensor], Tensor]


class _FeedForward(nn.Module):
    """Base class of dense feed-forward layers. input_projections: names of the linear layers applied to the input."""

    input_projections: tuple[str, ...]
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
        for name in self.input_projections:
            setattr(self, name, linear(width, ffn_width, bias))
        self.down_proj = linear(ffn_width, width, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        """(..., D) -> (..., D), and `None`: a dense layer has no routing."""
        return self.compose(x, lambda name, y: self.get_submodule(name)(y)), None

    @abstractmethod
    def compose(self, x: Tensor, project: Projection) -> Tensor:
        """The layer's formula (..., D) -> (..., D), in which `project(name, x)` applies the projection of that name.

        A mixture of experts passes a `project` that applies the projections of each row's experts.
        """


class FeedForward(_FeedForward):
    """activation(x W1 + b1) W2 + b2, where both biases are optional (Vaswani et al. 2017)."""

    input_projections = ("up_proj",)

    def compose(self, x: Tensor, project: Projection) -> Tensor:
        return project("down_proj", self.activation(project("up_proj", x)))


class GatedFeedForward(_FeedForward):
    """(activation(x Wg) * x W1) W2, with an optional bias after each product (Shazeer 2020)."""

    input_projections = ("gate_proj", "up_proj")
    gate_proj: nn.Linear

    def compose(self, x: Tensor, project: Projection) -> Tensor:
        return project("down_proj", self.activation(project("gate_proj", x)) * project("up_proj", x))


def gelu(x: Tensor) -> Tensor:
    """GELU with the tanh approximation, as in GPT-2 (Hendrycks and Gimpel 2016): (...) -> (...)."""
    return F.gelu(x, approximate="tanh")
