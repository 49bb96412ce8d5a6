"""Put saved adapters back on the base they were made for."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from tinylm.adapters.adapter import Adapter, load_adapter_tensors
from tinylm.adapters.bottleneck import add_bottlenecks
from tinylm.adapters.lora import add_lora
from tinylm.checkpoint import load_model, read_config, read_weights
from tinylm.config import AdapterConfig, DataConfig, RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.model.stack import Transformer
from tinylm.place import CHECKPOINTS, MODEL_FILE
from tinylm.text.tokenizer import Tokenizer
from tinylm.weights import read_header

SEARCHED_RUNS = 1000  # in a folder

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
    """The base of the adapter at `path`: `model`, or a run beside the adapter or under checkpoints/ with the recorded
    digest. The recorded path is not followed: whoever made the adapter chose it.

    The base has the very weights that the adapter was trained on, or, after all merges were undone, weights that equal
    them up to rounding.

    Raises TinyLMError when the weights of `model` are other ones, and UsageError when no base is found.
    """
    place = model or find_base(path, adapter)
    if place is None:
        changed = path.absolute().parent / PureWindowsPath(adapter.base).name
        if os.path.isfile(changed / MODEL_FILE):  # noqa: PTH113, False for a name that is too long
            raise UsageError(
                f"{changed} has other weights than those that {path} was trained on: it was trained on since, or is "
                "another run of the name. Restore the weights, or fine-tune again."
            )
        raise UsageError(
            f"The base of {path} is neither beside it nor under {CHECKPOINTS}/ (it was trained on "
            f"{adapter.base[:200]}); name it with --model."
        )
    base, config, tokenizer, weights = load_model(place, device)
    if adapter.base_digest not in (weights.digest, config.recovered_digest):
        raise TinyLMError(
            f"{path} was made for other weights than those in {place}; an adapter fits only the base it was trained on."
        )
    return base, config, tokenizer


def find_base(path: Path, adapter: AdapterConfig) -> Path | None:
    """The run beside the adapter or under checkpoints/ that has the base's digest; the recorded name is tried first."""
    name = PureWindowsPath(adapter.base).name  # reads the paths of every system
    for folder in dict.fromkeys((path.absolute().parent, CHECKPOINTS.absolute())):
        runs = sorted(file.parent for file in folder.glob("[!.]*/config.json"))
        for run in sorted(runs, key=lambda run: run.name != name)[:SEARCHED_RUNS]:
            with contextlib.suppress(TinyLMError, OSError):  # a damaged run is not the base
                config = read_config(run)
                if config.adapter is None and adapter.base_digest in (
                    config.recovered_digest,
                    read_header(run / MODEL_FILE).digest,
                ):
                    return run
    return None


def adapters_of(path: Path) -> list[Path]:
    """The adapters beside the run at `path` and under checkpoints/ that were trained on its best weights."""
    found: list[Path] = []
    with contextlib.suppress(TinyLMError, OSError):
        digest = read_header(path / MODEL_FILE).digest
        for folder in dict.fromkeys((path.absolute().parent, CHECKPOINTS.absolute())):
            for run in sorted(file.parent for file in folder.glob("[!.]*/config.json"))[:SEARCHED_RUNS]:
                with contextlib.suppress(TinyLMError, OSError):
                    adapter = read_config(run).adapter
                    if adapter is not None and adapter.base_digest == digest:
                        found.append(run)
    return found


def put_on(model: Transformer, wanted: WantedAdapter) -> LoadedAdapter:
    """Put a saved adapter on its base, whose other adapters stay."""
    config, adapter = read_adapter_config(wanted.path)
    weights = read_weights(wanted.path, config)
    layers = add_adapter(model, adapter)
    load_adapter_tensors(layers, weights.tensors, wanted.path)
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
