import itertools
import platform
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.variants import small
from tinylm.kernels import cpu_features, layers
from tinylm.kernels.layers import MIN_ROWS, linear
from tinylm.transformer.build import build_model
from tinylm.transformer.layers import Linear

EPSILONS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An x86 processor that has no instructions for 16-bit formats."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_features, "computes_bf16", lambda: False)
    monkeypatch.setattr(cpu_features, "computes_fp16", lambda: False)
    layers._computes.cache_clear()
    yield monkeypatch
    layers._computes.cache_clear()


@pytest.fixture
def widths(processor: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of the weight in each call of the other kernel."""
    found, original = [], layers._multiply
    processor.setattr(
        layers, "_multiply", lambda x, weight, *bias: (found.append(weight.dtype), original(x, weight, *bias))[1]
    )
    return found


def operands(dtype: torch.dtype, rows: int = MIN_ROWS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 24).to(dtype), torch.randn(7, 24).to(dtype), torch.randn(7).to(dtype)


def test_the_product_is_rounded_once(widths: list[torch.dtype]) -> None:
    """Reference: the formula in float64. One rounding to the format changes a number by at most half its epsilon. Under
    autocast, so is a product in the format of the weights; one in another format is not widened."""
    for (dtype, epsilon), with_bias in itertools.product(EPSILONS.items(), (True, False)):
        x, weight, bias = operands(dtype)
        with torch.no_grad():
            found = linear(x.view(2, -1, 24), weight, bias if with_bias else None)  # (2, N/2, 7)
        expected = x.double() @ weight.double().t() + (bias.double() if with_bias else 0.0)  # (N, 7)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double().view(-1, 7), expected, rtol=epsilon, atol=1e-6)
    assert widths == [torch.float32] * 4
    widths.clear()
    x, weight, _ = operands(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", dtype):
            assert linear(x.float(), weight).dtype == dtype
    assert widths == [torch.float32, torch.bfloat16]


def test_few_rows_gradients_and_processors_with_instructions_keep_the_product_in_16_bits(
    widths: list[torch.dtype], processor: pytest.MonkeyPatch
) -> None:
    """So do processors other than x86. Products of fp32 weights are not converted."""
    x, weight, bias = operands(torch.bfloat16)
    linear(x, weight, bias)
    with torch.no_grad():
        linear(x[1:], weight, bias)
        for owner, name, value in ((cpu_features, "computes_bf16", True), (platform, "machine", "arm64")):
            with processor.context() as patch:
                patch.setattr(owner, name, lambda value=value: value)
                layers._computes.cache_clear()
                linear(x, weight, bias)
        layers._computes.cache_clear()
        assert not layers.is_widened(*operands(torch.float32)[:2])
    assert widths == [torch.bfloat16] * 4


def test_all_large_products_of_a_16_bit_model_are_widened(widths: list[torch.dtype]) -> None:
    """Also the output layer that is the embedding; the logits are those of fp32 weights up to roundings of bf16."""
    model, rounded = (
        build_model(small(context=MIN_ROWS), seed=1).to(dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    model.load_state_dict(rounded.state_dict())
    ids = torch.arange(MIN_ROWS).view(1, -1) % 13
    with torch.no_grad():
        expected = model(ids).hidden @ model.embedding.weight.t()
        widths.clear()
        found = rounded.logits(rounded(ids).hidden)
    assert widths == [torch.float32] * (1 + sum(isinstance(module, Linear) for module in model.modules()))
    torch.testing.assert_close(found.float(), expected, rtol=0.0, atol=0.05 * float(expected.abs().max()))
