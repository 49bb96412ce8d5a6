"""What all adapters have in common: a trained part around a frozen module, by name, on disk and in memory."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tinylm.weights import require_tensors

PEFT_PREFIX = "base_model.model."


class Adapter(nn.Module):
    """Stands in the place of `base` and changes what it gives, `strength` times as much as it was trained to."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.strength = 1.0

    def trained(self) -> dict[str, nn.Parameter]:
        """What is learned, by the names that its file has for it."""
        raise NotImplementedError


def adapter_layers(model: nn.Module) -> dict[str, Adapter]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


def adapter_tensors(layers: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """What was learned, under PEFT's keys: a copy for each layer of what several share."""
    return {
        f"{PEFT_PREFIX}{name}.{part}": parameter.detach().clone()
        for name, layer in layers.items()
        for part, parameter in layer.trained().items()
    }


def load_adapter_tensors(layers: Mapping[str, Adapter], tensors: dict[str, Tensor], where: Path) -> None:
    """The inverse of `adapter_tensors`. Raises TinyLMError when the tensors are not the layers' own."""
    own = {
        f"{PEFT_PREFIX}{name}.{part}": parameter
        for name, layer in layers.items()
        for part, parameter in layer.trained().items()
    }
    require_tensors(tensors, own, where)
    with torch.no_grad():
        for key, parameter in own.items():
            parameter.copy_(tensors[key])
