import itertools
from types import ModuleType

import pytest
import torch

from tests.kernels.absent import NamespaceWithout, loaded_again
from tinylm.kernels import layers as module


@pytest.fixture(params=["kernel", "fallback"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "kernel":
        return module
    monkeypatch.setattr(torch.ops, "aten", NamespaceWithout(torch.ops.aten, "native_layer_norm_backward"))
    return loaded_again(module)


def test_output_and_gradients_equal_the_formula(kernel: ModuleType) -> None:
    """Reference: the formula differentiated by torch in float64. Rows have a mean, which must not be subtracted.

    The gradient of the gain is a sum over all rows. A gain may be stored in another number format than the inputs; a
    frozen one gets no gradient.
    """
    half, generator = (torch.bfloat16, torch.float16), torch.Generator()
    formats = itertools.product((torch.float64, torch.float32, torch.bfloat16), (None, torch.float32, *half), (3, 3000))
    for dtype, stored, rows in formats:
        generator.manual_seed(0)
        x = (torch.randn(rows, 2, 6, generator=generator) + 0.5).to(dtype).requires_grad_()
        weight = None if stored is None else (torch.rand(6, generator=generator) + 0.5).to(stored)
        upstream = (torch.randn(rows, 2, 6, generator=generator) + 0.5).to(dtype)
        exact_x = x.detach().double().requires_grad_()
        exact_weight = None if weight is None else weight.double().requires_grad_()
        exact = exact_x / (exact_x.square().mean(dim=-1, keepdim=True) + 0.1).sqrt()
        exact = exact if exact_weight is None else exact * exact_weight
        if weight is not None:
            weight = weight.to(torch.promote_types(dtype, stored) if stored == torch.float32 else stored)
            weight.requires_grad_(rows == 3000)
        exact.backward(upstream.double())
        y = kernel.rms_norm(x, weight, 0.1)
        y.backward(upstream)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        with torch.no_grad():
            without = kernel.rms_norm(x, weight, 0.1)
        for found, expected in ((y, exact), (without, exact), (x.grad, exact_x.grad)):
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        if weight is not None and rows == 3000:
            rtol = min(tolerance, 1e-4) if kernel is module else tolerance  # the fallback sums in bf16
            rtol = (
                rtol if stored == torch.float32 else max(rtol, 2**-8)
            )  # the gradient is rounded to the weight's dtype
            torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=rtol, atol=tolerance)
        assert weight is None or (weight.grad is None) == (rows == 3)
