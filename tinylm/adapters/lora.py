"""Low-rank adaptation: W0 + s B A with W0 frozen, where s is alpha / r (seed 002; Hu et al. 2021), or for a
rank-stabilised adapter alpha / sqrt(r) (Kalajdzievski 2023).
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.adapters.adapter import Adapter
from tinylm.adapters.inject import plain_name, replace_modules
from tinylm.config import AdapterConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.model.moe import RoutedExperts
from tinylm.model.stack import Transformer

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, tuple[str, ...]] = {
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

MERGE_TOLERANCE = 1e-4  # of the largest logit


class LoRALinear(Adapter):
    """x W0^T + b + s dropout(x) A^T B^T, where A is r x in and B out x r, which starts at zero.

    A `shared_B` belongs to several layers, whose outputs are equally many.
    """

    def __init__(
        self, base: nn.Module, rank: int, scale: float, dropout: float, shared_B: nn.Parameter | None = None
    ) -> None:
        super().__init__(base)
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        outputs, inputs = self.weight.shape
        self.lora_A = nn.Parameter(self.weight.new_empty(rank, inputs))
        self.lora_B = nn.Parameter(self.weight.new_zeros(outputs, rank)) if shared_B is None else shared_B
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        """The base's own."""
        return self.base.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if not self.strength:
            return y
        return y + F.linear(F.linear(self.dropout(x), self.lora_A), self.lora_B) * (self.scale * self.strength)

    def update(self) -> Tensor:
        """s B A: what merging adds to the weight."""
        return self.scale * self.strength * (self.lora_B @ self.lora_A)

    def trained(self) -> dict[str, nn.Parameter]:
        return {"lora_A.weight": self.lora_A, "lora_B.weight": self.lora_B}


class LoRAEmbedding(Adapter):
    """Rows of W0 + s A^T B^T, where A is r x V, which starts at zero, and B D x r.

    Where the output layer shares the embedding's matrix, it shares the adapted one.
    """

    def __init__(self, base: nn.Module, rank: int, scale: float) -> None:
        super().__init__(base)
        self.scale = scale
        own: Tensor = base.weight  # type: ignore[assignment]
        tokens, width = own.shape
        self.lora_embedding_A = nn.Parameter(own.new_zeros(rank, tokens))
        self.lora_embedding_B = nn.Parameter(own.new_empty(width, rank))
        nn.init.normal_(self.lora_embedding_B)
        self.num_embeddings = tokens

    @property
    def weight(self) -> Tensor:
        """(V, D), the adapted matrix."""
        own: Tensor = self.base.weight  # type: ignore[assignment]
        return own + self.update() if self.strength else own

    def forward(self, ids: Tensor) -> Tensor:
        x = self.base(ids)
        if not self.strength:
            return x
        rows = F.embedding(ids, self.lora_embedding_A.T)  # (..., r)
        return x + F.linear(rows, self.lora_embedding_B) * (self.scale * self.strength)

    def update(self) -> Tensor:
        """s A^T B^T: what merging adds to the weight."""
        return self.scale * self.strength * (self.lora_embedding_A.T @ self.lora_embedding_B.T)

    def trained(self) -> dict[str, nn.Parameter]:
        return {"lora_embedding_A": self.lora_embedding_A, "lora_embedding_B": self.lora_embedding_B}


def module_names(targets: Iterable[str], model: nn.Module) -> tuple[str, ...]:
    """The modules that names such as attention or query,value stand for.

    Raises UsageError for others, and for experts or a router by name in a model that has none.
    """
    asked = [word.strip() for item in targets for word in item.split(",")]
    for target in asked:
        if target not in TARGETS:
            raise UsageError(f"--target {target!r} is not known; choose from: {', '.join(TARGETS)}.")
    mixed = sorted({"experts", "router"}.intersection(asked))
    if mixed and not any(isinstance(module, RoutedExperts) for module in model.modules()):
        raise UsageError(f"--target {', '.join(mixed)} is for a mixture of experts, and this model is dense.")
    return tuple(dict.fromkeys(name for target in asked for name in TARGETS[target]))


