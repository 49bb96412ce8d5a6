"""Low-rank adaptation: W0 + (alpha / r) B A, with W0 frozen (seed 002; Hu et al. 2021)."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.adapters.inject import replace_modules
from tinylm.config import AdapterConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.model.stack import Transformer

TARGETS: dict[str, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "output": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}

MERGE_TOLERANCE = 1e-4  # of the largest logit

PEFT_PREFIX = "base_model.model."


class LoRALinear(nn.Module):
    """x W0^T + b + (alpha / r) dropout(x) A^T B^T, where A is r x in and B out x r, which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)
        weight = base.weight
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=weight.device, dtype=weight.dtype))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=weight.device, dtype=weight.dtype))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(self.dropout(x), self.lora_A), self.lora_B) * self.scale

    def merged(self) -> nn.Linear:
        """The base layer with the update added to its weight, which is changed in place."""
        with torch.no_grad():
            self.base.weight += self.scale * (self.lora_B @ self.lora_A)
        return self.base


def module_names(targets: Iterable[str]) -> tuple[str, ...]:
    """The projections that names such as attention or query,value stand for. Raises UsageError for others."""
    names: list[str] = []
    for target in (word.strip() for item in targets for word in item.split(",")):
        if target not in TARGETS:
            raise UsageError(f"--target {target!r} is not known; choose from: {', '.join(TARGETS)}.")
        names += TARGETS[target]
    return tuple(dict.fromkeys(names))


def add_lora(model: nn.Module, config: AdapterConfig, seed: int = 0) -> None:
    """Freeze the model and put a LoRALinear around every target. A is drawn from `seed`; the outputs do not change.

    Raises UsageError when the model has no such target, and for a rank that none of them can have.
    """
    model.requires_grad_(False)

    def is_target(name: str, module: nn.Module) -> bool:
        return name.rpartition(".")[2] in config.targets

    targets = [module for name, module in model.named_modules() if is_target(name, module)]
    if not targets:
        raise UsageError(f"--target {', '.join(config.targets)} names nothing in this model.")
    largest = max(min(module.weight.shape) for module in targets)
    if config.rank > largest:
        raise UsageError(f"--rank is {config.rank}; the matrices it is for have a rank of at most {largest}.")

    def wrap(module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return LoRALinear(module, config.rank, config.alpha, config.dropout)

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        replace_modules(model, is_target, wrap)


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A and B of every wrapped layer, under PEFT's keys."""
    return {
        f"{PEFT_PREFIX}{name}.{part}.weight": getattr(layer, part)
        for name, layer in lora_layers(model).items()
        for part in ("lora_A", "lora_B")
    }


def load_adapter_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The inverse of `adapter_tensors`. Raises TinyLMError when the tensors are not the layers' own."""
    own = adapter_tensors(model)
    if own.keys() != tensors.keys() or any(own[key].shape != tensors[key].shape for key in own):
        raise TinyLMError("The adapter's weights do not fit the layers of this base; it was made for another one.")
    with torch.no_grad():
        for key, parameter in own.items():
            parameter.copy_(tensors[key])


def merge_lora(model: nn.Module) -> None:
    """Fold every update into its base layer; the model is an ordinary one again."""

    def fold(module: nn.Module) -> nn.Module:
        assert isinstance(module, LoRALinear)
        return module.merged()

    replace_modules(model, lambda _, module: isinstance(module, LoRALinear), fold)


def check_merged(base: Transformer, adapted: Transformer, merged: Transformer) -> tuple[float, float]:
    """Largest differences of logits on a probe: merged from adapted, and adapted from base.

    Raises TinyLMError when merging changed what the model predicts, or the adapter changes nothing.
    """
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(base.embedding.num_embeddings, (4, min(64, base.context)), generator=rng)

    @torch.inference_mode()
    def logits(model: Transformer) -> Tensor:
        return model.logits(model(ids).hidden)

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


def peft_config(config: AdapterConfig) -> dict[str, Any]:
    """adapter_config.json as PEFT writes it for a LoRA."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(config.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
