"""LoRA: W0 + s B A with W0 frozen (Hu et al. 2021).

r is the rank. s is alpha / r, or alpha / sqrt(r) for a rank-stabilised adapter (Kalajdzievski 2023).
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.adapters.adapter import (
    Adapter,
    ClassificationHead,
    Replacement,
    replace_modules,
    trained_dtype,
    unwrapped_name,
)
from tinylm.config.run import AdapterConfig
from tinylm.config.validation import check_choice
from tinylm.errors import UsageError
from tinylm.transformer.blocks import RoutedExperts

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, tuple[str, ...]] = {  # last parts of module names, by `target`
    "attention": ATTENTION,
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "output": ("o_proj",),
    "mlp": MLP,
    "experts": MLP,
    "router": ("router",),
    "embedding": ("embedding",),
    "all": (*ATTENTION, *MLP, "router", "embedding"),
}


class LoRALinear(Adapter):
    """x W0^T + b + c s dropout(x) A^T B^T with A (r, in) and B (out, r); B is initialised to zero.

    c is `adapter_scale` and s is `scale`. `shared_B`: the B of another layer with the same number of outputs, used
    instead of a new one.
    """

    def __init__(
        self, base: nn.Module, rank: int, scale: float, dropout: float, shared_B: nn.Parameter | None = None
    ) -> None:
        super().__init__(base)
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        outputs, inputs = self.weight.shape
        dtype = trained_dtype(self.weight)
        self.lora_A = nn.Parameter(self.weight.new_empty(rank, inputs, dtype=dtype))
        self.lora_B = nn.Parameter(self.weight.new_zeros(outputs, rank, dtype=dtype)) if shared_B is None else shared_B
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        """W0, (out, in)."""
        return self.base.weight  # type: ignore[return-value]  # mypy: Tensor | Module

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        y = self.base(x)
        if not self.adapter_scale:
            return y
        u = F.linear(self.dropout(x), self.lora_A) * (self.scale * self.adapter_scale)  # (..., r)
        return y + F.linear(u, self.lora_B)

    def delta_weight(self) -> Tensor:
        """adapter_scale * s B A, (out, in): the update that merging adds to W0."""
        return self.scale * self.adapter_scale * (self.lora_B @ self.lora_A)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """A and B."""
        return {"lora_A.weight": self.lora_A, "lora_B.weight": self.lora_B}


class LoRAEmbedding(Adapter):
    """Rows of W0 + c s A^T B^T with W0 (V, D), A (r, V) and B (D, r); A is initialised to zero.

    c is `adapter_scale` and s is `scale`. A tied output layer uses `weight`, so it is adapted as well.
    """

    def __init__(self, base: nn.Module, rank: int, scale: float) -> None:
        super().__init__(base)
        self.scale = scale
        weight: Tensor = base.weight  # type: ignore[assignment]  # mypy: Tensor | Module
        vocab_size, width = weight.shape
        self.lora_embedding_A = nn.Parameter(weight.new_zeros(rank, vocab_size, dtype=trained_dtype(weight)))
        self.lora_embedding_B = nn.Parameter(weight.new_empty(width, rank, dtype=trained_dtype(weight)))
        nn.init.normal_(self.lora_embedding_B)
        self.num_embeddings = vocab_size

    @property
    def weight(self) -> Tensor:
        """The adapted matrix W0 + delta_weight(), (V, D)."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]  # mypy: Tensor | Module
        return weight + self.delta_weight() if self.adapter_scale else weight

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (...) -> (..., D)."""
        x = self.base(ids)
        if not self.adapter_scale:
            return x
        rows = F.embedding(ids, self.lora_embedding_A.T) * (self.scale * self.adapter_scale)  # (..., r)
        return x + F.linear(rows, self.lora_embedding_B)

    def delta_weight(self) -> Tensor:
        """adapter_scale * s A^T B^T, (V, D): the update that merging adds to W0."""
        return self.scale * self.adapter_scale * (self.lora_embedding_A.T @ self.lora_embedding_B.T)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """A and B, under the names that PEFT gives them for embeddings."""
        return {"lora_embedding_A": self.lora_embedding_A, "lora_embedding_B": self.lora_embedding_B}


def target_modules(targets: Iterable[str], model: nn.Module) -> tuple[str, ...]:
    """The module names of keys of TARGETS, such as "attention", or of several, separated by commas ("query,value").

    Raises UsageError for an unknown target, and for "experts" or "router" in a model without a mixture of experts.
    """
    names = [name.strip() for item in targets for name in item.split(",")]
    for target in names:
        check_choice("target", target, tuple(TARGETS))
    moe_targets = sorted({"experts", "router"}.intersection(names))
    if moe_targets and not any(isinstance(module, RoutedExperts) for module in model.modules()):
        raise UsageError(f"`target` {', '.join(moe_targets)} needs a mixture of experts; this model is dense.")
    return tuple(dict.fromkeys(module for target in names for module in TARGETS[target]))


def _is_target(name: str, module: nn.Module, targets: tuple[str, ...]) -> bool:
    return name.rpartition(".")[2] in targets and not isinstance(module, nn.ModuleList)


def max_rank(model: nn.Module, targets: tuple[str, ...]) -> int:
    """The largest possible rank of an update of a target. Raises UsageError if the model has none of the targets."""
    modules = [module for name, module in model.named_modules() if _is_target(name, module, targets)]
    if not modules:
        raise UsageError(f"`target` {', '.join(targets)} matches no module of this model.")
    return max(min(module.weight.shape) for module in modules)


def require_rank(rank: int, model: nn.Module, targets: tuple[str, ...]) -> None:
    """Raise UsageError for a rank above `max_rank`."""
    largest = max_rank(model, targets)
    if rank > largest:
        raise UsageError(f"`rank` is {rank}; the target matrices have a rank of at most {largest}.")


def add_lora(model: nn.Module, config: AdapterConfig, seed: int = 0) -> dict[str, Adapter]:
    """Freeze the model and put a LoRA layer around each module in `config.targets`.

    The model's outputs do not change yet. `seed` determines A (B of an embedding). With `config.share_b`, layers with
    the same last name part and output size share one B. Returns the new layers by the names of their modules.

    Raises UsageError if the model has none of the targets, and for a rank above `max_rank`.
    """
    model.requires_grad_(False)
    require_rank(config.rank, model, config.targets)

    shared: dict[tuple[str, int], nn.Parameter] = {}
    layers: dict[str, Adapter] = {}

    def wrap(name: str, module: nn.Module) -> Adapter:
        leaf = name.rpartition(".")[2]
        if leaf == "embedding":
            embedding = layers[unwrapped_name(name)] = LoRAEmbedding(module, config.rank, config.scale)
            return embedding
        key = (leaf, len(module.weight))  # type: ignore[arg-type]  # mypy: Tensor | Module
        layer = LoRALinear(
            module, config.rank, config.scale, config.dropout, shared.get(key) if config.share_b else None
        )
        shared.setdefault(key, layer.lora_B)
        layers[unwrapped_name(name)] = layer
        return layer

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        replace_modules(model, lambda name, module: _is_target(name, module, config.targets), wrap)
    return layers


def merge_lora(model: nn.Module, sign: float = 1.0, dtype: torch.dtype | None = None) -> None:
    """Add the update of each LoRA layer to the weight of its base module and remove the layer, in place.

    With `sign=-1`, subtract the update, which undoes an earlier merge up to rounding. Parameters that a Replacement
    layer replaces are replaced permanently; `sign=-1` does not undo this. A module may have one LoRA layer and, inside
    it, one Replacement.

    dtype: of the merged weights; by default the wider one of the base's and the update's
    """

    def merge(name: str, module: nn.Module) -> nn.Module:
        if isinstance(module, Replacement | ClassificationHead):
            return module.merged()
        assert isinstance(module, LoRALinear | LoRAEmbedding)
        with torch.no_grad():  # not in place: an untied output layer may share the embedding's tensor
            merged = module.base.weight + sign * module.delta_weight()  # type: ignore[operator]  # mypy: Tensor | Module
        module.base.weight = nn.Parameter(merged if dtype is None else merged.to(dtype), requires_grad=False)
        return module.base

    kinds = (ClassificationHead, Replacement, LoRALinear, LoRAEmbedding)  # innermost wrapper first
    for kind in kinds:
        # mypy infers no type for a lambda with a default.
        replace_modules(model, lambda _, module, kind=kind: isinstance(module, kind), merge)  # type: ignore[misc]
