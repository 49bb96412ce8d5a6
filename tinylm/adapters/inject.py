"""Replace modules of a model by name, without changes to the model's code."""

from collections.abc import Callable

from torch import nn


def replace_modules(
    model: nn.Module, matches: Callable[[str, nn.Module], bool], replace: Callable[[str, nn.Module], nn.Module]
) -> list[str]:
    """Replace each module for which `matches(name, module)` holds with `replace(name, module)`, in place.

    Names are dotted paths from the model. Matches must not be nested. Returns the names of the replaced modules.
    """
    names = [name for name, module in model.named_modules() if matches(name, module)]
    for name in names:
        parent_name, _, attribute = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        setattr(parent, attribute, replace(name, getattr(parent, attribute)))
    return names


def unwrapped_name(name: str) -> str:
    """A module's name without the parts `base` that adapters around the module or its parents have added."""
    return ".".join(part for part in name.split(".") if part != "base")
