"""Modules loaded with a version of torch that lacks certain private names."""

import importlib.util
from types import ModuleType


class NamespaceWithout:
    """A proxy of a namespace of torch that hides some names."""

    def __init__(self, namespace: object, *names: str) -> None:
        self._namespace, self._names = namespace, names

    def __getattr__(self, name: str) -> object:
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._namespace, name)


def loaded_again(module: ModuleType) -> ModuleType:
    """A new copy of a module, executed again with the patched torch; other modules keep the original."""
    assert module.__spec__ is not None and module.__spec__.loader is not None
    copy = importlib.util.module_from_spec(module.__spec__)
    module.__spec__.loader.exec_module(copy)
    return copy
