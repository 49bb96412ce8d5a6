import torch
import torch.nn.functional as F

from tinylm.model.linear import Linear


def test_a_linear_layer_equals_that_of_torch_up_to_rounding() -> None:
    layer, x = Linear(8, 6), torch.randn(2, 40, 8)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
    assert list(layer.state_dict()) == ["weight", "bias"]
