import pytest
import torch
import torch.nn.functional as F

from tests.kernels.absent import NamespaceWithout, loaded_again
from tinylm.kernels import rms_norm as module


@pytest.fixture(params=["kernel", "fallback"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if request.param == "kernel":
        return module
    monkeypatch.setattr(torch.ops, "aten", NamespaceWithout(torch.ops.aten, "native_layer_norm_backward"))
    return loaded_again(module)


@pytest.mark.parametrize("gain", [True, False], ids=["gain", "no-gain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("rows", [3, 3000])  # the gradient of the gain is a sum over all rows
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_output_and_gradients_equal_the_formula(gain, dtype, rows, kernel, stored) -> None:
    """Reference: the formula differentiated by torch in float64. Rows have a mean, which must not be subtracted."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(rows, 2, 6, generator=generator) + 0.5).to(dtype).requires_grad_()
    weight = (torch.rand(6, generator=generator) + 0.5).to(stored) if gain else None
    upstream = (torch.randn(rows, 2, 6, generator=generator) + 0.5).to(dtype)
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.double().requires_grad_() if gain else None
    exact = exact_x / (exact_x.square().mean(dim=-1, keepdim=True) + 0.1).sqrt() * (exact_weight if gain else 1.0)
    if gain:
        weight = weight.to(torch.promote_types(dtype, stored) if stored == torch.float32 else stored).requires_grad_()
    exact.backward(upstream.double())
    y = kernel.rms_norm(x, weight, 0.1)
    y.backward(upstream)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=tolerance, atol=tolerance)
    if gain:
        rtol = min(tolerance, 1e-4) if kernel is module else tolerance  # the fallback sums in bf16
        rtol = rtol if stored == torch.float32 else max(rtol, 2**-8)  # the gradient is rounded to the weight's dtype
        torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=rtol, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_result_equals_that_of_torch_with_and_without_gradients(dtype) -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.rand(6)
    expected = F.rms_norm(x, (6,), weight.to(dtype), 1e-6)
    with torch.no_grad():
        torch.testing.assert_close(module.rms_norm(x, weight, 1e-6), expected)
    torch.testing.assert_close(module.rms_norm(x, weight, 1e-6), expected)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(4, 6).bfloat16().requires_grad_(), torch.rand(6).bfloat16()
    module.rms_norm(x, weight, 1e-6).sum().backward()
    assert x.grad is not None and weight.grad is None
