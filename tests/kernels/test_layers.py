"""Layers of tinylm's own, compared with their formulas and with torch's."""

import itertools
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.kernels.absent import Calls, NamespaceWithout, loaded_again
from tinylm.kernels import layers as module
from tinylm.kernels.layers import (
    MAX_UNFUSED_KEYS,
    dot_product_attention,
    max_unfused_keys,
    random_dropout,
    unfused_attention,
)


@pytest.mark.parametrize(("p", "dtype"), [(0.05, torch.float32), (0.3, torch.bfloat16), (0.9, torch.float64)])
def test_entries_are_zero_with_probability_p_and_scaled_otherwise(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.full((501, 799), 2.0, dtype=dtype, requires_grad=True)
    y = random_dropout(x, p)
    assert y.dtype == dtype
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 2 / (1 - p)))
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=4 * (p * (1 - p) / x.numel()) ** 0.5)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)


def test_the_mean_stays_however_near_to_1_the_probability_is() -> None:
    """At least 2^-16 of the entries are kept on a CPU: about 61 of 4,000,000."""
    for p in (0.9999, 0.999999, 1 - 1e-12):
        torch.manual_seed(0)
        assert 0.5 < random_dropout(torch.ones(4_000_000), p).mean().item() < 1.5


def test_neighbouring_entries_and_calls_are_independent_and_a_seed_determines_any_number_of_them() -> None:
    """Four entries share 64 random bits, 16 each."""
    torch.manual_seed(0)
    one, other = ((random_dropout(torch.ones(400_000), 0.5) != 0).double() for _ in range(2))
    for pair in ((one, other), *((one[lag:], one[:-lag]) for lag in (1, 2, 3, 4, 8))):
        assert torch.corrcoef(torch.stack(pair))[0, 1].abs() < 0.01
    for size in (0, 1, 3, 5, 1000):
        first, again = (random_dropout(torch.ones(size, 1), 0.3) for _ in range(2) if torch.manual_seed(1))
        assert first.shape == (size, 1) and torch.equal(first, again)


def test_other_devices_use_the_dropout_of_torch() -> None:
    with Calls() as calls:
        random_dropout(torch.empty(3, device="meta"), 0.3)
    assert calls.of("dropout") == 1
    with Calls() as calls:
        random_dropout(torch.empty(3), 0.3)
    assert calls.of("dropout") == 0


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # raised by imports of torch's compiler
def test_compiled_code_draws_once_for_each_call_and_keeps_the_mask_for_the_gradient() -> None:
    torch.manual_seed(0)
    compiled = torch.compile(
        lambda x: (random_dropout(x, 0.5), random_dropout(x, 0.5)), backend="aot_eager_decomp_partition"
    )
    x = torch.ones(400, 1000, requires_grad=True)
    one, other = compiled(x)
    zeros = torch.stack((one.detach() == 0, other.detach() == 0)).flatten(1).double()
    assert torch.corrcoef(zeros)[0, 1].abs() < 0.01
    (one + 3 * other).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (one + 3 * other).detach())


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
    with torch.no_grad():
        without = dot_product_attention(*inputs, visible if masked else None, True)
    for output in (found, without):
        torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)
    for rounded, precise in zip(inputs, exact, strict=True):
        assert (rounded.grad.double() - precise.grad).norm() < 0.01 * precise.grad.norm()
        if keys <= 128:  # with more keys, single entries differ by more, with torch's kernel as well
            scale = precise.grad.square().mean().sqrt().item()
            torch.testing.assert_close(rounded.grad.double(), precise.grad, rtol=0.03, atol=0.05 * scale)


@pytest.mark.parametrize("has_amx", [True, False])
def test_attention_is_fused_except_for_few_keys_in_bf16(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, it is also fused for one query, and for all on a processor with AMX."""
    monkeypatch.setattr(module, "_HAS_AMX", has_amx)
    for queries, keys, dtype, gradient, calls in (
        (MAX_UNFUSED_KEYS, MAX_UNFUSED_KEYS, torch.bfloat16, True, 0),
        (MAX_UNFUSED_KEYS + 1, MAX_UNFUSED_KEYS + 1, torch.bfloat16, True, 1),
        (MAX_UNFUSED_KEYS, MAX_UNFUSED_KEYS, torch.bfloat16, False, int(has_amx)),
        (1, MAX_UNFUSED_KEYS, torch.bfloat16, False, 1),
        (MAX_UNFUSED_KEYS, MAX_UNFUSED_KEYS, torch.float32, True, 1),
        (MAX_UNFUSED_KEYS, MAX_UNFUSED_KEYS, torch.float32, False, 1),
    ):
        q, k, v = (torch.randn(1, 2, n, 8, dtype=dtype, requires_grad=True) for n in (queries, keys, keys))
        with torch.set_grad_enabled(gradient), Calls() as found:
            dot_product_attention(q, k, v, None, True)
        assert found.of("scaled_dot_product_attention") == calls, (queries, keys, dtype, gradient)
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
