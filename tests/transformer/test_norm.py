import itertools

import numpy as np
import torch

from tests import reference
from tinylm.transformer.layers import LayerNorm, RMSNorm, UnitOffsetRMSNorm


def test_a_norm_equals_its_formula_with_and_without_gain_and_bias() -> None:
    """A unit offset norm has a gain of one plus its weight."""
    generator = torch.Generator().manual_seed(0)
    kinds = ((LayerNorm, True), (LayerNorm, False), (RMSNorm, True), (RMSNorm, False), (UnitOffsetRMSNorm, None))
    scales = (1e-3, 1.0, 1e3)  # at 1e-3 the eps is as large as the variance
    for (kind, gain), bias, scale in itertools.product(kinds, (True, False), scales):
        norm = (kind(6, bias, eps=1e-6) if gain is None else kind(6, gain, bias, eps=1e-6)).double()
        assert [name for name, _ in norm.named_parameters()] == ["weight"] * (gain is not False) + ["bias"] * bias
        assert gain is not None or not norm.weight.any()
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.normal_(generator=generator)
        x = scale * (torch.randn(3, 4, 6, generator=generator, dtype=torch.float64) + 0.5)
        parts = [None if part is None else part.detach().numpy() for part in (norm.weight, norm.bias)]
        parts[0] = 1 + parts[0] if gain is None else parts[0]
        formula = reference.layer_norm if kind is LayerNorm else reference.rms_norm
        expected = np.apply_along_axis(lambda row: formula(row, *parts, eps=1e-6), -1, x.numpy())  # noqa: B023, called at once
        np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_rmsnorm_takes_bf16_inputs_with_an_fp32_gain() -> None:
    """Under autocast, hidden vectors are bf16 and parameters fp32."""
    x = torch.tensor([1.0, -7.0, 5.0, 5.0], dtype=torch.bfloat16)
    y = RMSNorm(4)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), x.float() / 5, rtol=1e-2, atol=0)


def test_a_gain_of_one_plus_a_small_weight_is_not_rounded_to_one() -> None:
    """1 + 2^-9 is 1 in bf16. A product of 300 features rounded down or up shows whether it was kept."""
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() / x.double().square().mean(dim=-1, keepdim=True).add(1e-6).sqrt() * (1 + 2**-9)
    for weights, gradients in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        norm = UnitOffsetRMSNorm(300, eps=1e-6)
        torch.nn.init.constant_(norm.weight, 2**-9)
        with torch.set_grad_enabled(gradients):
            y = norm.to(weights)(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, exact.bfloat16()), (weights, gradients)
