import pytest
import torch

from tests.kernels.absent import Calls
from tinylm.kernels.layers import random_dropout


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
