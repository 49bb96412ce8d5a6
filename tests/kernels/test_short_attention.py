import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.kernels.absent import Calls
from tinylm.kernels.layers import MAX_UNFUSED_KEYS, dot_product_attention, max_unfused_keys, unfused_attention


@pytest.mark.parametrize(
    ("keys", "masked"), [(128, False), (128, True), (MAX_UNFUSED_KEYS, True), (MAX_UNFUSED_KEYS + 1, False)]
)
def test_bf16_attention_and_its_gradients_equal_the_formula(keys: int, masked: bool) -> None:
    """Two query heads share each key/value head. Reference: the formula in float64 with the rounded inputs.

    bf16 has 8 significant bits, a relative error of up to 0.4 %; the error of a gradient is that of its norm.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, heads, keys, 8, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    visible = torch.ones(keys, keys, dtype=torch.bool).tril()
    if masked:
        visible = (torch.rand(2, 1, keys, keys, generator=generator) < 0.7) | torch.eye(keys, dtype=torch.bool)
    weight = torch.randn(2, 4, keys, 8, generator=generator)
    q, k, v = exact[0], exact[1].repeat_interleave(2, 1), exact[2].repeat_interleave(2, 1)
    scores = torch.einsum("bhqw,bhkw->bhqk", q, k) / 8**0.5
    expected = scores.masked_fill(~visible, -np.inf).softmax(-1) @ v
    (expected * weight).sum().backward()
    found = dot_product_attention(*inputs, visible if masked else None, True)
    (found.float() * weight).sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)
    for rounded, precise in zip(inputs, exact, strict=True):
        assert (rounded.grad.double() - precise.grad).norm() < 0.01 * precise.grad.norm()
        if keys <= 128:  # with more keys, single entries differ by more, with torch's kernel as well
            scale = precise.grad.square().mean().sqrt().item()
            torch.testing.assert_close(rounded.grad.double(), precise.grad, rtol=0.03, atol=0.05 * scale)


def test_attention_is_fused_except_for_few_keys_in_bf16_with_gradients() -> None:
    for keys, dtype, gradient, calls in (
        (MAX_UNFUSED_KEYS, torch.bfloat16, True, 0),
        (MAX_UNFUSED_KEYS + 1, torch.bfloat16, True, 1),
        (MAX_UNFUSED_KEYS, torch.bfloat16, False, 1),
        (MAX_UNFUSED_KEYS, torch.float32, True, 1),
    ):
        q, k, v = (torch.randn(1, 2, keys, 8, dtype=dtype, requires_grad=True) for _ in range(3))
        with torch.set_grad_enabled(gradient), Calls() as found:
            dot_product_attention(q, k, v, None, True)
        assert found.of("scaled_dot_product_attention") == calls, (keys, dtype, gradient)
    assert max_unfused_keys("cpu", "bf16") == MAX_UNFUSED_KEYS
    assert max_unfused_keys("cpu", "fp32") == max_unfused_keys("cuda", "bf16") == 0


def test_unfused_attention_equals_the_fused_kernel_in_fp32() -> None:
    """Fewer queries than keys are the last ones; the reference gets their causal mask explicitly."""
    generator, fused = torch.Generator().manual_seed(0), F.scaled_dot_product_attention
    cases = ((7, True, False), (7, False, False), (2, True, False), (5, True, True))
    for (queries, causal, masked), scale in itertools.product(cases, (None, 1.0)):
        q, k, v = (torch.randn(2, h, t, 8, generator=generator) for h, t in ((4, queries), (2, 7), (2, 7)))
        allowed = torch.rand(2, 1, queries, 7, generator=generator) < 0.7
        allowed[..., -1] = True
        visible = torch.ones(queries, 7, dtype=torch.bool).tril(7 - queries) if causal else torch.ones(queries, 7) > 0
        expected = fused(q, k, v, allowed if masked else visible, scale=scale, enable_gqa=True)
        found = unfused_attention(q, k, v, allowed if masked else None, causal, scale)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
