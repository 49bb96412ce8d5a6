"""What a value may be, by the setting's name; every message quotes the command-line flag. Raises UsageError."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tinylm.errors import UsageError


class Range(NamedTuple):
    """The numbers from `least` to `most`; `open_start` and `open_end` exclude the number at that end."""

    least: float
    most: float
    open_start: bool = False
    open_end: bool = False

    def has(self, value: float) -> bool:
        """False for NaN, since no comparison with it holds."""
        above = value > self.least if self.open_start else value >= self.least
        below = value < self.most if self.open_end else value <= self.most
        return above and below

    def __str__(self) -> str:
        if not self.open_start and not self.open_end:
            return f"from {self.least} to {self.most}"
        start = "greater than" if self.open_start else "at least"
        return f"{start} {self.least} and {'below' if self.open_end else 'at most'} {self.most}"


MOST_COUNT = 1 << 53  # integers up to here are exact as floating-point numbers
SHARE = Range(0, 1, open_end=True)
COUNT_FROM_0 = Range(0, MOST_COUNT)
COUNT_FROM_1 = Range(1, MOST_COUNT)

# Of every number in a configuration, and of the options with these names. Published models fit with room to spare (the
# largest have 128 layers, 512 experts, a width of 18,432 and a vocabulary of 262,144), and a model in these ranges can
# be described without much time or memory: see also ModelConfig, which bounds products of them.
RANGES: dict[str, Range] = {
    # The model
    "vocab_size": Range(1, 1 << 24),
    "context": Range(1, 1 << 20),
    "layers": Range(1, 1024),
    "encoder_layers": Range(1, 1024),
    "heads": Range(1, 1024),
    "kv_heads": Range(1, 1024),
    "width": Range(1, 1 << 16),
    "ffn_width": Range(1, 1 << 18),
    "rope_theta": Range(1, 1e12),
    "dropout": SHARE,
    "attention_dropout": SHARE,
    "relative_clip": Range(1, 1 << 20),
    "local_window": Range(1, 1 << 20),
    "experts": Range(1, 1024),
    "experts_per_token": Range(1, 1024),
    "expert_balance": Range(0, 1000),
    # An adapter
    "rank": Range(1, 1 << 16),
    "bottleneck": Range(1, 1 << 16),
    "alpha": Range(0, 1e6, open_start=True),
    # Training
    "steps": COUNT_FROM_1,
    "epochs": Range(0, 1e6, open_start=True),
    "time": Range(0, 366 * 24 * 3600, open_start=True),
    "patience": COUNT_FROM_1,
    "batch_size": Range(1, 1 << 20),
    "micro_batch": Range(1, 1 << 20),
    "lr": Range(0, 1000, open_start=True),
    "min_lr": Range(0, 1000),
    "warmup": Range(0, 1),
    "warmup_steps": COUNT_FROM_0,
    "weight_decay": Range(0, 1000),
    "beta1": SHARE,
    "beta2": SHARE,
    "epsilon": Range(0, 1, open_start=True),
    "grad_clip": Range(0, 1e6),
    "label_smoothing": SHARE,
    "average": Range(0, 0.5),
    "eval_every": COUNT_FROM_1,
    "eval_tokens": COUNT_FROM_1,
    "save_every": COUNT_FROM_1,
    "log_every": COUNT_FROM_1,
    "seed": Range(0, 1 << 63, open_end=True),
    "threads": Range(1, 1024),
    "product_rate": Range(0, 1e18, open_start=True),
    # Sampling, translation and evaluation
    "temperature": Range(0, 100),  # beyond that, tokens are drawn almost evenly
    "top_k": Range(0, 2**31 - 1),
    "top_p": Range(0, 1, open_start=True),
    "min_p": SHARE,
    "repeat_penalty": Range(0.001, 1000),
    "max_tokens": Range(1, 2**31 - 1),
    "num_samples": Range(1, 1 << 16),
    "beams": Range(1, 256),
    "length_penalty": Range(-10, 10),
    "stride": Range(1, 1 << 20),
    # The text
    "val_fraction": Range(0, 1, open_start=True, open_end=True),
    "train_characters": COUNT_FROM_0,
    "characters": COUNT_FROM_0,
    "bytes": COUNT_FROM_0,
    "documents": COUNT_FROM_0,
    "train_tokens": COUNT_FROM_0,
    "val_tokens": COUNT_FROM_0,
    "train_pairs": COUNT_FROM_0,
    # The run
    "format": COUNT_FROM_1,
    "merged_steps": COUNT_FROM_0,
}
MOST_CHARACTERS = 4096  # of a string, which may be a path
MOST_ENTRIES = {"corpus": 1 << 20, "val_corpus": 1 << 20}  # of a list; a shell's pattern may stand for many files
MOST_ENTRIES_ELSEWHERE = 1024


def flag(name: str) -> str:
    """The command-line spelling of a configuration field."""
    return "--" + name.replace("_", "-")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    require(value in allowed, f"{flag(name)} is {shown(value)}; it must be one of: {', '.join(allowed)}.")


def check_numbers(values: Mapping[str, Any]) -> None:
    """Every number among the values that has a range must be in it."""
    for name, value in values.items():
        if name in RANGES and isinstance(value, (int, float)) and not isinstance(value, bool):
            require(RANGES[name].has(value), f"{flag(name)} is {shown(value)}; it must be {RANGES[name]}.")


def check_values(values: Mapping[str, Any]) -> None:
    """As `check_numbers`; and strings and lists must be of a bounded length, and strings such that they can be printed
    and be paths.
    """
    check_numbers(values)
    for name, value in values.items():
        if isinstance(value, str):
            _check_string(name, value)
        elif isinstance(value, (tuple, list)):
            most = MOST_ENTRIES.get(name, MOST_ENTRIES_ELSEWHERE)
            require(len(value) <= most, f"{flag(name)} has {len(value)} entries; it can have at most {most}.")
            for entry in value:
                if isinstance(entry, str):
                    _check_string(name, entry)
                check_numbers({name: entry})


def _check_string(name: str, value: str) -> None:
    require(
        len(value) <= MOST_CHARACTERS,
        f"{flag(name)} has {len(value)} characters; it can have at most {MOST_CHARACTERS}.",
    )
    require("\0" not in value, f"{flag(name)} has a NUL character in it; leave it out.")
    try:
        value.encode("utf-8", "surrogateescape")  # so does Python name files whose names are not UTF-8
    except UnicodeEncodeError:
        raise UsageError(f"{flag(name)} has half of a surrogate pair in it, which is no character.") from None


def shown(value: Any) -> str:
    """A value in a message: a long one is cut, and of a list or an object only the kind is named."""
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
