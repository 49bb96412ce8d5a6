import math

import pytest
import torch

from tinylm.run_directory.weights import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 129)])
def test_one_value_that_is_not_finite_is_found_anywhere(
    shape: tuple[int, ...], value: float, dtype: torch.dtype
) -> None:
    for place in range(math.prod(shape)):
        tensor = torch.linspace(-60_000, 60_000, math.prod(shape)).to(dtype)
        assert is_finite(tensor)
        tensor[place] = value
        assert not is_finite(tensor.view(shape))
        assert not is_finite(tensor.view(shape).T if len(shape) == 2 else tensor)
