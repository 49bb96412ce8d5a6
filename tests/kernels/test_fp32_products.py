import itertools
import platform

import pytest
import torch
from torch import Tensor

from tests.kernels.absent import Calls, loaded_again
from tests.variants import small
from tinylm.kernels import layers
from tinylm.kernels.layers import HAS_INSTRUCTIONS, MIN_ROWS, linear
from tinylm.transformer.build import build_model
from tinylm.transformer.layers import Linear

EPSILONS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has no instructions for 16-bit formats."""
    for dtype in EPSILONS:
        monkeypatch.setitem(HAS_INSTRUCTIONS, dtype, False)


class Widths(Calls):
    """The dtype of the weight in each product of a linear layer."""

    @property
    def widths(self) -> list[torch.dtype]:
        return [dtypes[1] for name, dtypes in self.found if name in ("linear", "_linear_pointwise.default")]


def operands(dtype: torch.dtype, rows: int = MIN_ROWS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 24).to(dtype), torch.randn(7, 24).to(dtype), torch.randn(7).to(dtype)


def test_the_product_is_rounded_once() -> None:
    """Reference: the formula in float64. One rounding to the format changes a number by at most half its epsilon. Under
    autocast, so is a product in the format of the weights; one in another format is not widened."""
    for (dtype, epsilon), with_bias in itertools.product(EPSILONS.items(), (True, False)):
        x, weight, bias = operands(dtype)
        with torch.no_grad(), Widths() as calls:
            found = linear(x.view(2, -1, 24), weight, bias if with_bias else None)  # (2, N/2, 7)
        assert calls.widths == [torch.float32]
        expected = x.double() @ weight.double().t() + (bias.double() if with_bias else 0.0)  # (N, 7)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double().view(-1, 7), expected, rtol=epsilon, atol=1e-6)
    x, weight, _ = operands(torch.bfloat16)
    for dtype, width in ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)):
        with torch.no_grad(), torch.autocast("cpu", dtype), Widths() as calls:
            assert linear(x.float(), weight).dtype == dtype
        assert calls.widths == [width]


def test_few_rows_gradients_and_processors_with_instructions_keep_the_product_in_16_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So do processors other than x86. Products of fp32 weights are not converted."""
    x, weight, bias = operands(torch.bfloat16)
    with Widths() as calls:
        linear(x, weight, bias)
        with torch.no_grad():
            linear(x[1:], weight, bias)
            assert not layers.is_widened(*operands(torch.float32)[:2])
            monkeypatch.setitem(HAS_INSTRUCTIONS, torch.bfloat16, True)
            linear(x, weight, bias)
    assert calls.widths == [torch.bfloat16] * 3
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert all(loaded_again(layers).HAS_INSTRUCTIONS.values())


def test_all_large_products_of_a_16_bit_model_are_widened() -> None:
    """Also the output layer that is the embedding; the logits are those of fp32 weights up to roundings of bf16."""
    model, rounded = (
        build_model(small(context=MIN_ROWS), seed=1).to(dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    model.load_state_dict(rounded.state_dict())
    ids = torch.arange(MIN_ROWS).view(1, -1) % 13
    with torch.no_grad():
        expected = model(ids).hidden @ model.embedding.weight.t()
        with Widths() as calls:
            found = rounded.logits(rounded(ids).hidden)
    assert calls.widths == [torch.float32] * (1 + sum(isinstance(module, Linear) for module in model.modules()))
    torch.testing.assert_close(found.float(), expected, rtol=0.0, atol=0.05 * float(expected.abs().max()))
