"""The keys by which `tinylm runs` sorts and filters, and the expressions of --filter."""

import operator
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from tinylm.duration import parse_duration
from tinylm.errors import TinyLMError, UsageError
from tinylm.presets import find_preset
from tinylm.run_config import RunConfig
from tinylm.validation import describe_value

# Keys whose values are entries of the record of a run: the names of these entries.
RECORD_KEYS = {
    "name": "name",
    "kind": "kind",
    "parameters": "parameters",
    "steps": "step",
    "best_step": "best_step",
    "bits_per_byte": "val_bits_per_byte",
    "loss": "val_loss",
    "time": "seconds",
}
# Keys whose values are fields of the configuration, by part.
SETTINGS = {
    "model": (
        *("architecture", "layers", "heads", "kv_heads", "width", "context", "vocab_size", "position", "norm"),
        *("activation", "experts", "dropout"),
    ),
    "training": ("optimizer", "lr", "batch_size", "weight_decay", "schedule", "seed"),
    "adapter": ("rank", "alpha"),
}
KEYS = (*RECORD_KEYS, "age", "preset", "tokenizer", *(name for names in SETTINGS.values() for name in names))
TEXTS = (
    "name",
    "kind",
    "preset",
    "tokenizer",
    "architecture",
    "position",
    "norm",
    "activation",
    "optimizer",
    "schedule",
)
DURATIONS = ("time", "age")  # seconds
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
SUFFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def run_values(record: dict[str, Any], config: RunConfig | None, now: float) -> dict[str, Any]:
    """The value of each of KEYS for one run; `None` for a value that the run does not have.

    record: as `summarise` returns it, with `name`. config: `None` if there is none or it cannot be read. now: seconds
    since the epoch.
    """
    values: dict[str, Any] = dict.fromkeys(KEYS)
    values |= {key: record.get(entry) for key, entry in RECORD_KEYS.items()}
    if (saved := record.get("saved")) is not None:
        values["age"] = now - saved  # negative if the clock was put back
    if config is not None:
        values |= {"preset": find_preset(config.model), "tokenizer": config.tokenizer.kind}
        for part, names in SETTINGS.items():
            values |= {name: getattr(getattr(config, part), name, None) for name in names}
    return values


class Filter(NamedTuple):
    """One expression of --filter: key, comparison, and the value to compare with: a text, a number or seconds.

    A text is a pattern of `fnmatch`, such as *wiki*.
    """

    key: str
    comparison: str
    value: Any

    @classmethod
    def parse(cls, expression: str) -> "Filter":
        """Parse an expression such as loss<1.5. Raises UsageError for any other text."""
        match = re.fullmatch(r"\s*([\w-]+)\s*(<=|>=|!=|==?|<|>)\s*(.*?)\s*", expression)
        if match is None:
            raise UsageError(
                f"`filter` is {describe_value(expression)}; write a key, one of {' '.join(COMPARISONS)} and a value, "
                "as in loss<1.5 or optimizer=muon."
            )
        key, comparison, text = check_key("filter", match[1]), match[2].replace("==", "="), match[3]
        if key in TEXTS and comparison not in ("=", "!="):
            raise UsageError(f"`filter` compares {key} by {comparison}, and it is a text; use = or !=.")
        return cls(key, comparison, text if key in TEXTS else _parse_number(key, text))

    def matches(self, values: dict[str, Any]) -> bool:
        """Whether a run with these values of KEYS passes. A run without a value of the key passes only `!=`."""
        value = values[self.key]
        if value is None:
            return self.comparison == "!="
        if self.key in TEXTS:
            return fnmatchcase(str(value), self.value) == (self.comparison == "=")
        return COMPARISONS[self.comparison](value, self.value)


def check_key(setting: str, name: str) -> str:
    """The key with this name, in which hyphens stand for underscores. Raises UsageError for an unknown name.

    setting: the setting that contains the name, for the message.
    """
    key = name.replace("-", "_")
    if key not in KEYS:
        raise UsageError(f"`{setting}` has no key {describe_value(name)}; the keys are: {', '.join(KEYS)}.")
    return key


def _parse_number(key: str, text: str) -> float:
    """Parse a number such as 0.5, 1e-3 or 10M or, for DURATIONS, the seconds of a duration such as 90s or 5m.

    Raises UsageError for other text.
    """
    if key in DURATIONS:
        try:
            return parse_duration(text)
        except TinyLMError as error:
            raise UsageError(f"`filter` compares {key}, a duration: {error}") from error
    match = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([kMG]?)", text)
    if match is None:
        raise UsageError(f"`filter` compares {key} with {describe_value(text)}; write a number, as in 0.5 or 10M.")
    return float(match[1]) * SUFFIXES[match[2]]


def sort_runs(runs: list[dict[str, Any]], key: str, *, descending: bool) -> list[int]:
    """The indices of the runs in the order of one key. Runs without a value of the key are last.

    runs: the values of KEYS of each run.
    """
    present = [index for index, values in enumerate(runs) if values[key] is not None]
    absent = [index for index, values in enumerate(runs) if values[key] is None]
    return sorted(present, key=lambda index: runs[index][key], reverse=descending) + absent
