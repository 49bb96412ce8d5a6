"""Add adapters of tinylm or PEFT to a model, and load saved ones with their base model."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Self

import torch
from torch import Tensor, nn

from tinylm.adapters.adapter import Adapter, Replacement, add_head, load_adapter_tensors, trained_dtype, unwrapped_name
from tinylm.adapters.bottleneck import add_bottlenecks
from tinylm.adapters.lora import LoRAEmbedding, LoRALinear, add_lora
from tinylm.config.run import AdapterConfig, RunConfig, run_of
from tinylm.config.validation import describe_value
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.families import FAMILIES, choose_family
from tinylm.formats.family import Family
from tinylm.formats.peft import (
    EMBEDDING,
    OUTPUT,
    ForeignAdapter,
    LowRank,
    is_adapter_folder,
    read_adapter,
    read_base_name,
)
from tinylm.models.find_base import find_base_model
from tinylm.models.open import open_model
from tinylm.reporter import Reporter
from tinylm.run_directory.layout import CHECKPOINTS, MODEL_FILE, find_run, path_exists
from tinylm.run_directory.loading import LoadedModel, read_config, read_weights
from tinylm.system.files import is_link
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.layers import Linear

MAX_ADAPTER_SCALE = 1000
# Largest difference between weights of the base and the copies that PEFT saved, relative to the largest weight of the
# module; more than the rounding of bf16.
STORED_TOLERANCE = 2**-7

ADAPTERS: dict[str, Callable[[Transformer, AdapterConfig, int], dict[str, Adapter]]] = {
    "lora": add_lora,
    "bottleneck": add_bottlenecks,
}


@dataclass(frozen=True)
class AdapterSpec:
    """The folder of a saved adapter, and its scale: 1 as trained."""

    path: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str, reporter: Reporter) -> Self:
        """Parse the path or name of an adapter, with an optional scale after `=`.

        Raises UsageError for a scale that is out of range, and for an adapter that does not exist.
        """
        path, _, scale = text.rpartition("=")
        if not path or path_exists(Path(text)) or path_exists(CHECKPOINTS / text):
            return cls(find_run(Path(text), reporter))
        try:
            number = float(scale)
        except ValueError:
            number = math.nan
        if not abs(number) <= MAX_ADAPTER_SCALE:
            raise UsageError(
                f"`adapter` {text[:200]}: {describe_value(scale)} is not a number from -{MAX_ADAPTER_SCALE} to "
                f"{MAX_ADAPTER_SCALE}; write it as in {path[:200]}=0.5."
            )
        return cls(find_run(Path(path), reporter), number)


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter on its base model.

    path: as in AdapterSpec. layers: its layers by name. scale: as in AdapterSpec.
    config: of its run; `None` for a PEFT adapter. note: a notice for the user.
    """

    path: Path
    layers: dict[str, Adapter] = field(repr=False)
    scale: float
    config: RunConfig | None = field(repr=False)
    note: str | None = None

    @property
    def chat_template(self) -> str | None:
        """Jinja source of its chat template; `None` without one."""
        return None if self.config is None else self.config.tokenizer.chat_template


def add_adapter(model: Transformer, config: AdapterConfig, seed: int = 0) -> dict[str, Adapter]:
    """Freeze the model and add new adapter layers, which do not change its outputs yet. Returns the layers by name.

    Raises UsageError for a LoRA if the model has none of its targets or its rank is too large.
    """
    layers = ADAPTERS[config.kind](model, config, seed)
    return layers | add_head(model, len(config.labels)) if config.labels else layers


def read_adapter_config(path: Path) -> tuple[RunConfig, AdapterConfig]:
    """The configurations of an adapter's run and of the adapter. Raises UsageError for the run of a model."""
    config = read_config(path)
    if config.adapter is None:
        raise UsageError(f"{path} is a model, not an adapter; give it as `model`.")
    return config, config.adapter


