"""The settings of training: fields of dataclasses, from which the options of commands and the Python API follow.

Those of the model and of the training loop are in `model.py` and `training.py`, beside the configurations that they
become. Also durations as text. Imports no torch.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tinylm.config.jobs import all_data, changed_settings
from tinylm.config.model import VOCABULARY, WIDTH
from tinylm.config.presets import PresetSettings
from tinylm.config.run import ALPHA, DEVICES, DTYPES, RANK, TRAIN_ON
from tinylm.config.training import EPOCHS, TeacherSettings, TrainingSettings
from tinylm.config.validation import (
    COUNT_FROM_0,
    COUNT_FROM_1,
    FRACTION,
    Panel,
    Range,
    Setting,
    check_settings,
    convert_fields,
    declared_settings,
    describe_value,
)
from tinylm.errors import UsageError

FORMATS = ("auto", "jsonl", "lines", *all_data())


def parse_duration(text: str) -> float:
    """The seconds of a duration such as 90, 90s, 5m, 1.5h or 1h30m. Raises UsageError for other text."""
    match = re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s?)?", text.strip().lower())
    try:
        if match and any(match.groups()):
            hours, minutes, seconds = (float(part or 0) for part in match.groups())
            return hours * 3600 + minutes * 60 + seconds
    except ValueError:  # such as 1.2.3 or a single point
        pass
    raise UsageError(f"{describe_value(text)} is not a length of time; write it as 90s, 5m or 1h30m.")


def format_duration_setting(seconds: float) -> str:
    """The duration as text that `parse_duration` reads: 90s, 5m or 2h.

    It is rounded up to whole seconds from 1 s on, and below 1 s to the nearest nanosecond.
    """
    if seconds < 1:
        return f"{seconds:.9f}".rstrip("0") + "s"
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size:.0f}{unit}"
    return f"{math.ceil(seconds)}s"


def format_duration(seconds: float) -> str:
    """The duration for people to read: 3725 seconds as 1h 02m."""
    minutes, seconds = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"


@dataclass(frozen=True, kw_only=True)
class TextFileSettings:
    """How text files are read."""

    format: Annotated[
        str,
        Setting(
            "Format of the texts; auto detects it, lines is one document per line.",
            Panel.DATA,
            FORMATS,
        ),
    ] = "auto"
    text_key: Annotated[
        str | None,
        Setting(
            "Key of the text in JSONL, its column in Parquet and CSV (default: text).",
            Panel.DATA,
            metavar="KEY",
            jobs="text masked distillation labels",
        ),
    ] = None
    encoding: Annotated[
        str,
        Setting(
            "Encoding of files that are not UTF-8 and have no byte-order mark.",
            Panel.DATA,
            metavar="NAME",
        ),
    ] = "utf-8"
    exclude: Annotated[
        str | Sequence[str] | None,
        Setting(
            "Leave out files and subfolders that match, such as '*.log'; may be given several times.",
            Panel.DATA,
            metavar="GLOB",
        ),
    ] = None
    skip_bad: Annotated[
        bool, Setting("Leave out files that cannot be read or decoded, instead of an error.", Panel.DATA)
    ] = False

    @property
    def excluded(self) -> tuple[str, ...]:
        """The patterns of `exclude`."""
        return (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude or ())


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How conversations are rendered, and which parts are scored."""

    chat_template: Annotated[
        str | None,
        Setting(
            "Template of conversations: chatml, or a Jinja file (default: the model's own, else chatml).",
            Panel.DATA,
            metavar="chatml|FILE",
            jobs="chat preferences",
        ),
    ] = None
    train_on: Annotated[
        str | None,
        Setting(
            "Scored parts of conversations: all answers, the last answer, or all text (default: assistant).",
            Panel.DATA,
            TRAIN_ON,
            jobs="chat",
            neutral="assistant",
        ),
    ] = None


UNKNOWN = Setting("Characters outside the vocabulary: an error, or skipped.", Panel.DATA, ("error", "skip"))
DEVICE = Setting(
    "Device; auto picks CUDA, then MPS, then the CPU.", Panel.MACHINE, metavar="|".join(("auto", *DEVICES))
)


