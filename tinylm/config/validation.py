"""The allowed values of settings, in one table, and the checks that use it.

Messages name a setting in backticks, as in `kv_heads`; the command layer replaces it by the flag.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tinylm.errors import UsageError


class Range(NamedTuple):
    """An interval of numbers. It includes `low` and `high`, unless `open_low` or `open_high` is set."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def contains(self, value: float) -> bool:
        """Whether the interval contains `value`; False for NaN."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        if not self.open_low and not self.open_high:
            return f"from {self.low} to {self.high}"
        start = "greater than" if self.open_low else "at least"
        return f"{start} {self.low} and {'below' if self.open_high else 'at most'} {self.high}"


MAX_COUNT = 1 << 53  # float64 represents integers exactly up to here
FRACTION = Range(0, 1, open_high=True)
COUNT_FROM_0 = Range(0, MAX_COUNT)
COUNT_FROM_1 = Range(1, MAX_COUNT)

# Ranges of numbers in configurations, and of settings of the same name. Large published models have 128 layers, 512
# experts, width 18,432 or a vocabulary of 262,144. Combinations can still be too large to build: ModelConfig bounds the
# number of blocks, of position entries and of parameters.
RANGES: dict[str, Range] = {
    # Model
    "vocab_size": Range(1, 1 << 24),
    "context": Range(1, 1 << 20),
    "layers": Range(1, 1024),
    "encoder_layers": Range(1, 1024),
    "heads": Range(1, 1024),
    "kv_heads": Range(1, 1024),
    "width": Range(1, 1 << 16),
    "ffn_width": Range(1, 1 << 18),
    "head_dim": Range(1, 1 << 16),
    "rotary_dim": Range(1, 1 << 16),
    "rope_theta": Range(1, 1e12),
    "local_rope_theta": Range(1, 1e12),
    "factor": Range(1, 1e6),  # of RoPE scaling, like the next six
    "original_context": Range(1, 1 << 20),
    "low_freq_factor": Range(0, 1e6, open_low=True),
    "high_freq_factor": Range(0, 1e6, open_low=True),
    "beta_fast": Range(1e-6, 1e6),
    "beta_slow": Range(1e-6, 1e6),
    "attention_factor": Range(0, 1000, open_low=True),
    "norm_epsilon": Range(0, 1, open_low=True),
    "embedding_scale": Range(0, 1e6, open_low=True),
    "attention_multiplier": Range(0, 1000, open_low=True),
    "dropout": FRACTION,
    "attention_dropout": FRACTION,
    "relative_clip": Range(1, 1 << 20),
    "local_window": Range(1, 1 << 20),
    "experts": Range(1, 1024),
    "experts_per_token": Range(1, 1024),
    "expert_balance": Range(0, 1000),
    # Adapter
    "rank": Range(1, 1 << 16),
    "bottleneck": Range(1, 1 << 16),
    "alpha": Range(0, 1e6, open_low=True),
    # Training
    "steps": COUNT_FROM_1,
    "epochs": Range(0, 1e6, open_low=True),
    "time": Range(0, 366 * 24 * 3600, open_low=True),  # seconds
    "patience": COUNT_FROM_1,
    "batch_size": Range(1, 1 << 20),
    "micro_batch": Range(1, 1 << 20),
    "sequence_length": Range(1, 1 << 24),
    "sequence_growth": Range(1, 4),
    "lr": Range(0, 1000, open_low=True),
    "min_lr": Range(0, 1000),
    "warmup": Range(0, 1),
    "warmup_steps": COUNT_FROM_0,
    "weight_decay": Range(0, 1000),
    "beta1": FRACTION,
    "beta2": FRACTION,
    "epsilon": Range(0, 1, open_low=True),
    "momentum": FRACTION,
    "grad_clip": Range(0, 1e6),
    "label_smoothing": FRACTION,
    "mtp_weight": Range(0, 1),
    "average": Range(0, 0.5),
    "eval_every": COUNT_FROM_1,
    "eval_tokens": COUNT_FROM_1,
    "save_every": COUNT_FROM_1,
    "log_every": COUNT_FROM_1,
    "seed": Range(0, 1 << 63, open_high=True),
    "threads": Range(1, 1024),
    "matmul_rate": Range(0, 1e18, open_low=True),  # FLOP/s of matrix multiplication
    "layer_seconds": Range(0, 1, open_low=True),  # per token and layer
    # Sampling, translation and evaluation
    "temperature": Range(0, 100),  # above 100, sampling is almost uniform
    "top_k": Range(0, 2**31 - 1),
    "top_p": Range(0, 1, open_low=True),
    "min_p": FRACTION,
    "repeat_penalty": Range(0.001, 1000),
    "max_tokens": Range(1, 2**31 - 1),
    "logprobs": Range(0, 100),
    "port": Range(0, 65_535),
    "parallel": Range(1, 256),
    "serving_context": Range(1, 1 << 20),
    "show_examples": Range(0, 1 << 16),
    "num_samples": Range(1, 1 << 16),
    "beams": Range(1, 256),
    "length_penalty": Range(-10, 10),
    "stride": Range(1, 1 << 20),
    "sample_length": Range(10, 1 << 20),
    "prefix_length": Range(1, 1 << 20),
    "min_match": Range(5, 1 << 20),
    # Corpus
    "val_fraction": Range(0, 1, open_low=True, open_high=True),
    "train_characters": COUNT_FROM_0,
    "characters": COUNT_FROM_0,
    "bytes": COUNT_FROM_0,
    "documents": COUNT_FROM_0,
    "line_breaks": COUNT_FROM_0,
    "train_tokens": COUNT_FROM_0,
    "val_tokens": COUNT_FROM_0,
    "val_bytes": COUNT_FROM_0,
    "val_records": COUNT_FROM_0,
    "train_pairs": COUNT_FROM_0,
    # Run
    "format": COUNT_FROM_1,
    "merged_steps": COUNT_FROM_0,
    "seconds": Range(0, 1e30),
    "memory": COUNT_FROM_0,  # bytes
}
MAX_CHARACTERS = 4096  # of a string, which may be a path
MAX_ENTRIES = {"corpus": 1 << 20, "val_corpus": 1 << 20}  # of a list; a glob may match many files
DEFAULT_MAX_ENTRIES = 1024


def require(condition: bool, message: str) -> None:
    """Raise UsageError with the message unless the condition holds."""
    if not condition:
        raise UsageError(message)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless the value of the setting `name` is one of the choices."""
    require(value in choices, f"`{name}` is {describe_value(value)}; it must be one of: {', '.join(choices)}.")


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raise UsageError for a number outside of its range in `RANGES`, and for True or False in its place.

    Settings without a range are not checked.
    """
    for name, value in values.items():
        if name in RANGES and isinstance(value, (int, float)):
            require(not isinstance(value, bool), f"`{name}` is {value}; it must be a number.")
            require(RANGES[name].contains(value), f"`{name}` is {describe_value(value)}; it must be {RANGES[name]}.")


def check_values(values: Mapping[str, Any]) -> None:
    """As `check_numbers`; also checks the length of strings and lists, the entries of lists, and that strings can be
    paths. Raises UsageError for the first invalid value.
    """
    check_numbers(values)
    for name, value in values.items():
        if isinstance(value, str):
            _check_string(name, value)
        elif isinstance(value, (tuple, list)):
            limit = MAX_ENTRIES.get(name, DEFAULT_MAX_ENTRIES)
            require(len(value) <= limit, f"`{name}` has {len(value)} entries; it can have at most {limit}.")
            for entry in value:
                if isinstance(entry, str):
                    _check_string(name, entry)
                check_numbers({name: entry})


def _check_string(name: str, value: str) -> None:
    require(
        len(value) <= MAX_CHARACTERS,
        f"`{name}` has {len(value)} characters; it can have at most {MAX_CHARACTERS}.",
    )
    require("\0" not in value, f"`{name}` contains a NUL character; remove it.")
    try:
        value.encode("utf-8", "surrogateescape")  # Python's form of file names that are not UTF-8
    except UnicodeEncodeError:
        raise UsageError(f"`{name}` contains half of a surrogate pair, which is not a character.") from None


def describe_value(value: Any) -> str:
    """The value as text for a message: at most 60 characters of its repr, or its kind for a list, an object and a
    number of more than 40 digits.
    """
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
