import torch
from torch import nn

from tinylm.adapters.inject import replace_modules


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    model.add_module("head", nn.Linear(2, 1))
    return model


def test_matching_modules_are_replaced_at_any_depth_and_the_others_stay() -> None:
    model = network()
    head = model.get_submodule("head")
    names = replace_modules(
        model, lambda name, module: isinstance(module, nn.Linear) and name != "head", lambda name, module: nn.Identity()
    )
    assert names == ["0", "1.1"]
    assert isinstance(model[0], nn.Identity) and isinstance(model[1][1], nn.Identity)
    assert isinstance(model[1][0], nn.ReLU) and model.get_submodule("head") is head
    assert model(torch.ones(1, 2)).shape == (1, 1)


def test_a_replacement_that_contains_the_old_module_is_not_replaced_again() -> None:
    model = network()
    names = replace_modules(
        model, lambda name, module: isinstance(module, nn.Linear), lambda name, old: nn.Sequential(old)
    )
    assert names == ["0", "1.1", "head"]
    assert isinstance(model[0][0], nn.Linear)


def test_without_a_match_the_model_does_not_change() -> None:
    model = network()
    before = list(model.modules())
    assert replace_modules(model, lambda name, module: False, lambda name, module: nn.Identity()) == []
    assert list(model.modules()) == before
