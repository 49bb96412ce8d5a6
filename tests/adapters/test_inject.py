import torch
from torch import nn

from tinylm.adapters.inject import replace_modules


def test_matching_modules_are_replaced_once_at_any_depth_and_the_others_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    model.add_module("head", nn.Linear(2, 1))
    before = list(model.modules())
    assert replace_modules(model, lambda name, module: False, lambda name, module: nn.Identity()) == []
    assert list(model.modules()) == before
    names = replace_modules(
        model,
        lambda name, module: isinstance(module, nn.Linear) and name != "head",
        lambda name, old: nn.Sequential(old),
    )
    assert names == ["0", "1.1"]
    assert model[0][0] is before[1] and model[1][1][0] is before[4]
    assert isinstance(model[1][0], nn.ReLU) and model.get_submodule("head") is before[5]
    assert model(torch.ones(1, 2)).shape == (1, 1)
