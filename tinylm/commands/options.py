"""Options that several commands share, in groups."""

import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tinylm.checks import shown
from tinylm.commands.groups import given
from tinylm.commands.sources import read_config_file
from tinylm.config import (
    ACTIVATIONS,
    ARCHITECTURES,
    EXPERT_MODES,
    INITIALISATIONS,
    NORM_PLACEMENTS,
    NORMS,
    OPTIMIZERS,
    POSITIONS,
    SCHEDULES,
)
from tinylm.console import Console
from tinylm.errors import UsageError
from tinylm.presets import PRESETS, SIZES


def parse_duration(text: str) -> float:
    """Seconds in 90, 90s, 5m, 1.5h or 1h30m."""
    match = re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s?)?", str(text).strip().lower())
    if not match or not any(match.groups()):
        raise typer.BadParameter(f"{shown(text)} is not a length of time; write it as 90s, 5m or 1h30m.")
    try:
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
    except ValueError:
        raise typer.BadParameter(f"{shown(text)} is not a length of time; write it as 90s, 5m or 1h30m.") from None
    return hours * 3600 + minutes * 60 + seconds


def remember_debug(context: typer.Context, debug: bool) -> bool:
    context.find_root().obj = {"debug": debug}
    return debug


def option(help: str, panel: str | None = None, metavar: str | None = None, *names: str, **extra: Any) -> Any:
    """An option with its help panel. The lower-case words of a metavar such as auto|char|PATH complete in the shell."""
    values = [word for word in (metavar or "").split("|") if word and not word.isupper()]
    if len(values) > 1:
        extra.setdefault("autocompletion", lambda incomplete: [word for word in values if word.startswith(incomplete)])
    return typer.Option(
        *names, help=help, rich_help_panel=panel, metavar=metavar, show_default=False, show_envvar=False, **extra
    )


def one_of(values: typing.Iterable[str]) -> str:
    return "|".join(values)


OUTPUT, DATA, WHERE, BUDGET, MODEL, SWITCHES, EXPERTS, OPTIMIZER, RHYTHM, MACHINE = (
    "Output",
    "Data",
    "Run directory",
    "Training length",
    "Model",
    "Model parts (on or off)",
    "Experts",
    "Optimizer",
    "Intervals",
    "Machine",
)


@dataclass(frozen=True)
class OutputOptions:
    quiet: Annotated[bool, option("Print no progress and no notes on stderr.", OUTPUT, None, "--quiet", "-q")] = False
    json: Annotated[bool, option("Print results as JSON, one object per line.", OUTPUT, None, "--json")] = False
    config: Annotated[
        Path | None,
        option(
            "TOML file with options; flags and TINYLM_<COMMAND>_<OPTION> variables override it.",
            OUTPUT,
            "FILE",
            "--config",
            callback=read_config_file,
            is_eager=True,
        ),
    ] = None
    # After the file, which may set it.
    debug: Annotated[
        bool,
        option("Print a traceback with errors.", OUTPUT, None, "--debug", callback=remember_debug, is_eager=True),
    ] = False

    def console(self) -> Console:
        return Console(self.quiet, self.json)


@dataclass(frozen=True)
class MachineOptions:
    device: Annotated[str, option("Device; auto picks CUDA, then MPS, then the CPU.", MACHINE, "auto|cuda|mps|cpu")] = (
        "auto"
    )
    dtype: Annotated[
        str,
        option(
            "Floating-point format; auto picks bf16 or fp32 for the device.",
            MACHINE,
            "auto|fp32|bf16|fp16",
        ),
    ] = "auto"


@dataclass(frozen=True)
class CompileOptions:
    compile: Annotated[
        str, option("Use torch.compile; auto compiles where it saves time (default: auto).", MACHINE, "auto|on|off")
    ] = "auto"


@dataclass(frozen=True)
class TextOptions:
    format: Annotated[
        str,
        option(
            "Format of the texts; auto goes by file names, lines is one document per line (default: auto).",
            DATA,
            one_of(["auto", "text", "jsonl", "lines", "pairs"]),
        ),
    ] = "auto"
    text_key: Annotated[str | None, option("JSONL key of the text (default: text).", DATA, "KEY")] = None
    encoding: Annotated[str, option("Encoding of the text files (default: utf-8).", DATA, "NAME")] = "utf-8"


@dataclass(frozen=True)
class UnknownOptions:
    unknown: Annotated[
        str,
        option("Characters outside the vocabulary: an error, or skipped (default: error).", DATA, "error|skip"),
    ] = "error"

    def __post_init__(self) -> None:
        if self.unknown not in ("error", "skip"):
            raise UsageError(f"--unknown is {self.unknown!r}; it must be one of: error, skip.")

    @property
    def skip(self) -> bool:
        return self.unknown == "skip"


