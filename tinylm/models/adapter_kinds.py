"""The kinds of adapters, as the weights that a run trains: their settings, their base, and their copy for PEFT."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from tinylm.adapters.adapter import adapter_layers, adapter_tensors, load_adapter_tensors, without_adapters
from tinylm.adapters.bottleneck import sublayers
from tinylm.adapters.lora import TARGETS, max_rank, require_rank, target_modules
from tinylm.config.run import AdapterConfig, RunConfig
from tinylm.config.settings import AdapterSettings, LoRASettings
from tinylm.errors import UsageError
from tinylm.models.exporting import write_peft_copy
from tinylm.models.find_base import remember_base
from tinylm.models.load_adapter import add_adapter, load_base_model
from tinylm.run_directory.loading import LoadedModel, TrainedWeights
from tinylm.system.files import resolve_links
from tinylm.transformer.architectures import Transformer

DEFAULT_RANK = 8


class AdapterWeights(TrainedWeights):
    """The weights of an adapter, and of the output layer for labels that it may add."""

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config

    def add(self, model: Transformer, seed: int = 0) -> None:
        add_adapter(model, self._config, seed)

    def tensors(self, model: Transformer) -> dict[str, Tensor]:
        return adapter_tensors(adapter_layers(model))

    def restore(self, run: Path, config: RunConfig, tensors: dict[str, Tensor], base: Path | None) -> Transformer:
        model = load_base_model(run, self._config, base, "cpu").network
        if base is not None:
            remember_base(self._config.base_digest, base)
        load_adapter_tensors(add_adapter(model, self._config), tensors, run)
        return model

    @contextmanager
    def disabled(self, model: Transformer) -> Iterator[None]:
        with without_adapters(model):
            yield


class LoRAWeights(AdapterWeights):
    """The matrices A and B of a LoRA."""

    @staticmethod
    def configure(settings: LoRASettings, base: LoadedModel, source: Path) -> AdapterConfig:
        """The configuration of a LoRA on the model at `source`. Raises UsageError if it does not fit the model."""
        chosen = "attention" if settings.target is None else settings.target
        targets = target_modules((chosen,) if isinstance(chosen, str) else chosen, base.network)
        if targets == TARGETS["embedding"] and (settings.dropout or settings.share_b):
            raise UsageError(
                "`dropout` and `share_b` are for linear layers, and the embedding is a lookup table; leave them out."
            )
        rank = min(DEFAULT_RANK, max_rank(base.network, targets)) if settings.rank is None else settings.rank
        require_rank(rank, base.network, targets)
        return AdapterConfig(
            kind=settings.kind,
            base=str(resolve_links(source)),
            base_digest=base.digest,
            rank=rank,
            alpha=2.0 * rank if settings.alpha is None else settings.alpha,
            dropout=settings.dropout,
            targets=targets,
            rank_stabilised=settings.rank_stabilised,
            share_b=settings.share_b,
        )

    def write_copy(self, folder: Path, config: RunConfig, tensors: dict[str, Tensor]) -> None:
        write_peft_copy(folder, config, self._config, tensors)


class BottleneckWeights(AdapterWeights):
    """The projections of bottleneck adapters."""

    @staticmethod
    def configure(settings: AdapterSettings, base: LoadedModel, source: Path) -> AdapterConfig:
        """The configuration of bottlenecks after all sublayers. Raises UsageError if they are wider than the model."""
        width = base.config.model.width
        if settings.bottleneck > width:
            raise UsageError(f"`bottleneck` is {settings.bottleneck}; it must be from 1 to the model's width, {width}.")
        return AdapterConfig(
            kind=settings.kind,
            base=str(resolve_links(source)),
            base_digest=base.digest,
            rank=settings.bottleneck,
            dropout=settings.dropout,
            targets=sublayers(base.network),
        )
