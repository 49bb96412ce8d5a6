"""LoRA adapters in PEFT's format, adapter_config.json and adapter_model.safetensors, for a model of a supported family.

A foreign matrix that fuses several matrices of tinylm, such as GPT-2's c_attn, has one adapter. Each of tinylm's
matrices gets the whole A of that adapter, and the rows of B that belong to the matrix. peft_writer.py converts adapters
of tinylm to this format.
"""

import collections
import contextlib
import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tinylm.config.model import ModelConfig
from tinylm.config.validation import describe_value
from tinylm.formats.family import STACKED_EXPERTS, STACKED_PARAMETERS, STACKED_ROUTER, Family, Parameter, Rule
from tinylm.formats.foreign_config import ForeignConfig
from tinylm.formats.safetensors_files import inside, read_object, reading, stored_dtypes
from tinylm.run_directory.tensor_file import DTYPES, StoredTensor, open_file
from tinylm.system.files import hash_file
from tinylm.transformer.build import build_empty_model

ADAPTER_WEIGHTS, ADAPTER_PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
MAX_CONFIG_BYTES = 1 << 22
EMBEDDING, OUTPUT = "embedding", "output"  # tinylm's names of two modules
LINEAR_PARTS = ("lora_A.weight", "lora_B.weight")
EMBEDDING_PARTS = ("lora_embedding_A", "lora_embedding_B")
_LORA = re.compile(rf"(.+)\.({'|'.join(map(re.escape, LINEAR_PARTS + EMBEDDING_PARTS))})")
_BASE = ".base_layer"  # suffix of a module that PEFT has wrapped
_EXPERT = "layers.{layer}.feedforward.experts.{expert}.{projection}"

# adapter_config.json

ADAPTER_CONFIG = "adapter_config.json"
MAX_ENTRIES = 1 << 12  # of a list or of an object in a field
BIASES = ("none", "all", "lora_only")
MAX_PATTERN = 200  # characters of a pattern of module names, and of a name that is matched
# Estimated steps of `re` in all matches of one Pattern, about five seconds, and of the shortest match.
MAX_STEPS, MIN_STEPS = 1 << 34, 1 << 14
# The patterns that are read: text with classes, at most two `.*`, and one group of alternatives. `re` matches these in
# a time that grows with the third power of the length; others may take exponential time.
_TEXT = r"(?:(?:[\w^$-]|\\?\.|\[[\w-]+\]|\\d(?:\+\\\.)?)(?![*+?{]))*"
_GROUP = rf"\((?:\?:)?{_TEXT}(?:\|{_TEXT})*\){_TEXT}"
_PATTERN = re.compile(rf"(?:{_TEXT}\.\*)?{_TEXT}(?:{_GROUP})?(?:\.\*{_TEXT})?", re.ASCII)

# Fields that change the computation, with their values for plain LoRA.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "use_bdlora": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "megatron_config": (None,),
    # Other values may change the base weights (PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ), unless the adapter was converted.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