@dataclass(frozen=True)
class ValidationOptions:
    val_data: Annotated[str | None, option("Validation text (default: the end of the corpus).", DATA, "FILE")] = None
    val_fraction: Annotated[
        float | None, option("Fraction of the corpus, at its end, for validation (default: 0.1).", DATA, "X")
    ] = None


@dataclass(frozen=True)
class BudgetOptions:
    steps: Annotated[int | None, option("Train for N optimizer steps.", BUDGET, "N")] = None
    epochs: Annotated[float | None, option("Train for X passes over the training text.", BUDGET, "X")] = None
    time: Annotated[
        float | None,
        option(
            "Wall-clock time of the whole command: 80s, 5m, 1h30m. With --resume, the total of all sessions.",
            BUDGET,
            "TIME",
            parser=parse_duration,
        ),
    ] = None
    patience: Annotated[
        int | None, option("Early stopping: stop after N evaluations without a lower validation loss.", BUDGET, "N")
    ] = None


@dataclass(frozen=True)
class RhythmOptions:
    eval_every: Annotated[int | None, option("Steps between evaluations.", RHYTHM, "N")] = None
    save_every: Annotated[int | None, option("Steps between checkpoints.", RHYTHM, "N")] = None
    log_every: Annotated[int | None, option("Steps between lines of metrics.jsonl.", RHYTHM, "N")] = None
    log_gradients: Annotated[
        bool | None, option("Log the gradient norm of each layer to metrics.jsonl.", RHYTHM, None, "--log-gradients")
    ] = None


@dataclass(frozen=True)
class OptimizerOptions:
    batch_size: Annotated[int | None, option("Sequences per optimizer step (global batch size).", OPTIMIZER, "N")] = (
        None
    )
    micro_batch: Annotated[
        int | None, option("Sequences per forward pass; gradients are accumulated up to --batch-size.", OPTIMIZER, "N")
    ] = None
    lr: Annotated[float | None, option("Peak learning rate.", OPTIMIZER, "X")] = None
    min_lr: Annotated[float | None, option("Learning rate at the end of the schedule.", OPTIMIZER, "X")] = None
    warmup_steps: Annotated[int | None, option("Steps of linear warmup to --lr.", OPTIMIZER, "N")] = None
    schedule: Annotated[str | None, option("Learning-rate schedule after warmup.", OPTIMIZER, one_of(SCHEDULES))] = None
    weight_decay: Annotated[
        float | None, option("Weight decay of matrices; gains and biases have none.", OPTIMIZER, "X")
    ] = None
    beta1: Annotated[float | None, option("Adam beta1: decay rate of the average gradient.", OPTIMIZER, "X")] = None
    beta2: Annotated[
        float | None, option("Adam beta2: decay rate of the average squared gradient.", OPTIMIZER, "X")
    ] = None
    grad_clip: Annotated[
        float | None, option("Clip the gradient to this norm; 0 disables clipping.", OPTIMIZER, "X")
    ] = None
    optimizer: Annotated[
        str | None,
        option(
            "Optimizer (default: the preset's).",
            OPTIMIZER,
            one_of(OPTIMIZERS),
        ),
    ] = None
    average: Annotated[
        float | None,
        option(
            "Validate and save averaged weights; X is their mean age as a fraction of the steps so far.",
            OPTIMIZER,
            "X",
        ),
    ] = None
    label_smoothing: Annotated[
        float | None, option("Label smoothing: share of the target probability spread over all tokens.", OPTIMIZER, "X")
    ] = None


