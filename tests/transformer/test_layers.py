"""Norms and the cross-entropy, compared with the formulas of reference.py and reference_parts.py in float64."""

import itertools

import numpy as np
import pytest
import torch

from tests import reference, reference_parts
from tinylm.config.presets import make_model_config
from tinylm.transformer.build import build_model
from tinylm.transformer.layers import IGNORED, CrossEntropy, LayerNorm, RMSNorm, UnitOffsetRMSNorm, as_product_input


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


def test_all_products_of_a_sublayer_read_one_rounded_input_under_autocast_and_the_input_itself_otherwise() -> None:
    model = build_model(make_model_config(vocab_size=8, preset="modern", size="nano", layers=1))
    (block,), inputs = model.layers, {}
    for sublayer, names in ((block.attention, "qkv"), (block.feedforward, ("gate", "up"))):
        for name in names:
            projection = sublayer.get_submodule(f"{name}_proj")
            projection.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.tensor([[1, 2, 3]]))
        assert as_product_input(torch.ones(2, dtype=torch.float64)).dtype == torch.float64
    assert {x.dtype for x in inputs.values()} == {torch.bfloat16}
    assert len({id(inputs[name]) for name in "qkv"}) == 1 and inputs["gate"] is inputs["up"]
    model(torch.tensor([[1, 2, 3]]))
    assert {x.dtype for x in inputs.values()} == {torch.float32}


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


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_each_row_of_targets_has_its_cross_entropy(smoothing: float) -> None:
    """The second row of targets is not smoothed, and those of its targets that are IGNORED do not count."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 13, generator=rng, dtype=torch.float64)
    targets = torch.randint(13, (2, 30), generator=rng)
    targets[1, 1::3] = IGNORED
    counted = targets[1] != IGNORED
    pairs = zip(logits.numpy(), targets[0].tolist(), strict=True)
    first = sum(reference_parts.label_smoothed(*pair, smoothing) for pair in pairs)
    mean = reference.cross_entropy(logits[counted].numpy(), targets[1, counted].tolist())
    found = CrossEntropy()(logits, targets, smoothing)
    assert [loss.item() for loss in found] == pytest.approx([first, mean * int(counted.sum())], rel=1e-12)


def test_logits_in_16_bits_are_summed_in_single_precision() -> None:
    """Logits are 3 for id 0 and 0 for the other twelve: the loss of id 0 is log(e^3 + 12) - 3."""
    logits = torch.zeros(2000, 13, dtype=torch.bfloat16)
    logits[:, 0] = 3
    (loss,) = CrossEntropy()(logits, torch.zeros(1, 2000, dtype=torch.long), 0.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(2000 * (np.log(np.exp(3) + 12) - 3), rel=1e-5)
