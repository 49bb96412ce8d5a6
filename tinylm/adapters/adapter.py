"""The base class of adapter layers, and their tensors by name."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tinylm.run_directory.weights import require_tensors


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


def trained_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of parameters that adapt a frozen weight: at least fp32, since 16 bits lose small updates."""
    return torch.promote_types(weight.dtype, torch.float32)


def adapter_layers(model: nn.Module) -> dict[str, Adapter]:
    """All adapter layers of a model by their dotted names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


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
