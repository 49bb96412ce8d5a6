import numpy as np
import pytest
import torch

from tests import reference
from tinylm.model.norm import LayerNorm, RMSNorm, UnitOffsetRMSNorm

KINDS = [(LayerNorm, reference.layer_norm), (RMSNorm, reference.rms_norm)]
every_kind = pytest.mark.parametrize(("kind", "formula"), KINDS, ids=["layernorm", "rmsnorm"])


@every_kind
@pytest.mark.parametrize("gain", [True, False], ids=["gain", "no-gain"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])  # at 1e-3 the eps is as large as the variance
def test_a_norm_equals_its_formula_with_and_without_gain_and_bias(kind, formula, gain, bias, scale) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = kind(6, gain, bias, eps=1e-6).double()
    assert [name for name, _ in norm.named_parameters()] == ["weight"] * gain + ["bias"] * bias
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(generator=generator)
    x = scale * (torch.randn(3, 4, 6, generator=generator, dtype=torch.float64) + 0.5)
    parts = [None if part is None else part.detach().numpy() for part in (norm.weight, norm.bias)]
    expected = np.apply_along_axis(lambda row: formula(row, *parts, eps=1e-6), -1, x.numpy())
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@every_kind
def test_a_fresh_norm_has_gains_of_one_and_biases_of_zero(kind, formula) -> None:
    norm = kind(5, gain=True, bias=True)
    assert torch.equal(norm.weight, torch.ones(5))
    assert torch.equal(norm.bias, torch.zeros(5))


@every_kind
def test_the_norm_of_a_zero_vector_is_the_bias(kind, formula) -> None:
    norm = kind(4, gain=True, bias=True)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([1.0, -2.0, 3.0, 0.5]))
    assert torch.equal(norm(torch.zeros(4)), norm.bias)


def test_layernorm_equals_values_worked_out_by_hand() -> None:
    """Mean 3, variance ((1-3)^2 + (3-3)^2 + (5-3)^2 + (3-3)^2) / 4 = 2."""
    x = torch.tensor([1.0, 3.0, 5.0, 3.0], dtype=torch.float64)
    expected = torch.tensor([-2.0, 0.0, 2.0, 0.0], dtype=torch.float64) / 2**0.5
    torch.testing.assert_close(LayerNorm(4, gain=False, eps=0.0)(x), expected)


def test_rmsnorm_equals_values_worked_out_by_hand() -> None:
    """The mean of the squares of (1, -7, 5, 5) is 25."""
    x = torch.tensor([1.0, -7.0, 5.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(RMSNorm(4, gain=False, eps=0.0)(x), x / 5)


def test_rmsnorm_takes_bf16_inputs_with_an_fp32_gain() -> None:
    """Under autocast, hidden vectors are bf16 and parameters fp32."""
    x = torch.tensor([1.0, -7.0, 5.0, 5.0], dtype=torch.bfloat16)
    y = RMSNorm(4)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), x.float() / 5, rtol=1e-2, atol=0)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_unit_offset_norm_has_a_gain_of_one_plus_its_weight(bias: bool) -> None:
    norm = UnitOffsetRMSNorm(6, bias, eps=1e-3).double()
    x = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = np.apply_along_axis(lambda row: reference.rms_norm(row, eps=1e-3), -1, x.numpy())
    np.testing.assert_allclose(norm(x).detach().numpy(), plain, rtol=1e-12)  # a fresh weight is 0
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    parts = [1 + norm.weight.detach().numpy(), norm.bias.detach().numpy() if bias else None]
    expected = np.apply_along_axis(lambda row: reference.rms_norm(row, *parts, eps=1e-3), -1, x.numpy())
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_gain_of_one_plus_a_small_weight_is_not_rounded_to_one(weights: torch.dtype, gradients: bool) -> None:
    """1 + 2^-9 is 1 in bf16. A product of 300 features rounded down or up shows whether it was kept."""
    norm = UnitOffsetRMSNorm(300, eps=1e-6)
    torch.nn.init.constant_(norm.weight, 2**-9)
    x = (torch.randn(40, 300, generator=torch.Generator().manual_seed(0))).bfloat16()
    with torch.set_grad_enabled(gradients):
        y = norm.to(weights)(x)
    exact = x.double() / x.double().square().mean(dim=-1, keepdim=True).add(1e-6).sqrt() * (1 + 2**-9)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())
