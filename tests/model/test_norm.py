import numpy as np
import pytest
import torch

from tests import reference
from tinylm.model.norm import LayerNorm, RMSNorm

KINDS = [(LayerNorm, reference.layer_norm), (RMSNorm, reference.rms_norm)]
every_kind = pytest.mark.parametrize(("kind", "formula"), KINDS, ids=["layernorm", "rmsnorm"])


@every_kind
@pytest.mark.parametrize("gain", [True, False], ids=["gain", "no-gain"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])  # at 1e-3 the eps is as large as the variance
def test_a_norm_is_its_formula_with_each_part_optional(kind, formula, gain, bias, size) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = kind(6, gain, bias, eps=1e-6).double()
    assert [name for name, _ in norm.named_parameters()] == ["weight"] * gain + ["bias"] * bias
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(generator=generator)
    x = size * (torch.randn(3, 4, 6, generator=generator, dtype=torch.float64) + 0.5)
    parts = [None if part is None else part.detach().numpy() for part in (norm.weight, norm.bias)]
    expected = np.apply_along_axis(lambda row: formula(row, *parts, eps=1e-6), -1, x.numpy())
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@every_kind
def test_a_fresh_norm_has_gains_of_one_and_biases_of_zero(kind, formula) -> None:
    norm = kind(5, gain=True, bias=True)
    assert torch.equal(norm.weight, torch.ones(5))
    assert torch.equal(norm.bias, torch.zeros(5))


@every_kind
def test_a_vector_of_zeros_becomes_the_bias(kind, formula) -> None:
    norm = kind(4, gain=True, bias=True)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([1.0, -2.0, 3.0, 0.5]))
    assert torch.equal(norm(torch.zeros(4)), norm.bias)


def test_layernorm_worked_by_hand() -> None:
    """Mean 3, variance ((1-3)^2 + (3-3)^2 + (5-3)^2 + (3-3)^2) / 4 = 2."""
    x = torch.tensor([1.0, 3.0, 5.0, 3.0], dtype=torch.float64)
    expected = torch.tensor([-2.0, 0.0, 2.0, 0.0], dtype=torch.float64) / 2**0.5
    torch.testing.assert_close(LayerNorm(4, gain=False, eps=0.0)(x), expected)


def test_rmsnorm_worked_by_hand() -> None:
    """The mean of the squares of (1, -7, 5, 5) is 25."""
    x = torch.tensor([1.0, -7.0, 5.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(RMSNorm(4, gain=False, eps=0.0)(x), x / 5)


def test_rmsnorm_takes_half_precision_with_a_gain_in_full() -> None:
    """So autocast hands it over: a token in bf16, the parameter in fp32."""
    x = torch.tensor([1.0, -7.0, 5.0, 5.0], dtype=torch.bfloat16)
    y = RMSNorm(4)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), x.float() / 5, rtol=1e-2, atol=0)


@pytest.mark.parametrize("gain", [True, False], ids=["gain", "no-gain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("rows", [3, 3000])  # a gain's gradient is a sum over all of them
def test_the_gradient_of_rmsnorm_is_that_of_its_formula(gain, dtype, rows) -> None:
    """Differentiated by torch in float64; the entries of a row are not centred, which LayerNorm's gradient assumes."""
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(6, gain, eps=0.1)
    x = (torch.randn(rows, 2, 6, generator=generator) + 0.5).to(dtype).requires_grad_()
    weight = torch.rand(6, generator=generator) + 0.5
    upstream = (torch.randn(rows, 2, 6, generator=generator) + 0.5).to(dtype)
    if norm.weight is not None:
        norm.weight.data = weight.to(torch.promote_types(dtype, torch.float32))
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    exact = exact_x / (exact_x.square().mean(dim=-1, keepdim=True) + 0.1).sqrt() * (exact_weight if gain else 1.0)
    exact.backward(upstream.double())
    y = norm(x)
    y.backward(upstream)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=tolerance, atol=tolerance)
    if norm.weight is not None:
        torch.testing.assert_close(
            norm.weight.grad.double(), exact_weight.grad, rtol=min(tolerance, 1e-4), atol=tolerance
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rmsnorm_is_the_same_with_and_without_a_gradient_to_come(dtype) -> None:
    norm = RMSNorm(6)
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        expected = norm(x)
    torch.testing.assert_close(norm(x), expected)
