"""Reads the adapter_config.json of a PEFT LoRA.

All errors are ValueErrors with a reason that completes the sentence "Cannot use FOLDER: ".
"""

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinylm.config.validation import describe_value
from tinylm.formats.foreign_config import ForeignConfig

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
