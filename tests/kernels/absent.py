"""Modules loaded with a version of torch that lacks certain private names, and calls of torch's functions."""

import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


class Calls(TorchFunctionMode):
    """The calls of torch's functions within a context: name, and dtypes of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[torch.dtype]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.found.append((func.__name__, [value.dtype for value in args if isinstance(value, torch.Tensor)]))
        return func(*args, **kwargs or {})

    def of(self, *names: str) -> int:
        """The number of calls of these functions."""
        return sum(name in names for name, _ in self.found)


class NamespaceWithout:
    """A proxy of a namespace of torch that hides some names."""

    def __init__(self, namespace: object, *names: str) -> None:
        self._namespace, self._names = namespace, names

    def __getattr__(self, name: str) -> object:
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._namespace, name)


def loaded_again(module: ModuleType) -> ModuleType:
    """A new copy of a module, executed again with the patched torch; other modules keep the original.

    The copy defines no operation of torch: that would replace the one of the original, and end with the copy.
    """
    assert module.__spec__ is not None and module.__spec__.loader is not None
    copy = importlib.util.module_from_spec(module.__spec__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.library, "custom_op", lambda *args, **kwargs: lambda function: function)
        module.__spec__.loader.exec_module(copy)
    return copy
