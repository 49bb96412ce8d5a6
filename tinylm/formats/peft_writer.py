"""Writing a LoRA adapter of tinylm in PEFT's format, with the module names of a Hugging Face model family."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinylm.config.model import ModelConfig
from tinylm.config.run import AdapterConfig
from tinylm.errors import UsageError
from tinylm.formats.family import STACKED_PARAMETERS, Family, Rule
from tinylm.formats.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    EMBEDDING,
    EMBEDDING_PARTS,
    LINEAR_PARTS,
    OUTPUT,
    PREFIX,
)
from tinylm.formats.safetensors_files import write_file
from tinylm.system.files import is_unicode, write_text

Factors = Mapping[str, tuple[Tensor, Tensor]]  # by module name: A (r, in) and B (out, r) of a LoRA


def convert_adapter(
    family: Family, model: ModelConfig, adapter: AdapterConfig, factors: Factors, base: str | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert an adapter to PEFT's format for the transformers class of the family: to tensors, by PEFT's names, and
    the fields of an adapter_config.json.

    factors: of the adapted modules; for the embedding, A (r, V) and B (D, r). An output layer that is tied to the
    embedding gets the same factors, transposed: PEFT does not adapt it with the embedding.
    base: the name of the base model to record.

    Raises UsageError for a module that PEFT cannot adapt in this family, and for adapted experts of which only some of
    the projections that transformers 5 fuses are adapted.
    """
    untied = replace(model, tie=False)
    modules = [item for item in family.modules(untied) if any(name in factors for name in item[2])]
    missing = factors.keys() - {name for _, _, ours in modules for name in ours}
    if missing:
        raise UsageError(f"PEFT cannot adapt {min(missing)}, since {family.architecture} has no such module.")
    if family.stacked:
        _check_experts(factors)
        if any(name.endswith(".router") or ".experts." in name for name in factors):
            adapter = replace(adapter, dropout=0.0)  # PEFT has none for stacked experts
            if adapter.rank_stabilised:  # PEFT fuses experts as if their scale were alpha / r
                adapter = replace(adapter, rank_stabilised=False, alpha=adapter.scale * adapter.rank)
    tensors: dict[str, Tensor] = {}
    rules: dict[str, Rule] = {}  # of the adapted modules, by `Rule.foreign`
    parts: dict[str, int] = {}  # by `_suffix`: how many adapters of tinylm a module has, if several
    for rule, foreign, ours in modules:
        rules[rule.foreign] = rule
        if ours == (EMBEDDING,):
            a, b = factors[EMBEDDING]
            tensors |= _named(foreign, EMBEDDING_PARTS, a, b)
            if model.tie:
                output = next(rule for rule in family.rules if rule.ours == (OUTPUT,))
                rules[output.foreign] = output
                names = (output.foreign, family.renamed.get(output.foreign, output.foreign))
                for name in names:  # each version of transformers reads one, and ignores the other
                    tensors |= _named(name, LINEAR_PARTS, b.T, a.T)
            continue
        a, b = _fuse(rule, [factors.get(name) for name in ours], model.heads)
        tensors |= _named(foreign, LINEAR_PARTS, a, b)
        if len(a) != adapter.rank:
            parts[_suffix(rule)] = len(a) // adapter.rank
    return tensors, _config_fields(family, adapter, rules, parts, base)


def _check_experts(factors: Factors) -> None:
    """Raise UsageError if only some of the expert projections that transformers 5 fuses are adapted.

    PEFT adapts fused projections together or not at all.
    """
    adapted = {name.rpartition(".")[2] for name in factors if ".experts." in name}
    for _, projections in STACKED_PARAMETERS:
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


def _config_fields(
    family: Family, adapter: AdapterConfig, rules: Mapping[str, Rule], parts: Mapping[str, int], base: str | None
) -> dict[str, Any]:
    linear = [rule for rule in rules.values() if rule.ours != (EMBEDDING,)]
    alphas = {
        name: adapter.alpha * (math.sqrt(count) if adapter.rank_stabilised else count) for name, count in parts.items()
    }

    # The last part of each module's name, or its suffix if a module that is not adapted ends with the same part. Both
    # names of a renamed module, since each version of transformers has one of them
    others = {_suffix(rule).rpartition(".")[2] for rule in family.rules if rule.foreign not in rules}
    names = [_suffix(rule) for rule in rules.values()]
    targets = {name if name.rpartition(".")[2] in others else name.rpartition(".")[2] for name in names}
    targets.update(new for foreign, new in family.renamed.items() if foreign in rules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if base is not None and is_unicode(base) else None,  # JSON is UTF-8
        "r": adapter.rank,
        "lora_alpha": _number(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rank_stabilised,
        "target_modules": sorted(targets),
        "rank_pattern": {_escape(name): adapter.rank * count for name, count in parts.items()},
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


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
    """Write the two files of an adapter, as `convert_adapter` returns them, into a folder, which must exist.

    Raises OSError.
    """
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    write_file(folder / ADAPTER_WEIGHTS, layout, tensors.__getitem__)
    write_text(folder / ADAPTER_CONFIG, json.dumps(fields, ensure_ascii=False, indent=2) + "\n")
