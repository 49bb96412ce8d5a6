"""Bottleneck adapters: small residual feed-forward layers after frozen sublayers (Houlsby et al. 2019)."""

from typing import Any

import torch
from torch import Tensor, nn

from tinylm.adapters.adapter import Adapter, replace_modules, trained_dtype, unwrapped_name
from tinylm.config.run import AdapterConfig
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.blocks import gelu

SUBLAYERS = ("attention", "cross_attention", "feedforward")


class Bottleneck(Adapter):
    """y + s (gelu(dropout(y) D^T + b) U^T + c) with s = `adapter_scale`, and y (..., width) the output of `base`.

    D (size, width) is the weight of `down`, and U (width, size) that of `up`. U, b and c are initialised to zero, so
    the layer initially returns y.
    """

    def __init__(self, base: nn.Module, width: int, size: int, dropout: float) -> None:
        super().__init__(base)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(width, size)
        self.up = nn.Linear(size, width)
        nn.init.normal_(self.down.weight, std=width**-0.5)
        for parameter in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(parameter)

    def forward(self, *inputs: Any) -> Any:
        """Adapt the sublayer's output: a tensor, or the first entry of a tuple, as from a feed-forward sublayer."""
        y = self.base(*inputs)
        if isinstance(y, Tensor):
            return self._adapt(y)
        return self._adapt(y[0]), *y[1:]

    def _adapt(self, y: Tensor) -> Tensor:
        if not self.adapter_scale:
            return y
        return y + self.adapter_scale * self.up(gelu(self.down(self.dropout(y))))

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Weight and bias of both projections."""
        layers = {"down": self.down, "up": self.up}
        return {f"{name}.{kind}": getattr(layer, kind) for name, layer in layers.items() for kind in ("weight", "bias")}


def sublayers(model: Transformer) -> tuple[str, ...]:
    """The names in SUBLAYERS that occur in the model."""
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return tuple(name for name in SUBLAYERS if name in present)


def add_bottlenecks(model: Transformer, config: AdapterConfig, seed: int = 0) -> dict[str, Adapter]:
    """Freeze the model and put a Bottleneck of size `config.rank` after each sublayer in `config.targets`.

    The model's outputs do not change yet. `seed` determines the initial weights. Returns the new layers by the names of
    their sublayers; a target that the model does not have is ignored.
    """
    model.requires_grad_(False)
    weight = model.embedding.weight
    layers: dict[str, Adapter] = {}

    def wrap(name: str, module: nn.Module) -> Adapter:
        layer = Bottleneck(module, weight.shape[1], config.rank, config.dropout)
        for projection in (layer.down, layer.up):  # `module` keeps its dtype
            projection.to(weight.device, trained_dtype(weight))
        layers[unwrapped_name(name)] = layer
        return layer

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        replace_modules(model, lambda name, _: name.rpartition(".")[2] in config.targets, wrap)
    return layers