# Fields that do not change the update. Which modules are adapted follows from the names of the tensors.
_WITHOUT_EFFECT = frozenset(
    {
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config"),
        *("lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    }
)


@dataclass(frozen=True)
class PeftConfig:
    """The fields of an adapter_config.json that loading needs.

    base: the name of the base model, for messages only; `None` if there is none.
    rank, alpha, rank_stabilised: the scale of an update is alpha / rank or, if rank-stabilised, alpha / sqrt(rank).
    ranks, alphas: `rank_pattern` and `alpha_pattern`, the ranks and alphas of modules that have others.
    modules_to_save: names, or ends of names, of modules whose parameters are replaced.
    target_parameters: names, or ends of names, of parameters (usually stacked experts) with a LoRA of their own.
    saves_biases: whether biases are replaced.
    ensure_weight_tying: whether an adapter that replaces the embedding also replaces an output layer tied to it.
    """

    base: str | None
    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: "Pattern"
    alphas: "Pattern"
    modules_to_save: tuple[str, ...]
    target_parameters: tuple[str, ...]
    saves_biases: bool
    ensure_weight_tying: bool

    def scale(self, name: str, rank: int) -> float:
        """The factor of a module's update B A. rank: of its tensors, which must be above 0.

        Raises ValueError if the config has another rank for the module.
        """
        expected, alpha = self.ranks.value(name, self.rank), self.alphas.value(name, self.alpha)
        if rank != expected:
            raise ValueError(f"the tensors of {name} have the rank {rank}; its {ADAPTER_CONFIG} has {expected:g}")
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


class Pattern:
    """`rank_pattern` or `alpha_pattern`: numbers by patterns of module names, of which the first match applies.

    As in PEFT, a pattern matches a whole name, or all of it after a dot.

    Raises ValueError for a pattern that is too long or not supported, which is named. Matching raises ValueError when
    all matches of this object together would take too long.
    """

    def __init__(self, numbers: Mapping[str, float]) -> None:
        self._steps = 0
        self._numbers = [(_compile(pattern), number) for pattern, number in numbers.items()]

    def value(self, name: str, default: float) -> float:
        """The number for the module of this name; `default` without a match. Raises ValueError for a long name."""
        if self._numbers and len(name) > MAX_PATTERN:
            raise ValueError(f"the name of a module has {len(name)} characters; at most {MAX_PATTERN} are matched")
        for pattern, number in self._numbers:
            wildcards, alternatives = pattern.pattern.count(".*"), pattern.pattern.count("|") + 1
            self._steps += MIN_STEPS + alternatives * len(name) ** wildcards
            if self._steps > MAX_STEPS:
                raise ValueError("its patterns of module names take too long to match")
            if pattern.fullmatch(name):
                return number
        return default


def _compile(pattern: str) -> re.Pattern[str]:
    if len(pattern) <= MAX_PATTERN and _PATTERN.fullmatch(pattern):
        with contextlib.suppress(re.error):  # a class such as [z-a]
            return re.compile(rf"(?:.*\.)?(?:{pattern})")
    raise ValueError(
        f"its pattern of module names {describe_value(pattern)} is not supported; a pattern is text of at most "
        f"{MAX_PATTERN} characters with at most two .* and one group such as (q_proj|v_proj)"
    )


def read_peft_config(values: Mapping[str, Any]) -> PeftConfig:
    """Check the content of an adapter_config.json and convert it."""
    config = ForeignConfig(values, ADAPTER_CONFIG)
    if not config.has("peft_type"):
        raise ValueError(f"its {ADAPTER_CONFIG} lacks peft_type")
    for name, allowed in _NEUTRAL.items():
        config.require(name, *allowed)
    bias = config.choice("bias", {name: name for name in BIASES}, "none")
    base = config.value("base_model_name_or_path")
    result = PeftConfig(
        base=base if isinstance(base, str) and base else None,
        rank=config.integer("r", 8),
        alpha=config.number("lora_alpha", 8),
        rank_stabilised=config.flag("use_rslora", False),
        ranks=Pattern(_numbers(config, "rank_pattern")),
        alphas=Pattern(_numbers(config, "alpha_pattern")),
        modules_to_save=_names(config, "modules_to_save"),
        target_parameters=_names(config, "target_parameters"),
        saves_biases=bias != "none",
        ensure_weight_tying=config.flag("ensure_weight_tying", False),
    )
    off = {name for name, value in values.items() if value is None or value is False}  # features of newer versions
    config.check_others(_WITHOUT_EFFECT | off)
    return result


def _names(config: ForeignConfig, field: str) -> tuple[str, ...]:
    value = config.value(field) or []
    if not isinstance(value, list) or len(value) > MAX_ENTRIES or not all(isinstance(v, str) and v for v in value):
        raise ValueError(
            f"{field} of its {ADAPTER_CONFIG} is {describe_value(value)}; it must be a list of at most "
            f"{MAX_ENTRIES} names"
        )
    return tuple(value)


def _numbers(config: ForeignConfig, field: str) -> dict[str, float]:
    value = config.value(field) or {}
    if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
        raise ValueError(
            f"{field} of its {ADAPTER_CONFIG} is {describe_value(value)}; it must be an object of at "
            f"most {MAX_ENTRIES} numbers"
        )
    entries = ForeignConfig(value, ADAPTER_CONFIG)
    return {name: entries.number(name) for name in value}


# Reading.


@dataclass(frozen=True)
class LowRank:
    """The update `scale` B A of a matrix (out, in), with A (r, in) and B (out, r).

    Of the embedding (V, D): `scale` A^T B^T with A (r, V) and B (D, r).
    """

    A: Tensor
    B: Tensor
    scale: float


@dataclass(frozen=True)
class ForeignAdapter:
    """A PEFT adapter under tinylm's names.

    updates: by module name.
    replaced: parameters that replace those of the base, by name.
    stored: parameters of the base that PEFT saved with the adapter, by name.
    The output layer has its own entries, even if the base ties it to the embedding.
    """

    updates: Mapping[str, LowRank]
    replaced: Mapping[str, Tensor]
    stored: Mapping[str, Tensor]


def is_adapter_folder(path: Path) -> bool:
    """Whether a folder has an adapter_config.json but no config.json. A LoRA run of tinylm has both."""
    return os.path.lexists(path / ADAPTER_CONFIG) and not os.path.lexists(path / "config.json")


def adapter_digest(folder: Path) -> str:
    """SHA-256, in hexadecimal, of the hexadecimal SHA-256 digests of the two files of an adapter.

    Raises TinyLMError if a file cannot be read, or is a link (see `inside`).
    """
    with reading(folder, "use"):
        parts = [hash_file(inside(folder, name)) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def read_base_name(folder: Path) -> str | None:
    """The name of the base model that an adapter records, or `None`. For messages only: it may be any path.

    Raises TinyLMError for a config that is damaged or not supported.
    """
    with reading(folder, "use"):
        return _read_config(folder).base


@dataclass(frozen=True)
class AdapterSummary:
    """Summary of an adapter, made without its base model.

    parameters: number of all parameters in the file. dtypes: by decreasing total number of elements.
    modules: last name parts of the modules that have a LoRA, sorted.
    """

    config: PeftConfig
    parameters: int
    dtypes: tuple[str, ...]
    modules: tuple[str, ...]


def summarise_adapter(folder: Path) -> AdapterSummary:
    """The config of an adapter, its number of parameters, dtypes and modules.

    Names and shapes are not compared with a base model. Raises TinyLMError for files that are damaged, and for a config
    that is not that of a plain LoRA.
    """
    with reading(folder, "use"):
        config, tensors = _read_config(folder), _open_weights(folder)
    modules = {match[1].replace(_BASE, "").rpartition(".")[2] for name in tensors if (match := _LORA.fullmatch(name))}
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return AdapterSummary(config, parameters, stored_dtypes(tensors), tuple(sorted(modules)))


def read_adapter(folder: Path, family: Family, config: ModelConfig) -> ForeignAdapter:
    """The adapter in a folder, for a base model of this family and configuration.

    Raises TinyLMError for files that are damaged, for an adapter that is not a plain LoRA, for tensors of modules or
    shapes that the base model does not have, and for values that are not finite.
    """
    with reading(folder, "use"):
        return _Reader(family, config, _read_config(folder)).read(_open_weights(folder))


def _read_config(folder: Path) -> PeftConfig:
    return read_peft_config(read_object(folder, ADAPTER_CONFIG, MAX_CONFIG_BYTES))


def _open_weights(folder: Path) -> dict[str, StoredTensor]:
    if not os.path.lexists(folder / ADAPTER_WEIGHTS) and os.path.lexists(folder / ADAPTER_PICKLE):
        raise ValueError(
            f"{ADAPTER_PICKLE} is a pickle, which can run code and is never opened. Where you trust it, load it by "
            f"peft and save it again, which writes {ADAPTER_WEIGHTS}"
        )
    return open_file(inside(folder, ADAPTER_WEIGHTS), any_dtype=True).tensors


@dataclass(frozen=True)
class _Stacked:
    """A parameter with the matrices of all experts of a layer. projections: the expert projections that it fuses."""

    name: str
    layer: int
    projections: tuple[str, ...]


class _Reader:
    """Converts the tensors of an adapter for a base model. All errors are ValueErrors."""

    def __init__(self, family: Family, config: ModelConfig, peft: PeftConfig) -> None:
        untied = replace(config, tie=False)  # PEFT adapts a tied output layer separately from the embedding
        self._config, self._peft = config, peft
        self._architecture = family.architecture
        self._expected = build_empty_model(untied).state_dict()
        self._parameters: dict[str, Parameter] = {p.foreign: p for p in family.parameters(untied)}
        self._matrices: dict[str, tuple[Rule, tuple[str, ...]]] = {
            foreign: (rule, ours)
            for rule, foreign, ours in family.modules(untied)
            if ours[0] != "position" and f"{foreign}.weight" in self._parameters
            if len(self._parameters[f"{foreign}.weight"].shape) == 2
        }
        self._aliases = {new: foreign for foreign, new in family.renamed.items()}
        self._stacked: dict[str, _Stacked] = {}
        if family.stacked:
            routers = (foreign for _, foreign, ours in family.modules(untied) if ours[0].endswith(".router"))
            for layer, router in enumerate(routers):
                self._aliases[STACKED_ROUTER.format(layer=layer)] = router
                module = STACKED_EXPERTS.format(layer=layer)
                adapted = [p for p in STACKED_PARAMETERS if self._is_target_parameter(f"{module}.{p[0]}")]
                for outer, (name, projections) in enumerate(reversed(adapted)):  # PEFT wraps the module for each
                    self._stacked[module + outer * _BASE] = _Stacked(f"{module}.{name}", layer, projections)

    def _is_target_parameter(self, name: str) -> bool:
        return any(f".{name}".endswith(f".{target}") for target in self._peft.target_parameters)

    def read(self, tensors: Mapping[str, StoredTensor]) -> ForeignAdapter:
        pairs: dict[str, dict[str, StoredTensor]] = collections.defaultdict(dict)
        full: dict[str, StoredTensor] = {}
        for key, tensor in tensors.items():
            name = key.removeprefix(PREFIX)
            if name == key:
                raise ValueError(f"the name of its tensor {key[:200]} does not begin with {PREFIX}")
            if tensor.dtype not in DTYPES.values():
                raise ValueError(f"its tensor {name[:200]} is not of the type float32, float16 or bfloat16")
            if match := _LORA.fullmatch(name):
                pairs[match[1]][match[2]] = tensor
            elif ".lora_" in name:
                raise ValueError(f"its tensor {name[:200]} belongs to a variant of LoRA that is not supported")
            else:
                full[name] = tensor
        updates: dict[str, LowRank] = {}
        for module, parts in pairs.items():
            updates |= self._update(module, parts)
        replaced, stored = self._full_parameters(full)
        if not updates and not replaced:
            raise ValueError(f"{ADAPTER_WEIGHTS} has no tensors of an adapter")
        return ForeignAdapter(updates, replaced, stored)

    def _update(self, module: str, parts: Mapping[str, StoredTensor]) -> dict[str, LowRank]:
        """The updates, by module name, from the pair A, B of one foreign module or of all experts of a layer."""
        foreign = self._aliases.get(module, module)
        if module not in self._stacked and foreign not in self._matrices:
            raise ValueError(
                f"it adapts {module[:200]}, which is not a matrix of the base model ({self._architecture})"
            )
        is_embedding = foreign in self._matrices and self._matrices[foreign][1] == (EMBEDDING,)
        names = EMBEDDING_PARTS if is_embedding else LINEAR_PARTS
        if parts.keys() != set(names):
            raise ValueError(f"the tensors of {module[:200]} are not {' and '.join(names)}")
        a, b = (parts[name] for name in names)
        if module in self._stacked:
            return self._update_experts(self._stacked[module], a, b)
        rule, ours = self._matrices[foreign]
        shapes = [tuple(self._expected[f"{name}.weight"].shape) for name in ours]
        outputs, inputs = sum(out for out, _ in shapes), shapes[0][1]
        if is_embedding:
            outputs, inputs = inputs, outputs
        rank = a.shape[0] if a.shape else 0
        _check_shapes(module, a, b, (rank, inputs), (outputs, rank))
        scale = self._peft.scale(f"{module}.weight" if self._is_target_parameter(f"{module}.weight") else module, rank)
        full_a, rows = _load(a), rule.split_outputs(_load(b), self._config.heads)
        return {name: LowRank(full_a, part, scale) for name, part in zip(ours, rows, strict=True)}

    def _update_experts(self, stacked: _Stacked, a: StoredTensor, b: StoredTensor) -> dict[str, LowRank]:
        """The updates of a layer's experts, from A (E r, in), expert first, and B (out, r E), rank first."""
        experts, projections = self._config.experts, stacked.projections
        names = [_EXPERT.format(layer=stacked.layer, expert=0, projection=name) for name in projections]
        shapes = [self._expected[f"{name}.weight"].shape for name in names]
        outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        rank = a.shape[0] // experts if a.shape else 0
        rows = rank * experts
        _check_shapes(stacked.name, a, b, (rows, inputs), (outputs, rows))
        scale = self._peft.scale(stacked.name, rank)
        by_expert_a = _load(a).unflatten(0, (experts, rank))  # (E r, in) -> (E, r, in)
        by_expert_b = _load(b).unflatten(1, (rank, experts)).permute(2, 0, 1)  # (out, r E) -> (E, out, r)
        return {
            _EXPERT.format(layer=stacked.layer, expert=expert, projection=name): LowRank(
                by_expert_a[expert], part, scale
            )
            for expert in range(experts)
            for name, part in zip(projections, by_expert_b[expert].chunk(len(projections)), strict=True)
        }

    def _full_parameters(self, tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The fields `replaced` and `stored` of ForeignAdapter, from the tensors that are not a part of a LoRA."""
        replaced: dict[str, Tensor] = {}
        stored: dict[str, Tensor] = {}
        found: set[str] = set()
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            is_stored = kind == "weight" and module.endswith(_BASE)
            module = module.removesuffix(_BASE)
            foreign = f"{self._aliases.get(module, module)}.{kind}"
            parameter = self._parameters.get(foreign)
            is_replaced = self._in_modules_to_save(module) or (kind == "bias" and self._peft.saves_biases)
            if parameter is not None and parameter.ours == (f"{OUTPUT}.weight",):
                is_replaced |= self._config.tie and self._peft.ensure_weight_tying
            if parameter is None or not (is_stored or is_replaced):
                raise ValueError(
                    f"its tensor {name[:200]} is unexpected: {self._architecture} has no such parameter, or its "
                    f"{ADAPTER_CONFIG} does not include it"
                )
            _check_shape(name, tensor, parameter.shape)
            parts = parameter.rule.split(_load(tensor), self._config.heads)
            (stored if is_stored else replaced).update(zip(parameter.ours, parts, strict=True))
            found.add(foreign)
        for foreign in self._parameters.keys() - found:
            if self._in_modules_to_save(foreign.rpartition(".")[0]):
                raise ValueError(f"it lacks the tensor {foreign}, which modules_to_save of its {ADAPTER_CONFIG} names")
        return replaced, stored

    def _in_modules_to_save(self, module: str) -> bool:
        """Whether a module or one that contains it ends with a name in `modules_to_save`, as PEFT compares them."""
        targets = self._peft.modules_to_save
        parts = module.split(".")
        return bool(targets) and any(".".join(parts[:n]).endswith(targets) for n in range(1, len(parts) + 1))


def _check_shapes(
    module: str, a: StoredTensor, b: StoredTensor, shape_a: tuple[int, int], shape_b: tuple[int, int]
) -> None:
    _check_shape(f"{module}.lora_A", a, shape_a)
    _check_shape(f"{module}.lora_B", b, shape_b)
    if not shape_a[0]:
        raise ValueError(f"its tensor {a.name[:200]} is empty")


def _check_shape(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"its tensor {name[:200]} has the shape {list(tensor.shape)[:8]}; with this base model it must have "
            f"{list(shape)}"
        )


def _load(tensor: StoredTensor) -> Tensor:
    values = tensor.load()
    if not bool(values.isfinite().all()):
        raise ValueError(f"its tensor {tensor.name[:200]} has values that are not finite numbers")
    return values