def load_base_model(path: Path, adapter: AdapterConfig | None, model: Path | None, device: str) -> LoadedModel:
    """Load the base model of the adapter at `path`: the one at `model`, or the run that `find_base_model` finds.

    The digest of the weights that the adapter was trained on must be that of the base model's weights, or the
    `recovered_digest` of the base model. The path that the adapter recorded is not opened: an untrusted adapter could
    name any file. adapter: `None` for a PEFT adapter, which records no digest, so that `model` is required.

    Raises TinyLMError if the base model has other weights, and UsageError if none is found or a required one missing.
    """
    if adapter is None:
        if model is None:
            recorded = read_base_name(path)
            named = "names no base model" if recorded is None else f"was trained on {recorded[:200]}"
            raise UsageError(f"{path} is a PEFT adapter and {named}; name the base model with `model`.")
        return open_model(model, device)
    run = model or find_base_model(path, adapter.base, adapter.base_digest)
    if run is None:
        same_name = run_of(path.absolute()).parent / PureWindowsPath(adapter.base).name
        is_file = os.path.isfile(same_name / MODEL_FILE)  # noqa: PTH113, returns False for a name that is too long
        if is_file and not is_link(same_name):
            raise UsageError(
                f"{same_name} does not have the weights that {path} was trained on: it was trained further, or is "
                "another run of the same name. Restore the weights, or fine-tune again."
            )
        raise UsageError(
            f"The base model of {path} is neither beside it nor directly in {CHECKPOINTS}/ (it was trained on "
            f"{adapter.base[:200]}); name it with `model`."
        )
    base = open_model(run, device)
    if adapter.base_digest not in (base.weights.digest, base.config.recovered_digest):
        raise TinyLMError(
            f"{path} was trained on other weights than those in {run}; name the base model that it was trained on."
        )
    return base


def load_adapter(model: Transformer, spec: AdapterSpec, base: RunConfig, *, is_merged: bool = False) -> LoadedAdapter:
    """Add a saved adapter of tinylm or PEFT to its base model, in place. Adapters added earlier stay active.

    base: configuration of the base model. is_merged: whether the weights contain the adapter already, so that weights
    of the base that PEFT has stored with it differ.

    Raises TinyLMError for a damaged adapter or one that does not fit the model, and UsageError for a PEFT adapter on a
    model of no Hugging Face family, and for one that cannot be combined.
    """
    if is_adapter_folder(spec.path):
        try:
            family = family_of(base)
        except UsageError as error:
            raise UsageError(f"{spec.path} is a PEFT adapter and does not fit this base model. {error}") from error
        foreign = read_adapter(spec.path, family, base.model)
        foreign = dataclasses.replace(foreign, stored={}) if is_merged else foreign
        layers = add_foreign_adapter(model, foreign, spec.path)
        recorded = read_base_name(spec.path)
        named = "" if recorded is None else f" ({recorded[:200]})"
        note = (
            f"{spec.path} is a PEFT adapter, which records no digest of its base model{named}: only names and shapes "
            "were compared with this model."
        )
        loaded = LoadedAdapter(spec.path, layers, spec.scale, None, note)
    else:
        config, adapter = read_adapter_config(spec.path)
        weights = read_weights(spec.path, config)
        # An earlier adapter of PEFT may have untied the output layer, which this adapter changes with the embedding
        if EMBEDDING in adapter.targets and base.model.tie and model.output is not None:
            raise _not_combinable(spec.path)
        layers = add_adapter(model, adapter)
        load_adapter_tensors(layers, weights.tensors, spec.path)
        loaded = LoadedAdapter(spec.path, layers, spec.scale, config)
    set_adapter_scale(loaded.layers, spec.scale)
    return loaded


def load_adapted_model(
    specs: Sequence[AdapterSpec], model: Path | None, device: str
) -> tuple[Transformer, RunConfig, Tokenizer, list[LoadedAdapter]]:
    """Load a base model with one or more adapters, whose updates add up, in evaluation mode.

    `model` is the base model; by default that of the first adapter that tinylm saved, found by `find_base_model`.

    Raises TinyLMError if adapters saved by tinylm record different base models, and the errors of `load_base_model` and
    `load_adapter`.
    """
    runs = [spec.path for spec in specs if not is_adapter_folder(spec.path)]
    adapters = [read_adapter_config(path)[1] for path in runs]
    first, recorded = (runs[0], adapters[0]) if runs else (specs[0].path, None)
    base, config, tokenizer, _ = load_base_model(first, recorded, model, device)
    for path, adapter in zip(runs, adapters, strict=True):
        if adapter.base_digest != adapters[0].base_digest:
            raise TinyLMError(
                f"{path} was trained on another base model than {first}; combine adapters of one base model."
            )
    loaded = [load_adapter(base, spec, config) for spec in specs]
    if base.output is not None and config.model.tie:  # a PEFT adapter has untied the output layer
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, tie=False))
    for path, adapter in zip(runs, adapters, strict=True):
        if not adapter.labels:
            continue
        if len(loaded) > 1 or loaded[0].scale != 1.0:
            raise UsageError(f"{path} makes a classifier of its base; it is not combined with others, nor scaled.")
        model_config = dataclasses.replace(config.model, labels=adapter.labels, tie=False)
        config = dataclasses.replace(config, model=model_config, training=None)  # that of the base has no labels
    return base.eval(), config, tokenizer, loaded


def set_adapter_scale(layers: dict[str, Adapter], scale: float) -> None:
    """Set the scale of an adapter in all its layers: 1 as trained, 0 to disable it."""
    for layer in layers.values():
        layer.adapter_scale = scale