def _is_target(name: str, module: nn.Module, targets: tuple[str, ...]) -> bool:
    return name.rpartition(".")[2] in targets and not isinstance(module, nn.ModuleList)


def largest_rank(model: nn.Module, targets: tuple[str, ...]) -> int:
    """The most that any target's matrix can have. Raises UsageError when the model has no such target."""
    found = [module for name, module in model.named_modules() if _is_target(name, module, targets)]
    if not found:
        raise UsageError(f"--target {', '.join(targets)} names nothing in this model.")
    return max(min(module.weight.shape) for module in found)


def add_lora(model: nn.Module, config: AdapterConfig, seed: int = 0) -> dict[str, Adapter]:
    """Freeze the model and put a low-rank layer around every target; the outputs do not change.

    A (for an embedding B) is drawn from `seed`. With `share_b`, matrices of one name and size have one B. Returns the
    new layers by name. Raises UsageError when the model has no such target, and for a rank that none can have.
    """
    model.requires_grad_(False)
    largest = largest_rank(model, config.targets)
    if config.rank > largest:
        raise UsageError(f"--rank is {config.rank}; the matrices it is for have a rank of at most {largest}.")

    shared: dict[tuple[str, int], nn.Parameter] = {}
    made: dict[str, Adapter] = {}

    def wrap(name: str, module: nn.Module) -> Adapter:
        leaf = name.rpartition(".")[2]
        if leaf == "embedding":
            embedding = made[plain_name(name)] = LoRAEmbedding(module, config.rank, config.scale)
            return embedding
        key = (leaf, len(module.weight))  # type: ignore[arg-type]
        layer = LoRALinear(
            module, config.rank, config.scale, config.dropout, shared.get(key) if config.share_b else None
        )
        shared.setdefault(key, layer.lora_B)
        made[plain_name(name)] = layer
        return layer

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        replace_modules(model, lambda name, module: _is_target(name, module, config.targets), wrap)
    return made


def merge_lora(model: nn.Module, sign: float = 1.0) -> None:
    """Fold every update into its base layer; the model is an ordinary one again. A sign of -1 takes it out instead."""

    def fold(name: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, LoRALinear | LoRAEmbedding)
        with torch.no_grad():
            module.base.weight += sign * module.update()  # type: ignore[operator]
        return module.base

    replace_modules(model, lambda _, module: isinstance(module, LoRALinear | LoRAEmbedding), fold)


def check_merged(base: Transformer, adapted: Transformer, merged: Transformer) -> tuple[float, float]:
    """Largest differences of what the output layers give on a probe: merged from adapted, and adapted from base.

    Raises TinyLMError when merging changed what the model predicts, or the adapter changes nothing.
    """
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(base.vocab_size, (4, min(64, base.context)), generator=rng)

    @torch.inference_mode()
    def logits(model: Transformer) -> Tensor:
        return model.logits(model.probe(ids).hidden)

    without, unmerged, together = logits(base), logits(adapted), logits(merged)
    difference = (together - unmerged).abs().max().item()
    change = (unmerged - without).abs().max().item()
    if not difference <= MERGE_TOLERANCE * max(1.0, unmerged.abs().max().item()):
        raise TinyLMError(
            f"The merged model's logits differ from the adapter's by {difference:.2e}; nothing was written."
        )
    if change == 0.0:
        raise TinyLMError("The adapter changes nothing, so there is nothing to merge; train it for longer.")
    return difference, change


PEFT_TASKS = {"decoder": "CAUSAL_LM", "encoder": None, "encoder-decoder": "SEQ_2_SEQ_LM"}


def peft_config(config: AdapterConfig, architecture: str) -> dict[str, Any]:
    """adapter_config.json as PEFT writes it for a LoRA."""
    return {
        "peft_type": "LORA",
        "task_type": PEFT_TASKS[architecture],
        "base_model_name_or_path": config.base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilised,
        "target_modules": list(config.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
