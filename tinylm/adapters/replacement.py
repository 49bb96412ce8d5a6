"""Adapters that replace whole parameters of the base model, as `modules_to_save` and `bias` of PEFT do."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tinylm.adapters.adapter import Adapter


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
