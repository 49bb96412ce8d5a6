"""Reference: the formula with the quantized weights in float64."""

import itertools
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.kernels.absent import NamespaceWithout, loaded_again
from tinylm.kernels import int8

ROUNDED, TRUNCATED = 2**-9, 2**-8  # maximum relative errors of rounding to bf16, and of truncating to it


@pytest.fixture(params=["kernel", "fallback"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "kernel":
        return int8
    monkeypatch.setattr(torch.ops, "aten", NamespaceWithout(torch.ops.aten, "_weight_int8pack_mm"))
    return loaded_again(int8)


def test_outputs_equal_the_formula_within_the_precision_of_bf16(kernel: ModuleType) -> None:
    shapes = ((16, 16), (1, 5), (7, 1), (33, 64), (100, 3))
    for (inputs, outputs), leading in itertools.product(shapes, ((), (3,), (2, 5))):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        scale = torch.rand(outputs, generator=generator).bfloat16()
        x = torch.randn(*leading, inputs, generator=generator)
        found = kernel.linear(x, kernel.align(weight), scale)
        assert found.shape == (*leading, outputs)
        rows, weights, scales = (t.double().numpy() for t in (x.reshape(-1, inputs), weight, scale))
        exact = rows @ weights.T * scales
        rounding = np.abs(rows) @ np.abs(weights).T * ROUNDED + np.abs(rows @ weights.T) * TRUNCATED
        error = np.abs(found.reshape(-1, outputs).double().numpy() - exact)
        np.testing.assert_array_less(error, rounding * scales * 1.05 + 1e-6)


def test_a_weight_is_padded_with_zeros_to_a_multiple_of_16_inputs() -> None:
    for inputs, aligned in ((1, 16), (15, 16), (16, 16), (17, 32)):
        found = int8.align(torch.ones(3, inputs, dtype=torch.int8))
        assert found.shape == (3, aligned) and found.sum() == 3 * inputs


def test_a_weight_and_an_input_may_be_stored_by_columns(kernel: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (32, 48), generator=generator, dtype=torch.int8).T
    x, scale = torch.randint(-9, 9, (32, 3), generator=generator).float().T, torch.ones(48, dtype=torch.bfloat16)
    expected = x.double() @ weight.double().T
    for dtype in (torch.float32, torch.bfloat16):
        found = kernel.linear(x.to(dtype), kernel.align(weight), scale)
        torch.testing.assert_close(found.double(), expected, rtol=TRUNCATED, atol=0)
