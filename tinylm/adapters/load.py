"""Put a saved adapter back on the base it was made for."""

from dataclasses import replace
from pathlib import Path

from tinylm.adapters.lora import add_lora, load_adapter_tensors
from tinylm.checkpoint import load_model, read_config, read_weights
from tinylm.config import AdapterConfig, RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.model.stack import Transformer
from tinylm.text.tokenizer import Tokenizer


def read_adapter_config(path: Path) -> tuple[RunConfig, AdapterConfig]:
    """Raises UsageError when the folder holds a model instead of an adapter."""
    config = read_config(path)
    if config.adapter is None:
        raise UsageError(f"{path} is a model, not an adapter; give it as --model.")
    return config, config.adapter


def load_base(
    path: Path, adapter: AdapterConfig, model: Path | None, device: str
) -> tuple[Transformer, RunConfig, Tokenizer]:
    """The base of the adapter at `path`: from where it was, or from `model`, but only with the very same weights.

    Raises TinyLMError when the weights are other ones, and UsageError when there are none.
    """
    place = model or Path(adapter.base)
    if model is None and not place.exists():
        raise UsageError(f"The base of {path} was at {place} and is gone; say where it is with --model.")
    base, config, tokenizer, weights = load_model(place, device)
    if weights.digest != adapter.base_digest:
        raise TinyLMError(
            f"{path} was made for other weights than those in {place}; an adapter fits only the base it was trained on."
        )
    return base, config, tokenizer


def load_adapted(path: Path, model: Path | None, device: str) -> tuple[Transformer, RunConfig, Tokenizer]:
    """The base with the adapter at `path` on it, in evaluation mode, and its configuration with the adapter's text."""
    config, adapter = read_adapter_config(path)
    base, base_config, tokenizer = load_base(path, adapter, model, device)
    weights = read_weights(path, config)
    add_lora(base, adapter)
    load_adapter_tensors(base, weights.tensors)
    return base.eval(), replace(base_config, data=config.data), tokenizer