@dataclass(frozen=True)
class ModelOptions:
    preset: Annotated[
        str | None,
        option(
            "Architecture preset: modern (Qwen3 shape), GPT-2, or the original transformer (default: modern).",
            MODEL,
            one_of(PRESETS),
        ),
    ] = None
    architecture: Annotated[
        str | None,
        option(
            "Decoder (next token), encoder (masked tokens) or encoder-decoder (pairs); default: decoder.",
            MODEL,
            one_of(ARCHITECTURES),
        ),
    ] = None
    size: Annotated[
        str | None,
        option("Model size; auto fits the corpus, the machine and the budget.", MODEL, one_of(["auto", *SIZES])),
    ] = None
    layers: Annotated[
        int | None, option("Transformer blocks; of an encoder-decoder, those of the decoder.", MODEL, "N")
    ] = None
    encoder_layers: Annotated[
        int | None, option("Transformer blocks of the encoder (default: --layers).", MODEL, "N")
    ] = None
    heads: Annotated[int | None, option("Attention heads.", MODEL, "N")] = None
    kv_heads: Annotated[
        int | None,
        option("Key/value heads: fewer than --heads is grouped-query attention, 1 multi-query attention.", MODEL, "N"),
    ] = None
    width: Annotated[int | None, option("Hidden size (d_model).", MODEL, "N")] = None
    ffn_width: Annotated[int | None, option("Hidden size of the feed-forward layers (d_ff).", MODEL, "N")] = None
    context: Annotated[int | None, option("Context length in tokens.", MODEL, "N")] = None
    position: Annotated[str | None, option("Position encoding.", MODEL, one_of(POSITIONS))] = None
    rope_theta: Annotated[float | None, option("Base of the RoPE frequencies (theta).", MODEL, "X")] = None
    norm: Annotated[str | None, option("Normalisation layer.", MODEL, one_of(NORMS))] = None
    norm_placement: Annotated[
        str | None,
        option(
            "Pre-norm (before each sublayer) or post-norm (after the residual connection).",
            MODEL,
            one_of(NORM_PLACEMENTS),
        ),
    ] = None
    norm_gain: Annotated[bool | None, option("Learned gain in normalisation layers.", SWITCHES)] = None
    norm_bias: Annotated[bool | None, option("Learned bias in normalisation layers.", SWITCHES)] = None
    residual: Annotated[bool | None, option("Residual connections around the sublayers.", SWITCHES)] = None
    attention_scale: Annotated[bool | None, option("Scale attention scores by 1/sqrt(head size).", SWITCHES)] = None
    qk_norm: Annotated[bool | None, option("Normalise queries and keys (QK-norm).", SWITCHES)] = None
    bias: Annotated[bool | None, option("Biases in linear layers.", SWITCHES)] = None
    relative_clip: Annotated[
        int | None, option("Clipping distance of relative positions (default: 16).", MODEL, "K")
    ] = None
    local_window: Annotated[
        int | None, option("Sliding-window size of the local attention layers, in tokens.", MODEL, "W")
    ] = None
    local_layers: Annotated[
        str | None,
        option("Layers with a sliding window, counted from 0 (default: every second layer).", MODEL, "0,2,..."),
    ] = None
    experts: Annotated[
        int | None, option("Experts per feed-forward layer (mixture of experts); 1 is a dense model.", EXPERTS, "E")
    ] = None
    experts_per_token: Annotated[int | None, option("Experts per token (top-k routing; default: 2).", EXPERTS, "K")] = (
        None
    )
    expert_mode: Annotated[
        str | None,
        option(
            "Mix the outputs of the experts (route), or their weight matrices (merge).", EXPERTS, one_of(EXPERT_MODES)
        ),
    ] = None
    expert_balance: Annotated[float | None, option("Weight of the load-balancing loss.", EXPERTS, "X")] = None
    activation: Annotated[
        str | None, option("Activation function of the feed-forward layers.", MODEL, one_of(ACTIVATIONS))
    ] = None
    tie: Annotated[
        bool | None,
        option("Tie the output layer to the embedding (default: yes, except in short runs of modern).", SWITCHES),
    ] = None
    scale_embedding: Annotated[bool | None, option("Multiply embeddings by sqrt(d_model).", SWITCHES)] = None
    initialisation: Annotated[str | None, option("Weight initialisation.", MODEL, one_of(INITIALISATIONS))] = None
    dropout: Annotated[float | None, option("Dropout of the embedding and of each sublayer's output.", MODEL, "X")] = (
        None
    )
    attention_dropout: Annotated[float | None, option("Dropout of the attention weights.", MODEL, "X")] = None

    def choices(self) -> dict[str, Any]:
        """What the user chose, as fields of a ModelConfig, and preset and size. Raises UsageError for a bad list."""
        chosen = given(self)
        if self.local_layers is not None:
            try:
                chosen["local_layers"] = tuple(int(word) for word in self.local_layers.split(","))
            except ValueError:
                raise UsageError(
                    f"--local-layers is {shown(self.local_layers)}; it must be numbers of layers, as in 0,2,4."
                ) from None
        return chosen


@dataclass(frozen=True)
class SeedOptions:
    seed: Annotated[int | None, option("Random seed (default: 0).", MACHINE, "N")] = None


@dataclass(frozen=True)
class LearningOptions:
    """What every command that trains takes."""

    budget: BudgetOptions
    text: TextOptions
    unknown: UnknownOptions
    validation: ValidationOptions
    seed: SeedOptions
    optimizer: OptimizerOptions
    rhythm: RhythmOptions
    machine: MachineOptions
    compiling: CompileOptions
    output: OutputOptions

    def fixed_by_resuming(self, with_text: bool) -> tuple[Any, ...]:
        """All but budget and intervals; a text that is named again may come with its validation text."""
        validation = () if with_text else (self.validation,)
        return self.text, self.unknown, *validation, self.seed, self.optimizer, self.machine, self.compiling

    def changeable(self) -> dict[str, Any]:
        """What the user chose of a TrainingConfig that a resumed run may change, without the budget."""
        patience = {} if self.budget.patience is None else {"patience": self.budget.patience}
        return {**given(self.rhythm), **patience}

    def training(self) -> dict[str, Any]:
        """The fields of a TrainingConfig that the user chose, without the budget."""
        return {**given(self.optimizer), **given(self.seed), **self.changeable()}
