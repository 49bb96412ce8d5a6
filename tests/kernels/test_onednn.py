import contextlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from tests.kernels.absent import NamespaceWithout, loaded_again
from tinylm.kernels import cpu
from tinylm.kernels import layers as module
from tinylm.kernels.layers import MIN_ROWS, is_mkl_faster
from tinylm.transformer.layers import Linear

needs_onednn = pytest.mark.skipif(not module._AVAILABLE, reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def preferred_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN even on a processor with a faster MKL."""
    monkeypatch.setattr(module, "PREFERS_ONEDNN", module._AVAILABLE)


def make(inputs: int, outputs: int, bias: bool = True) -> Linear:
    torch.manual_seed(1)
    return Linear(inputs, outputs, bias)


@contextlib.contextmanager
def products() -> Iterator[list[tuple[int, ...]]]:
    """The shape of the first operand of each call of oneDNN, as torch's profiler records it."""
    shapes: list[tuple[int, ...]] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        yield shapes
    events = [event for event in profiled.events() if event.name == "mkldnn::_linear_pointwise"]
    shapes += [tuple(event.input_shapes[0]) for event in sorted(events, key=lambda event: event.time_range.start)]


@given(
    rows=st.integers(1, 3 * MIN_ROWS),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    leading=st.booleans(),
    strided=st.booleans(),
)
def test_outputs_and_gradients_equal_the_formulas_in_float64(
    rows: int, inputs: int, outputs: int, bias: bool, leading: bool, strided: bool
) -> None:
    """y = x W^T + b, dx = g W, dW = g^T x, db = sum g. `strided`: x is not contiguous and g is an expanded row."""
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
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * (1 + max(inputs, outputs, rows) ** 0.5)}
    assert x.grad is not None and layer.weight.grad is not None
    np.testing.assert_allclose(y.detach().reshape(-1, outputs).double().numpy(), expected, **tolerance)
    np.testing.assert_allclose(x.grad.reshape(-1, inputs).double().numpy(), g64 @ w64, **tolerance)
    np.testing.assert_allclose(layer.weight.grad.double().numpy(), g64.T @ rows64, **tolerance)
    if layer.bias is not None:
        assert layer.bias.grad is not None
        np.testing.assert_allclose(layer.bias.grad.double().numpy(), g64.sum(axis=0), **tolerance)


@needs_onednn
def test_fp32_on_a_cpu_is_computed_by_onednn_forward_and_backward() -> None:
    """The smaller operand of the weight gradient comes first. Gradients that are not required are not computed."""
    x = torch.randn(2, MIN_ROWS, 8, requires_grad=True)
    for outputs, first in ((6, 6), (8, 8), (12, 8)):
        with products() as shapes:
            make(8, outputs)(x).sum().backward()
        assert shapes == [(2, MIN_ROWS, 8), (2, MIN_ROWS, outputs), (first, 2 * MIN_ROWS)]
    frozen = make(8, 6).requires_grad_(False)
    with products() as shapes:
        make(8, 6)(x.detach()).sum().backward()
        frozen(x).sum().backward()
    assert shapes == [(2, MIN_ROWS, 8), (6, 2 * MIN_ROWS), (2, MIN_ROWS, 8), (2, MIN_ROWS, 6)]
    assert frozen.weight.grad is None and frozen.bias.grad is None


def test_other_number_formats_few_rows_and_processors_with_a_faster_library_use_torchs_linear_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        layer, x = make(8, 6).to(dtype), torch.randn(MIN_ROWS, 8).to(dtype)
        assert layer(x).equal(F.linear(x, layer.weight, layer.bias))
    layer = make(8, 6)
    with products() as shapes:
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(MIN_ROWS, 8)).dtype == torch.bfloat16
        layer(torch.randn(MIN_ROWS - 1, 8))
        monkeypatch.setattr(module, "PREFERS_ONEDNN", False)
        layer(torch.randn(MIN_ROWS, 8))
    assert shapes == []


@needs_onednn
def test_processors_on_which_mkl_is_faster_keep_it_if_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_mkl_faster(*row) for row in itertools.product((True, False), repeat=2)] == [True, True, False, True]
    faster = is_mkl_faster(cpu.is_intel(), cpu.has_avx512())
    for has_mkl in (True, False):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda found=has_mkl: found)
        assert (not has_mkl or not faster) == loaded_again(module).PREFERS_ONEDNN


def test_without_the_private_operation_torchs_linear_function_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", NamespaceWithout(torch.ops.mkldnn, "_linear_pointwise"))
    portable = loaded_again(module)
    assert not portable.PREFERS_ONEDNN
    x, weight, bias = torch.randn(MIN_ROWS, 8), torch.randn(6, 8, requires_grad=True), torch.randn(6)
    found = portable.linear(x, weight, bias)
    assert found.equal(F.linear(x, weight, bias)) and found.requires_grad


def test_a_compiled_layer_has_the_same_gradients() -> None:
    layer, x = make(8, 6), torch.randn(MIN_ROWS, 8, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x).square().sum(), (x, layer.weight))
    expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
