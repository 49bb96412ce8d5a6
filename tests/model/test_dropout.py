import pytest
import torch

from tinylm.model.dropout import Dropout


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_entries_are_zero_with_chance_p_and_scaled_otherwise(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.full((501, 799), 2.0, dtype=dtype, requires_grad=True)
    y = Dropout(p)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 2 / (1 - p)))
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=4 * (p * (1 - p) / x.numel()) ** 0.5)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)


def test_neighbours_and_calls_are_dropped_apart() -> None:
    """Of bits that are drawn together, each number has its own."""
    torch.manual_seed(0)
    drop = Dropout(0.5)
    one, other = ((drop(torch.ones(400_000)) != 0).double() for _ in range(2))
    for lag in (1, 2, 3, 4, 8):
        assert torch.corrcoef(torch.stack((one[lag:], one[:-lag])))[0, 1].abs() < 0.01
    assert torch.corrcoef(torch.stack((one, other)))[0, 1].abs() < 0.01


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # by what torch's compiler imports
def test_a_compiler_neither_merges_draws_nor_repeats_one_for_the_gradient() -> None:
    torch.manual_seed(0)
    drop = Dropout(0.5)
    compiled = torch.compile(lambda x: (drop(x), drop(x)), backend="aot_eager_decomp_partition")
    x = torch.ones(400, 1000, requires_grad=True)
    one, other = compiled(x)
    zeros = torch.stack((one.detach() == 0, other.detach() == 0)).flatten(1).double()
    assert torch.corrcoef(zeros)[0, 1].abs() < 0.01
    (one + 3 * other).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (one + 3 * other).detach())


def test_the_seed_decides_and_nothing_is_dropped_outside_of_training() -> None:
    drop, x = Dropout(0.3), torch.ones(1000)
    torch.manual_seed(1)
    first = drop(x)
    torch.manual_seed(1)
    assert torch.equal(drop(x), first)
    assert Dropout(0.0)(x) is x
    assert drop.eval()(x) is x


@pytest.mark.parametrize("size", [0, 1, 3, 5])
def test_any_number_of_entries_will_do(size: int) -> None:
    assert Dropout(0.5)(torch.ones(size, 1)).shape == (size, 1)
