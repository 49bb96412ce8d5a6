"""Adapter layers: the base class, their tensors by name, the replacement of modules, and new parameters of a module."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.run_directory.weights import require_tensors
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.layers import Linear


class Adapter(nn.Module):
    """A layer that wraps the frozen module `base` and adds an update to its output.

    `adapter_scale` multiplies the update: 1 as trained, 0 for the base module alone.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.adapter_scale = 1.0

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the update, by the last parts of their names in a saved adapter."""
        raise NotImplementedError


class ClassificationHead(Adapter):
    """A new output layer with a row of zeros for each label, which replaces that of the base: it has no `base` and no
    scale.
    """

    def __init__(self, width: int, labels: int) -> None:
        super().__init__(nn.Identity())
        self.weight = nn.Parameter(torch.zeros(labels, width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., labels)"""
        return F.linear(x, self.weight)

    def merged(self) -> nn.Module:
        """The layer as one of a model."""
        layer = Linear(self.weight.shape[1], len(self.weight), bias=False)
        layer.weight = nn.Parameter(self.weight.detach(), requires_grad=False)
        return layer

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The weight of the layer."""
        return {"weight": self.weight}


def add_head(model: Transformer, labels: int) -> dict[str, Adapter]:
    """Make a classifier of a model, in place. Returns the new output layer by its name."""
    head = ClassificationHead(model.width, labels).to(model.device)
    model.output = head  # type: ignore[assignment]  # it is called like a linear layer, and has its weight
    return {"output": head}


def trained_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of parameters that adapt a frozen weight: at least fp32, since 16 bits lose small updates."""
    return torch.promote_types(weight.dtype, torch.float32)


def adapter_layers(model: nn.Module) -> dict[str, Adapter]:
    """All adapter layers of a model by their dotted names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager in which all adapter layers of a model have no effect."""
    scales = {layer: layer.adapter_scale for layer in adapter_layers(model).values()}
    try:
        for layer in scales:
            layer.adapter_scale = 0.0
        yield
    finally:
        for layer, scale in scales.items():
            layer.adapter_scale = scale


def adapter_tensors(layers: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """Copies of the layers' parameters by name; a parameter that layers share is copied for each layer."""
    return {key: parameter.detach().clone() for key, parameter in _parameters(layers).items()}


def load_adapter_tensors(layers: Mapping[str, Adapter], tensors: dict[str, Tensor], file: Path) -> None:
    """Copy the tensors of a saved adapter, as `adapter_tensors` returns them, into the layers.

    Raises TinyLMError, which names `file`, if names, shapes or dtypes differ from those of the layers, or values are
    not finite.
    """
    parameters = _parameters(layers)
    require_tensors(tensors, parameters, file)
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(tensors[key])


def _parameters(layers: Mapping[str, Adapter]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{part}": parameter
        for name, layer in layers.items()
        for part, parameter in layer.trainable_parameters().items()
    }


def replace_modules(
    model: nn.Module, matches: Callable[[str, nn.Module], bool], replace: Callable[[str, nn.Module], nn.Module]
) -> list[str]:
    """Replace each module for which `matches(name, module)` holds with `replace(name, module)`, in place.

    Names are dotted paths from the model. Matches must not be nested. Returns the names of the replaced modules.
    """
    names = [name for name, module in model.named_modules() if matches(name, module)]
    for name in names:
        model.set_submodule(name, replace(name, model.get_submodule(name)))
    return names


def unwrapped_name(name: str) -> str:
    """A module's name without the parts `base` that adapters around the module or its parents have added."""
    return ".".join(part for part in name.split(".") if part != "base")


class Replacement(Adapter):
    """f(x) + s (f'(x) - f0(x)) with s = `adapter_scale`.

    f is `base`, f0 is the module below all adapters, and f' is f0 with the new parameters. The outputs of linear
    layers, norms and embeddings are linear in their parameters, so the updates of several adapters add up.
    """

    def __init__(self, base: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(base)
        plain = self._plain()
        tensors = {id(tensor): tensor for tensor in (*plain.parameters(), *plain.buffers())}
        self.replacement = copy.deepcopy(plain, tensors)  # shares the parameters that are not replaced
        for name, value in parameters.items():
            old = getattr(plain, name)
            new = nn.Parameter(value.to(old.device, old.dtype, copy=True), requires_grad=False)
            setattr(self.replacement, name, new)
        self.names = tuple(parameters)

    def _plain(self) -> nn.Module:
        module = self.base
        while isinstance(module, Adapter):
            module = module.base
        return module

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out); token ids (...) -> (..., D) for an embedding."""
        if not self.adapter_scale:
            return self.base(x)
        plain = self._plain()
        if self.adapter_scale == 1.0 and self.base is plain:
            return self.replacement(x)
        return self.base(x) + self.adapter_scale * (self.replacement(x) - plain(x))

    @property
    def weight(self) -> Tensor:
        """The weight of `base` with the update of this layer, in the shape of the base module's weight.

        On an embedding, the weight of `base` includes the updates of the adapters below; on a linear layer with a LoRA
        below, it does not.
        """
        weight: Any = self.base.weight
        if not self.adapter_scale or "weight" not in self.names:
            return weight
        plain: Any = self._plain().weight
        replacement: Any = self.replacement.weight
        if self.adapter_scale == 1.0 and self.base is self._plain():
            return replacement
        return weight + self.adapter_scale * (replacement - plain)

    @property
    def num_embeddings(self) -> int:
        """Number of rows of an embedding."""
        return self._plain().num_embeddings  # type: ignore[return-value]  # mypy: Tensor | Module

    def merged(self) -> nn.Module:
        """The base module with the update at `adapter_scale` merged into it. `base` must not be an adapter."""
        plain = self._plain()
        assert self.base is plain
        with torch.no_grad():
            for name in self.names:
                old, new = getattr(plain, name), getattr(self.replacement, name)
                value = new if self.adapter_scale == 1.0 else old + self.adapter_scale * (new - old)
                setattr(plain, name, nn.Parameter(value, requires_grad=False))
        return plain

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that replace those of the base."""
        return {name: getattr(self.replacement, name) for name in self.names}
