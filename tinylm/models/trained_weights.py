"""The weights of a model that a run trains and saves: all of them, or those of an adapter on a frozen base."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from tinylm.config.run import ADAPTER_KINDS, AdapterConfig, RunConfig
from tinylm.run_directory.loading import restore_model
from tinylm.transformer.architectures import Transformer


class TrainedWeights:
    """The weights that a run trains and saves. The methods here are those for all weights of a model."""

    def add(self, model: Transformer, seed: int = 0) -> None:
        """Add what is trained to the model, in place, and freeze the rest. Its outputs do not change yet."""

    def tensors(self, model: Transformer) -> dict[str, Tensor]:
        """The tensors that are saved, by name."""
        return dict(model.state_dict())

    def restore(self, run: Path, config: RunConfig, tensors: dict[str, Tensor], base: Path | None) -> Transformer:
        """The model of a run with these tensors, on the CPU. base: the frozen model that an adapter was trained on

        Raises TinyLMError if the tensors do not fit, and UsageError for a base that is missing or another one.
        """
        return restore_model(config, tensors, run)

    @contextmanager
    def disabled(self, model: Transformer) -> Iterator[None]:
        """Context manager in which the layers that were added to the model have no effect."""
        yield

    def write_copy(self, folder: Path, config: RunConfig, tensors: dict[str, Tensor]) -> None:
        """Write the saved tensors again in the format of another tool, if there is one for them. Raises OSError."""


def trained_weights(adapter: AdapterConfig | None) -> TrainedWeights:
    """What is trained by a run with this adapter, or without one."""
    return TrainedWeights() if adapter is None else adapter_kind(adapter.kind)(adapter)


def adapter_kind(kind: str) -> Any:
    """The subclass of TrainedWeights of a kind of adapter, with its `configure`, whose code is imported now."""
    module, name = ADAPTER_KINDS[kind].split(":")
    return getattr(importlib.import_module(module), name)
