import pytest
import torch
from torch import Tensor, nn

from tinylm.model.block import Memory, ParallelBlock, PostNormBlock, PreNormBlock, SandwichNormBlock


class Times(nn.Module):
    """A sublayer or norm that multiplies by a constant, so that outputs can be computed by hand."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, *context: object) -> Tensor:
        return self.factor * x


class Ones(nn.Module):
    def forward(self, x: Tensor, *context: object) -> Tensor:
        return torch.ones_like(x)


class Routed(nn.Module):
    """A feed-forward layer that returns a routing beside its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.layer(x), "routing"


# With attention 3x, feed-forward 5x and norm 2x. Pre: y = x + 3*2x = 7x, then y + 5*2y = 77x.
# Post: y = 2 (x + 3x) = 8x, then 2 (y + 5y) = 96x. Sandwich: y = x + 2*3*2x = 13x, then y + 2*5*2y = 273x.
# Parallel: x + 3*2x + 5*2x = 17x.
@pytest.mark.parametrize(
    ("block", "factor"),
    [(PreNormBlock, 77.0), (PostNormBlock, 96.0), (SandwichNormBlock, 273.0), (ParallelBlock, 17.0)],
    ids=["pre", "post", "sandwich", "parallel"],
)
def test_norms_and_residual_connections_are_those_of_the_kind_of_block(block, factor: float) -> None:
    x = torch.randn(2, 3, 4)
    layer = block(Times(3.0), Routed(Times(5.0)), lambda: Times(2.0), dropout=0.0)
    y, routing = layer(x, None, None, None)
    torch.testing.assert_close(y, factor * x)
    assert routing == "routing"


# With cross-attention 7x between the two. Pre: 7x, then y + 7*2y = 105x, then y + 5*2y = 1155x.
# Post: 8x, then 2 (y + 7y) = 128x, then 2 (y + 5y) = 1536x. Sandwich: 13x, then y + 2*7*2y = 377x, then 7917x.
@pytest.mark.parametrize(
    ("block", "factor"),
    [(PreNormBlock, 1155.0), (PostNormBlock, 1536.0), (SandwichNormBlock, 7917.0)],
    ids=["pre", "post", "sandwich"],
)
def test_cross_attention_is_between_self_attention_and_feed_forward(block, factor: float) -> None:
    x = torch.randn(2, 3, 4)
    layer = block(Times(3.0), Routed(Times(5.0)), lambda: Times(2.0), 0.0, Times(7.0))
    torch.testing.assert_close(layer(x, None, None, None, Memory(x, None))[0], factor * x)


BLOCKS = [PreNormBlock, PostNormBlock, SandwichNormBlock, ParallelBlock]


@pytest.mark.parametrize("block", BLOCKS, ids=["pre", "post", "sandwich", "parallel"])
def test_residual_dropout_rescales_kept_values_and_is_off_in_evaluation(block) -> None:
    """Each sublayer outputs 1 and, with p = 1/4, independently adds 0 with probability 1/4, else 4/3."""
    torch.manual_seed(0)
    x = torch.zeros(100, 100, 10)
    layer = block(Ones(), Routed(Ones()), lambda: Times(1.0), dropout=0.25)
    values, counts = layer.train()(x, None, None, None)[0].mul(3).round().unique(return_counts=True)
    assert values.tolist() == [0.0, 4.0, 8.0]
    assert (counts / x.numel()).tolist() == pytest.approx([1 / 16, 6 / 16, 9 / 16], abs=0.01)
    assert torch.equal(layer.eval()(x, None, None, None)[0], torch.full_like(x, 2.0))


def test_the_norms_of_a_block_are_separate_modules() -> None:
    for block, count in zip(BLOCKS, (2, 2, 4, 2), strict=True):
        layer = block(Ones(), Ones(), lambda: nn.LayerNorm(4), dropout=0.0)
        assert sum(isinstance(module, nn.LayerNorm) for module in layer.modules()) == count
