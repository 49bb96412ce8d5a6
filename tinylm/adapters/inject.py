"""Replace named modules of a model; the model itself never knows."""

from collections.abc import Callable

from torch import nn


def replace_modules(
    model: nn.Module, wanted: Callable[[str, nn.Module], bool], make: Callable[[str, nn.Module], nn.Module]
) -> list[str]:
    """Put `make(name, module)` in the place of every module that is wanted; returns their dotted names."""
    names = [name for name, module in model.named_modules() if wanted(name, module)]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, make(name, getattr(owner, leaf)))
    return names


def plain_name(name: str) -> str:
    """A module's name as it was before other adapters were put around its parents."""
    return ".".join(part for part in name.split(".") if part != "base")
