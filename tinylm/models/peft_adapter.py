"""Add PEFT adapters to a model of tinylm."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from tinylm.adapters.adapter import Adapter, Replacement, trained_dtype, unwrapped_name
from tinylm.adapters.lora import LoRAEmbedding, LoRALinear
from tinylm.config.run import RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.families import FAMILIES, choose_family
from tinylm.formats.family import Family
from tinylm.formats.peft import EMBEDDING, OUTPUT, ForeignAdapter, LowRank
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.layers import Linear

# Largest difference between weights of the base and the copies that PEFT saved, relative to the largest weight of the
# module; more than the rounding of bf16.
STORED_TOLERANCE = 2**-7


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
    # mypy infers no type for a lambda with a default.
    for name, parameters in modules.items():
        layers[f"{name} (replaced)"] = _wrap(model, paths[name], lambda base, p=parameters: Replacement(base, p))  # type: ignore[misc]
    for name, update in updates.items():
        layers[name] = _wrap(model, paths[name], lambda base, name=name, u=update: _low_rank(name, base, u))  # type: ignore[misc]
    return layers


def _wrap(model: nn.Module, name: str, make: Callable[[nn.Module], Adapter]) -> Adapter:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    layer = make(getattr(module, leaf))
    setattr(module, leaf, layer)
    return layer


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


def require_tied(model: Transformer, config: RunConfig, path: Path) -> None:
    """Raise UsageError if an adapter of PEFT has untied the output layer of a model that `config` describes as tied.

    An adapter of tinylm at `path`, trained on the tied embedding, would no longer change the output layer.
    """
    if config.model.tie and model.output is not None:
        raise _not_combinable(path)


def _not_combinable(path: Path) -> UsageError:
    return UsageError(
        f"{path} changes the embedding or the output layer, which this model ties, and so does another `adapter`; "
        "merge one of them into the model first."
    )


def _check_stored(model: Transformer, adapter: ForeignAdapter, path: Path) -> None:
    """Raise TinyLMError if the base weights that PEFT saved with an adapter differ from those of the model."""
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
