"""Put saved adapters back on the base they were made for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinylm.adapters.adapter import Adapter, load_adapter_tensors
from tinylm.adapters.bottleneck import add_bottlenecks
from tinylm.adapters.lora import add_lora
from tinylm.checkpoint import load_model, read_config, read_weights
from tinylm.config import AdapterConfig, DataConfig, RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.model.stack import Transformer
from tinylm.text.tokenizer import Tokenizer

ADAPTERS: dict[str, Callable[[Transformer, AdapterConfig, int], dict[str, Adapter]]] = {
    "lora": add_lora,
    "bottleneck": add_bottlenecks,
}


@dataclass(frozen=True)
class WantedAdapter:
    """An adapter's folder, and how strongly it is to act."""

    path: Path
    strength: float = 1.0


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter on its base: its layers by name, how strongly it acts, and the text it was trained on."""

    layers: dict[str, Adapter]
    strength: float
    data: DataConfig | None


def add_adapter(model: Transformer, config: AdapterConfig, seed: int = 0) -> dict[str, Adapter]:
    """Freeze the model and put new adapter layers into it, which change nothing yet; returns them by name."""
    return ADAPTERS[config.kind](model, config, seed)


def read_adapter_config(path: Path) -> tuple[RunConfig, AdapterConfig]:
    """Raises UsageError when the folder holds a model instead of an adapter."""
    config = read_config(path)
    if config.adapter is None:
        raise UsageError(f"{path} is a model, not an adapter; give it as --model.")
    return config, config.adapter


def load_base(
    path: Path, adapter: AdapterConfig, model: Path | None, device: str
) -> tuple[Transformer, RunConfig, Tokenizer]:
    """The base of the adapter at `path`: from where it was, or from `model`, but only with the very same weights, or
    with those that undoing a merge recovered, which differ by rounding.

    Raises TinyLMError when the weights are other ones, and UsageError when there are none.
    """
    place = model or Path(adapter.base)
    if model is None and not place.exists():
        raise UsageError(f"The base of {path} was at {place} and is gone; say where it is with --model.")
    base, config, tokenizer, weights = load_model(place, device)
    if adapter.base_digest not in (weights.digest, config.recovered_digest):
        raise TinyLMError(
            f"{path} was made for other weights than those in {place}; an adapter fits only the base it was trained on."
        )
    return base, config, tokenizer


def put_on(model: Transformer, wanted: WantedAdapter) -> LoadedAdapter:
    """Put a saved adapter on its base, whose other adapters stay."""
    config, adapter = read_adapter_config(wanted.path)
    weights = read_weights(wanted.path, config)
    layers = add_adapter(model, adapter)
    load_adapter_tensors(layers, weights.tensors)
    set_strength(layers, wanted.strength)
    return LoadedAdapter(layers, wanted.strength, config.data)


def load_adapted(
    wanted: Sequence[WantedAdapter], model: Path | None, device: str
) -> tuple[Transformer, RunConfig, Tokenizer, list[LoadedAdapter]]:
    """A base with adapters on it, which act together, in evaluation mode.

    Raises TinyLMError when the adapters are not all for the same base.
    """
    first = wanted[0].path
    _, adapter = read_adapter_config(first)
    base, base_config, tokenizer = load_base(first, adapter, model, device)
    loaded: list[LoadedAdapter] = []
    for one in wanted:
        if read_adapter_config(one.path)[1].base_digest != adapter.base_digest:
            raise TinyLMError(f"{one.path} was made for another base than {first}; put on adapters of one base.")
        loaded.append(put_on(base, one))
    return base.eval(), base_config, tokenizer, loaded


def set_strength(layers: dict[str, Adapter], strength: float) -> None:
    """How strongly an adapter acts: 1 as it was trained, 0 not at all."""
    for layer in layers.values():
        layer.strength = strength
