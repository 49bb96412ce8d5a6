"""Writing a LoRA adapter of tinylm in PEFT's format, with the module names of a Hugging Face model family."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinylm.config.model import ModelConfig
from tinylm.config.run import AdapterConfig
from tinylm.errors import UsageError
from tinylm.formats.family import Family, Rule
from tinylm.formats.peft import ADAPTER_WEIGHTS, EMBEDDING, EMBEDDING_PARTS, LINEAR_PARTS, OUTPUT, PREFIX
from tinylm.formats.peft_config import ADAPTER_CONFIG
from tinylm.formats.safetensors_files import write_file
from tinylm.system.files import is_unicode, write_text

Factors = Mapping[str, tuple[Tensor, Tensor]]  # by module name: A (r, in) and B (out, r) of a LoRA


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter in PEFT's format before it is written.

    tensors: by PEFT's names.
    rules: the rules of the adapted modules, by `Rule.foreign`.
    parts: the number of tinylm's adapters that are concatenated along the rank, if above 1; by `_suffix` of the module.
    has_dropout: False if experts or routers are adapted, for which PEFT has no dropout.
    """

    config: AdapterConfig
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    has_dropout: bool = True


def convert_adapter(family: Family, model: ModelConfig, adapter: AdapterConfig, factors: Factors) -> PeftAdapter:
    """Convert an adapter to PEFT's format for the transformers class of the family.

    factors: of the adapted modules; for the embedding, A (r, V) and B (D, r). An output layer that is tied to the
    embedding gets the same factors, transposed: PEFT does not adapt it with the embedding.

    Raises UsageError for a module that PEFT cannot adapt in this family, and for adapted experts of which only some of
    the projections that transformers 5 fuses are adapted.
    """
    untied = replace(model, tie=False)
    modules = [item for item in family.modules(untied) if any(name in factors for name in item[2])]
    missing = factors.keys() - {name for _, _, ours in modules for name in ours}
    if missing:
        raise UsageError(f"PEFT cannot adapt {min(missing)}, since {family.architecture} has no such module.")
    _check_experts(family, factors, adapter)
    has_experts = family.stacked is not None and any(
        name.endswith(".router") or ".experts." in name for name in factors
    )
    if has_experts and adapter.rank_stabilised:  # PEFT fuses experts as if their scale were alpha / r
        adapter = replace(adapter, rank_stabilised=False, alpha=adapter.scale * adapter.rank)
    result = PeftAdapter(adapter, has_dropout=not has_experts)
    for rule, foreign, ours in modules:
        result.rules[rule.foreign] = rule
        if ours == (EMBEDDING,):
            a, b = factors[EMBEDDING]
            result.tensors.update(_named(foreign, EMBEDDING_PARTS, a, b))
            if model.tie:
                output = next(rule for rule in family.rules if rule.ours == (OUTPUT,))
                result.rules[output.foreign] = output
                names = (output.foreign, family.renamed.get(output.foreign, output.foreign))
                for name in names:  # each version of transformers reads one, and ignores the other
                    result.tensors.update(_named(name, LINEAR_PARTS, b.T, a.T))
            continue
        a, b = _fuse(rule, [factors.get(name) for name in ours], model.heads)
        result.tensors.update(_named(foreign, LINEAR_PARTS, a, b))
        if len(a) != adapter.rank:
            result.parts[_suffix(rule)] = len(a) // adapter.rank
    return result


def _check_experts(family: Family, factors: Factors, adapter: AdapterConfig) -> None:
    """Raise UsageError if only some of the expert projections that transformers 5 fuses are adapted.

    PEFT adapts fused projections together or not at all.
    """
    if family.stacked is None:
        return
    adapted = {name.rpartition(".")[2] for name in factors if ".experts." in name}
    for _, projections in family.stacked.parameters:
        missing = [name for name in projections if name not in adapted]
        if adapted.intersection(projections) and missing:
            raise UsageError(
                f"PEFT adapts {' and '.join(projections)} of the experts only together, and {' and '.join(missing)} is "
                "not adapted; train the adapter with the `target` mlp."
            )


