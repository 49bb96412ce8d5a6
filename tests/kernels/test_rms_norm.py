import itertools
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.absent import NamespaceWithout, loaded_again
from tinylm.kernels import rms_norm as module


@pytest.fixture(params=["kernel", "fallback"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "kernel":
        return module
    monkeypatch.setattr(torch.ops, "aten", NamespaceWithout(torch.ops.aten, "native_layer_norm_backward"))
    return loaded_again(module)


def test_output_and_gradients_equal_the_formula(kernel: ModuleType) -> None:
    """Reference: the formula differentiated by torch in float64. Rows have a mean, which must not be subtracted.

    The gradient of the gain is a sum over all rows. A gain may be stored in another number format than the inputs.
    """
    half = (torch.bfloat16, torch.float16)
    formats = itertools.product((torch.float64, torch.float32, torch.bfloat16), (None, torch.float32, *half), (3, 3000))
    for dtype, stored, rows in formats:
        compare(kernel, dtype, stored, rows)


def compare(kernel: ModuleType, dtype: torch.dtype, stored: torch.dtype | None, rows: int) -> None:
    """Compare with the formula; `stored`: the number format of the gain, or None without one."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(rows, 2, 6, generator=generator) + 0.5).to(dtype).requires_grad_()
    weight = None if stored is None else (torch.rand(6, generator=generator) + 0.5).to(stored)
    upstream = (torch.randn(rows, 2, 6, generator=generator) + 0.5).to(dtype)
    exact_x = x.detach().double().requires_grad_()
    exact_weight = None if weight is None else weight.double().requires_grad_()
    exact = exact_x / (exact_x.square().mean(dim=-1, keepdim=True) + 0.1).sqrt()
    exact = exact if exact_weight is None else exact * exact_weight
    if weight is not None:
        weight = weight.to(torch.promote_types(dtype, stored) if stored == torch.float32 else stored).requires_grad_()
    exact.backward(upstream.double())
    y = kernel.rms_norm(x, weight, 0.1)
    y.backward(upstream)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=tolerance, atol=tolerance)
    if weight is not None:
        rtol = min(tolerance, 1e-4) if kernel is module else tolerance  # the fallback sums in bf16
        rtol = rtol if stored == torch.float32 else max(rtol, 2**-8)  # the gradient is rounded to the weight's dtype
        torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=rtol, atol=tolerance)


def test_the_result_equals_that_of_torch_with_and_without_gradients() -> None:
    """A frozen weight gets no gradient."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        weight = torch.rand(6)
        expected = F.rms_norm(x, (6,), weight.to(dtype), 1e-6)
        with torch.no_grad():
            torch.testing.assert_close(module.rms_norm(x, weight, 1e-6), expected)
        found = module.rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        assert x.grad is not None and weight.grad is None
