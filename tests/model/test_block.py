import pytest
import torch
from torch import Tensor, nn

from tinylm.model.block import Memory, PostNormBlock, PreNormBlock


class Times(nn.Module):
    """A sublayer, or a norm, that can be followed by head."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, *context: object) -> Tensor:
        return self.factor * x


class Ones(nn.Module):
    def forward(self, x: Tensor, *context: object) -> Tensor:
        return torch.ones_like(x)


class Routed(nn.Module):
    """A feed-forward layer, which tells of its routing beside its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.layer(x), "told"


# With attention 3x, feed-forward 5x and norm 2x. Pre: y = x + 3*2x = 7x, then y + 5*2y = 77x.
# Post: y = 2 (x + 3x) = 8x, then 2 (y + 5y) = 96x.
@pytest.mark.parametrize(("block", "factor"), [(PreNormBlock, 77.0), (PostNormBlock, 96.0)], ids=["pre", "post"])
def test_a_block_places_its_norms_and_residuals(block, factor: float) -> None:
    x = torch.randn(2, 3, 4)
    layer = block(Times(3.0), Routed(Times(5.0)), lambda: Times(2.0), dropout=0.0)
    y, told = layer(x, None, None, None)
    torch.testing.assert_close(y, factor * x)
    assert told == "told"


# Between the two, cross-attention 7x. Pre: 7x, then y + 7*2y = 105x, then y + 5*2y = 1155x.
# Post: 8x, then 2 (y + 7y) = 128x, then 2 (y + 5y) = 1536x.
@pytest.mark.parametrize(("block", "factor"), [(PreNormBlock, 1155.0), (PostNormBlock, 1536.0)], ids=["pre", "post"])
def test_cross_attention_stands_between_the_two(block, factor: float) -> None:
    x = torch.randn(2, 3, 4)
    layer = block(Times(3.0), Routed(Times(5.0)), lambda: Times(2.0), 0.0, Times(7.0))
    torch.testing.assert_close(layer(x, None, None, None, Memory(x, None))[0], factor * x)


@pytest.mark.parametrize("block", [PreNormBlock, PostNormBlock], ids=["pre", "post"])
def test_residual_dropout_scales_what_it_keeps_and_only_while_training(block) -> None:
    """Each sublayer adds 1; at a quarter, it adds 0 with chance 1/4 and 4/3 with chance 3/4, apart from the other."""
    torch.manual_seed(0)
    x = torch.zeros(100, 100, 10)
    layer = block(Ones(), Routed(Ones()), lambda: Times(1.0), dropout=0.25)
    values, counts = layer.train()(x, None, None, None)[0].mul(3).round().unique(return_counts=True)
    assert values.tolist() == [0.0, 4.0, 8.0]
    assert (counts / x.numel()).tolist() == pytest.approx([1 / 16, 6 / 16, 9 / 16], abs=0.01)
    assert torch.equal(layer.eval()(x, None, None, None)[0], torch.full_like(x, 2.0))


def test_each_norm_of_a_block_is_its_own() -> None:
    layer = PreNormBlock(Ones(), Ones(), lambda: nn.LayerNorm(4), dropout=0.0)
    assert layer.attention_norm is not layer.feedforward_norm