def _named(module: str, parts: tuple[str, str], a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"{PREFIX}{module}.{part}": tensor for part, tensor in zip(parts, (a, b), strict=True)}


def _fuse(rule: Rule, factors: Sequence[tuple[Tensor, Tensor] | None], heads: int) -> tuple[Tensor, Tensor]:
    """Fuse the adapters of the matrices that a rule fuses, which have equal shapes (out, in). `None`: not adapted.

    Returns A (R, in), where R is the sum of the ranks, with the rows of all adapters, and B (matrices * out, R) with
    one block per adapter and zeros elsewhere. The only adapter of a matrix that is not fused is returned unchanged.
    """
    present = [pair for pair in factors if pair is not None]
    if len(factors) == 1:
        return present[0]
    rank = sum(len(a) for a, _ in present)
    first = 0
    blocks = []
    for pair in factors:
        block = present[0][1].new_zeros(len(present[0][1]), rank)
        if pair is not None:
            block[:, first : first + len(pair[0])] = pair[1]
            first += len(pair[0])
        blocks.append(block)
    return torch.cat([a for a, _ in present]), rule.join_outputs(blocks, heads)


def _suffix(rule: Rule) -> str:
    """The name of a module within its expert or layer; outside of the layers, the last part of its name."""
    for placeholder in ("{expert}.", "{layer}."):
        if placeholder in rule.foreign:
            return rule.foreign.rpartition(placeholder)[2]
    return rule.foreign.rpartition(".")[2]


def write_adapter(folder: Path, family: Family, adapter: PeftAdapter, base: str | None) -> None:
    """Write the two files of an adapter into a folder, which must exist. base: the name of the base model to record.

    Raises OSError.
    """
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in adapter.tensors.items()}
    write_file(folder / ADAPTER_WEIGHTS, layout, adapter.tensors.__getitem__)
    text = json.dumps(_config_fields(family, adapter, base), ensure_ascii=False, indent=2)
    write_text(folder / ADAPTER_CONFIG, text + "\n")


def _config_fields(family: Family, adapter: PeftAdapter, base: str | None) -> dict[str, Any]:
    config = adapter.config
    linear = [rule for rule in adapter.rules.values() if rule.ours != (EMBEDDING,)]
    alphas = {
        name: config.alpha * (math.sqrt(parts) if config.rank_stabilised else parts)
        for name, parts in adapter.parts.items()
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if base is not None and is_unicode(base) else None,  # JSON is UTF-8
        "r": config.rank,
        "lora_alpha": _number(config.alpha),
        "lora_dropout": config.dropout if adapter.has_dropout else 0.0,  # PEFT has none for stacked experts
        "use_rslora": config.rank_stabilised,
        "target_modules": _target_modules(family, adapter),
        "rank_pattern": {_escape(name): config.rank * parts for name, parts in adapter.parts.items()},
        "alpha_pattern": {_escape(name): _number(alpha) for name, alpha in alphas.items()},
        "bias": "none",
        "fan_in_fan_out": bool(linear) and all(rule.transposed for rule in linear),
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _number(value: float) -> float:
    return int(value) if value == int(value) else value


def _escape(name: str) -> str:
    return name.replace(".", r"\.")


def _target_modules(family: Family, adapter: PeftAdapter) -> list[str]:
    """The last part of each module's name, or its `_suffix` if a module that is not adapted ends with the same part.

    Both names of a renamed module are included, since each version of transformers has one of them.
    """
    others = {_suffix(rule).rpartition(".")[2] for rule in family.rules if rule.foreign not in adapter.rules}
    names = (_suffix(rule) for rule in adapter.rules.values())
    shortest = (name if name.rpartition(".")[2] in others else name.rpartition(".")[2] for name in names)
    renamed = (new for foreign, new in family.renamed.items() if foreign in adapter.rules)
    return sorted({*shortest, *renamed})
