import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tinylm.model import linear as module
from tinylm.model.linear import FEWEST_ROWS, Linear, linear

MANY = FEWEST_ROWS
needs_onednn = pytest.mark.skipif(not module.HAS_ONEDNN, reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has its products from another library."""
    monkeypatch.setattr(module, "USES_ONEDNN", module.HAS_ONEDNN)


def make(inputs: int, outputs: int, bias: bool = True) -> Linear:
    torch.manual_seed(1)
    return Linear(inputs, outputs, bias)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what oneDNN was given first, a product each."""
    seen: list[tuple[int, ...]] = []
    real = module.onednn_product

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(tuple(x.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(module, "onednn_product", spy)
    return seen


@given(
    rows=st.integers(1, 3 * MANY),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    leading=st.booleans(),
    strided=st.booleans(),
)
def test_outputs_and_gradients_are_the_formulas_in_float64(
    rows: int, inputs: int, outputs: int, bias: bool, leading: bool, strided: bool
) -> None:
    """y = x W^T + b, dx = g W, dW = g^T x, db = sum g; `strided`: rows that do not lie together, and a g of one row."""
    layer = make(inputs, outputs, bias)
    x = torch.randn(*((1, rows) if leading else (rows,)), inputs)
    if strided:
        x = torch.stack((x, torch.randn_like(x)), dim=-1)[..., 0]
    x.requires_grad_()
    y = layer(x)
    g = torch.randn(outputs).expand_as(y) if strided else torch.randn_like(y)
    y.backward(g)
    rows64, w64, g64 = (t.detach().double().reshape(-1, t.shape[-1]).numpy() for t in (x, layer.weight, g))
    expected = rows64 @ w64.T + (0 if layer.bias is None else layer.bias.detach().double().numpy())
    room = {"rtol": 1e-5, "atol": 1e-5 * (1 + max(inputs, outputs, rows) ** 0.5)}
    assert x.grad is not None and layer.weight.grad is not None
    np.testing.assert_allclose(y.detach().reshape(-1, outputs).double().numpy(), expected, **room)
    np.testing.assert_allclose(x.grad.reshape(-1, inputs).double().numpy(), g64 @ w64, **room)
    np.testing.assert_allclose(layer.weight.grad.double().numpy(), g64.T @ rows64, **room)
    if layer.bias is not None:
        assert layer.bias.grad is not None
        np.testing.assert_allclose(layer.bias.grad.double().numpy(), g64.sum(axis=0), **room)


@needs_onednn
def test_fp32_on_a_cpu_is_computed_by_onednn_forward_and_backward(products: list[tuple[int, ...]]) -> None:
    layer, x = make(8, 6), torch.randn(2, MANY, 8, requires_grad=True)
    layer(x).sum().backward()
    assert products == [(2, MANY, 8), (2, MANY, 6), (6, 2 * MANY)]


@needs_onednn
@pytest.mark.parametrize("outputs, first", [(6, 6), (8, 8), (12, 8)])
def test_the_smaller_side_of_a_weights_gradient_is_the_one_that_is_copied(
    outputs: int, first: int, products: list[tuple[int, ...]]
) -> None:
    layer = make(8, outputs)
    layer(torch.randn(MANY, 8)).sum().backward()
    assert products[1:] == [(first, MANY)]


@needs_onednn
def test_what_needs_no_gradient_costs_none(products: list[tuple[int, ...]]) -> None:
    layer, x = make(8, 6).requires_grad_(False), torch.randn(MANY, 8, requires_grad=True)
    layer(x).sum().backward()
    assert products == [(MANY, 8), (MANY, 6)]
    assert layer.weight.grad is None and layer.bias.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_number_formats_are_torchs_own(dtype: torch.dtype, products: list[tuple[int, ...]]) -> None:
    layer, x = make(8, 6).to(dtype), torch.randn(MANY, 8).to(dtype)
    assert layer(x).equal(F.linear(x, layer.weight, layer.bias))
    assert products == []


def test_autocast_decides_as_for_any_linear_layer(products: list[tuple[int, ...]]) -> None:
    layer, x = make(8, 6), torch.randn(MANY, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert products == []


def test_few_rows_and_a_processor_with_a_faster_library_are_torchs_own(
    products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make(8, 6)
    layer(torch.randn(MANY - 1, 8))
    monkeypatch.setattr(module, "USES_ONEDNN", False)
    layer(torch.randn(MANY, 8))
    assert products == []


@pytest.mark.parametrize(
    ("capabilities", "mkl", "suits"),
    [
        ({"cpu_name": "Intel Xeon"}, True, True),
        ({"cpu_name": "Intel Xeon"}, False, False),
        ({"cpu_name": "AMD EPYC"}, True, False),
        ({}, True, False),
        (None, True, False),
    ],
)
def test_mkl_is_left_to_processors_of_intels(
    capabilities: dict[str, str] | None, mkl: bool, suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`None`: a torch that cannot tell."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    if capabilities is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert module._suits_mkl() == suits


def test_a_compiled_layer_takes_the_same_gradient_step() -> None:
    layer, x = make(8, 6), torch.randn(MANY, 8, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x).square().sum(), (x, layer.weight))
    expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_an_input_that_does_not_lie_in_one_piece_is_read_right() -> None:
    layer, wide = make(8, 6), torch.randn(8, 2 * MANY)
    x = wide.t()[::2]
    torch.testing.assert_close(layer(x), F.linear(x.contiguous(), layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


def test_a_weight_that_two_layers_share_gets_both_gradients() -> None:
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(MANY, 8)
    linear(linear(x, weight), weight).sum().backward()
    exact = weight.detach().double().requires_grad_()
    F.linear(F.linear(x.double(), exact), exact).sum().backward()
    assert weight.grad is not None and exact.grad is not None
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-4, atol=1e-3)