@dataclass(frozen=True, kw_only=True)
class UnknownCharacterSettings:
    """Characters that the tokenizer cannot encode."""

    unknown: Annotated[str, UNKNOWN] = "error"


@dataclass(frozen=True, kw_only=True)
class TextSettings(TextFileSettings, ChatSettings, UnknownCharacterSettings):
    """How the texts are read, and which part is for validation."""

    val_data: Annotated[
        str | None, Setting("Validation text (default: a part of the corpus).", Panel.DATA, metavar="FILE")
    ] = None
    val_fraction: Annotated[
        float | None,
        Setting(
            "Fraction for validation: the end of a text, or records from all parts (default: 0.1; short texts: none).",
            Panel.DATA,
            Range(0, 1, open_low=True, open_high=True),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BudgetSettings:
    """When training ends; at most one of steps, epochs and time."""

    steps: Annotated[int | None, Setting("Train for N optimizer steps.", Panel.LENGTH, COUNT_FROM_1)] = None
    epochs: Annotated[float | None, Setting("Train for X passes over the training text.", Panel.LENGTH, EPOCHS)] = None
    time: Annotated[
        float | str | None,
        Setting(
            "Wall-clock time of the whole command: 80s, 5m, 1h30m. With --resume: total time of the run.",
            Panel.LENGTH,
            metavar="TIME",
            parse=parse_duration,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """Device and number format."""

    device: Annotated[str, DEVICE] = "auto"
    dtype: Annotated[
        str,
        Setting(
            "Number format; auto: that of the run's training or of 16-bit weights, else by the device.",
            Panel.MACHINE,
            metavar="|".join(("auto", *DTYPES)),
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class MachineSettings(DeviceSettings):
    """Where and how the model computes."""

    compile: Annotated[
        str,
        Setting(
            "Use torch.compile; auto compiles where it saves time.",
            Panel.MACHINE,
            ("auto", "on", "off"),
        ),
    ] = "auto"
    parallel: Annotated[
        str,
        Setting(
            "With torchrun: each process has a replica (ddp) or a shard (fsdp) of the model.",
            Panel.MACHINE,
            ("auto", "ddp", "fsdp"),
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class SharedSettings(MachineSettings, TrainingSettings, TextSettings, BudgetSettings):
    """Settings of every function that trains. A setting that is not given is planned, or has a default.

    Raises UsageError for a value that is not allowed.
    """

    warmup_steps: Annotated[int | None, Setting("Steps of linear warmup to --lr.", Panel.OPTIMIZER, COUNT_FROM_0)] = (
        None
    )
    show_examples: Annotated[
        int,
        Setting(
            "Show the first N training conversations with their scored parts marked.",
            Panel.DATA,
            Range(0, 1 << 16),
            jobs="chat preferences",
        ),
    ] = 0
    force: Annotated[bool, Setting("Replace an existing run or adapter.", Panel.RUN)] = False

    def __post_init__(self) -> None:
        kind: Any = type(self)  # which may have other fields, such as the files of a call
        for field in dataclasses.fields(kind):
            if getattr(self, field.name) is None and field.default not in (None, dataclasses.MISSING):
                object.__setattr__(self, field.name, field.default)
        convert_fields(self)
        check_settings(kind, {name: getattr(self, name) for name in declared_settings(kind)})


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The tokenizer of a new model."""

    tokenizer: Annotated[
        str | None,
        Setting(
            "Tokenizer: characters, byte-level BPE, or a tokenizer.json file (default: auto).",
            Panel.DATA,
            metavar="auto|char|bpe|PATH",
        ),
    ] = None
    vocab_size: Annotated[int | None, Setting("Vocabulary size of a BPE tokenizer.", Panel.DATA, VOCABULARY)] = None


@dataclass(frozen=True, kw_only=True)
class TrainSettings(SharedSettings, TeacherSettings, PresetSettings, TokenizerSettings):
    """Settings of `tinylm.train`."""

    init_from: Annotated[
        str | Path | None,
        Setting("Start from the weights, architecture and tokenizer of this model.", Panel.RUN, metavar="MODEL"),
    ] = None
    teacher: Annotated[
        str | Path | Sequence[str | Path] | None,
        Setting(
            "Learn from the predictions of this model, too, with its tokenizer; may be given several times.",
            Panel.RUN,
            metavar="MODEL",
        ),
    ] = None
    extend_vocab: Annotated[
        bool, Setting("With --init-from: add new characters of the text to the vocabulary.", Panel.RUN)
    ] = False


ADAPTER_DROPOUT = Setting("Dropout on the input of the adapter.", Panel.ADAPTER, FRACTION)


@dataclass(frozen=True, kw_only=True)
class LoRASettings(SharedSettings):
    """Settings of `tinylm.finetune_lora`: those of LoRA, and of its training."""

    kind: ClassVar[str] = "lora"  # of the adapter

    rank: Annotated[
        int | None,
        Setting(
            "Rank of the update (default: 8, or the most that the matrices allow).",
            Panel.ADAPTER,
            RANK,
            flags=("--rank", "-r"),
        ),
    ] = None
    alpha: Annotated[
        float | None,
        Setting("LoRA alpha: the update is scaled by alpha / rank (default: twice the rank).", Panel.ADAPTER, ALPHA),
    ] = None
    rank_stabilised: Annotated[bool, Setting("rsLoRA: scale by alpha / sqrt(rank) instead.", Panel.ADAPTER)] = False
    share_b: Annotated[
        bool, Setting("Share one B among matrices of one name and output size; each has its own A.", Panel.ADAPTER)
    ] = False
    dropout: Annotated[float, ADAPTER_DROPOUT] = 0.0
    target: Annotated[
        str | Sequence[str] | None,
        Setting(
            "Weight matrices to adapt; may be given several times (default: attention).",
            Panel.ADAPTER,
            metavar="attention|query|key|value|output|mlp|experts|router|embedding|all",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(SharedSettings):
    """Settings of `tinylm.finetune_adapter`: those of bottleneck adapters, and of their training."""

    kind: ClassVar[str] = "bottleneck"  # of the adapter

    bottleneck: Annotated[int, Setting("Hidden size of each bottleneck adapter.", Panel.ADAPTER, WIDTH)] = 16
    dropout: Annotated[float, ADAPTER_DROPOUT] = 0.0


def names_of(*kinds: Any) -> frozenset[str]:
    """The names of the settings of these dataclasses."""
    return frozenset(field.name for kind in kinds for field in dataclasses.fields(kind))


MODEL_NAMES = names_of(PresetSettings)
INTERVAL_NAMES = frozenset(("eval_every", "save_every", "log_every"))
# Settings that can change when a run is resumed.
RESUMABLE_NAMES = names_of(BudgetSettings) | INTERVAL_NAMES | {"patience", "parallel", "teacher"}


def given_settings(settings: SharedSettings) -> dict[str, Any]:
    """The settings that differ from their defaults, by name."""
    kind: Any = type(settings)
    declared = declared_settings(kind)
    return {name: value for name, value in changed_settings(settings).items() if name in declared}


def reject_fixed_settings(
    settings: dict[str, Any], fixed_by: str, fixed: Collection[str], ignorable: Collection[str]
) -> dict[str, Any]:
    """The settings without those in `fixed`, whose values the setting `fixed_by` determines.

    Raises UsageError if `settings` has any of these that is not in `ignorable`.
    """
    rejected = {name: value for name, value in settings.items() if name in fixed and name not in ignorable}
    if rejected:
        names = ", ".join(f"`{name}=False`" if value is False else f"`{name}`" for name, value in rejected.items())
        those = "it" if len(rejected) == 1 else "them"
        raise UsageError(f"`{fixed_by}` fixes {names}; leave {those} out, or leave out `{fixed_by}`.")
    return {name: value for name, value in settings.items() if name not in fixed}
