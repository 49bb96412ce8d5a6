"""Bottleneck adapters: a small feed-forward layer after each frozen sublayer (seed 002; Houlsby et al. 2019)."""

from typing import Any

import torch
from torch import Tensor, nn

from tinylm.adapters.adapter import Adapter
from tinylm.adapters.inject import plain_name, replace_modules
from tinylm.config import AdapterConfig
from tinylm.model.feedforward import gelu
from tinylm.model.stack import Transformer

SUBLAYERS = ("attention", "cross_attention", "feedforward")


class Bottleneck(Adapter):
    """y + gelu(dropout(y) D^T + b) U^T + c, where y is what the sublayer gives; U and c start at zero."""

    def __init__(self, base: nn.Module, width: int, size: int, dropout: float) -> None:
        super().__init__(base)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(width, size)
        self.up = nn.Linear(size, width)
        nn.init.normal_(self.down.weight, std=width**-0.5)
        for parameter in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(parameter)

    def forward(self, *inputs: Any) -> Any:
        """As the sublayer does, whether it gives a tensor or also tells something."""
        y = self.base(*inputs)
        if isinstance(y, Tensor):
            return self._adapt(y)
        return self._adapt(y[0]), *y[1:]

    def _adapt(self, y: Tensor) -> Tensor:
        if not self.strength:
            return y
        return y + self.strength * self.up(gelu(self.down(self.dropout(y))))

    def trained(self) -> dict[str, nn.Parameter]:
        layers = {"down": self.down, "up": self.up}
        return {f"{name}.{kind}": getattr(layer, kind) for name, layer in layers.items() for kind in ("weight", "bias")}


def sublayers(model: Transformer) -> tuple[str, ...]:
    """The kinds of sublayer that the model's layers have."""
    there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return tuple(name for name in SUBLAYERS if name in there)


def add_bottlenecks(model: Transformer, config: AdapterConfig, seed: int = 0) -> dict[str, Adapter]:
    """Freeze the model and put a Bottleneck of `rank` features after every target. The outputs do not change.

    Returns the new layers by name.
    """
    model.requires_grad_(False)
    weight = model.embedding.weight
    made: dict[str, Adapter] = {}

    def wrap(name: str, module: nn.Module) -> Adapter:
        layer = Bottleneck(module, weight.shape[1], config.rank, config.dropout).to(weight.device, weight.dtype)
        made[plain_name(name)] = layer
        return layer

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        replace_modules(model, lambda name, _: name.rpartition(".")[2] in config.targets, wrap)
    return made