# Adapters of PEFT


def family_of(config: RunConfig) -> Family:
    """The Hugging Face family that a model was imported from, or that it can be exported as.

    Raises UsageError naming the settings that no family has.
    """
    return FAMILIES.get(config.family or "") or choose_family(config.model)


def add_foreign_adapter(model: Transformer, adapter: ForeignAdapter, path: Path) -> dict[str, Adapter]:
    """Freeze the model and add a PEFT adapter to it, in place.

    Returns the new layers by module name; the name of a Replacement is followed by " (replaced)".

    A tied output layer is untied (it becomes `Transformer.output`) if the adapter does not change it in the same way as
    the embedding. This is usual in PEFT, where a LoRA of the embedding does not change the output layer.

    path: of the adapter, for messages. Raises TinyLMError if the adapter belongs to another base model or replaces
    position embeddings, and UsageError if it cannot be combined with the adapters that the model has.
    """
    model.requires_grad_(False)
    _check_stored(model, adapter, path)
    updates, replaced = dict(adapter.updates), dict(adapter.replaced)
    if model.output is None:
        if _changes_output_alike(adapter):
            updates.pop(OUTPUT, None)
            replaced.pop(f"{OUTPUT}.weight", None)
        else:  # an output layer that shares the embedding's weight tensor, but can have an adapter of its own
            if isinstance(model.embedding, Adapter):
                raise _not_combinable(path)
            weight = model.embedding.weight
            model.output = Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            model.output.weight = weight
    modules: dict[str, dict[str, Tensor]] = {}
    for name, value in replaced.items():
        module, _, parameter = name.rpartition(".")
        modules.setdefault(module, {})[parameter] = value
    if "position" in modules:
        raise TinyLMError(f"Cannot use {path}: it replaces the position embeddings, which is not supported.")
    paths = {unwrapped_name(name): name for name, _ in model.named_modules() if not name.endswith("base")}
    layers: dict[str, Adapter] = {}
    for name, parameters in modules.items():
        layer = layers[f"{name} (replaced)"] = Replacement(model.get_submodule(paths[name]), parameters)
        model.set_submodule(paths[name], layer)
    for name, update in updates.items():
        layers[name] = _low_rank(name, model.get_submodule(paths[name]), update)
        model.set_submodule(paths[name], layers[name])
    return layers


def _low_rank(name: str, base: nn.Module, update: LowRank) -> Adapter:
    is_embedding = name == EMBEDDING
    rank = len(update.A)
    weight: Tensor = base.weight  # type: ignore[assignment]  # mypy: Tensor | Module
    a, b = (
        nn.Parameter(tensor.to(weight.device, trained_dtype(weight), copy=True), requires_grad=False)
        for tensor in (update.A, update.B)
    )
    with torch.random.fork_rng(devices=[]):  # initial values are drawn, and then replaced
        if is_embedding:
            embedding = LoRAEmbedding(base, rank, update.scale)
            embedding.lora_embedding_A, embedding.lora_embedding_B = a, b
            return embedding
        linear = LoRALinear(base, rank, update.scale, dropout=0.0)
    linear.lora_A, linear.lora_B = a, b
    return linear


def _changes_output_alike(adapter: ForeignAdapter) -> bool:
    embedding, output = adapter.updates.get(EMBEDDING), adapter.updates.get(OUTPUT)
    if embedding is None or output is None:
        updates_alike = embedding is output
    else:
        alike = torch.equal(embedding.A, output.B.T) and torch.equal(embedding.B, output.A.T)
        updates_alike = alike and embedding.scale == output.scale
    one, other = (adapter.replaced.get(f"{name}.weight") for name in (EMBEDDING, OUTPUT))
    if one is None or other is None:
        return updates_alike and one is other
    return updates_alike and torch.equal(one, other)


def _not_combinable(path: Path) -> UsageError:
    return UsageError(
        f"{path} changes the embedding or the output layer, which this model ties, and so does another `adapter`; "
        "merge one of them into the model first."
    )


def _check_stored(model: Transformer, adapter: ForeignAdapter, path: Path) -> None:
    for name, stored in adapter.stored.items():
        module = name.rpartition(".")[0]
        tied = module == OUTPUT and model.output is None
        plain: nn.Module = model.get_submodule(EMBEDDING if tied else module)
        while isinstance(plain, Adapter):
            plain = plain.base
        weight: Tensor = plain.weight  # type: ignore[assignment]  # mypy: Tensor | Module
        difference = (stored.to(weight.device, torch.float32) - weight.float()).abs().max()
        if difference > STORED_TOLERANCE * weight.abs().max():
            raise TinyLMError(
                f"{path} was trained on another base model: the weights of the {module} that were saved with it are "
                "different. Name the base that it was trained on with `model`."
            )
