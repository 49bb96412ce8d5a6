"""Options that several commands share, in groups."""

import re
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tinylm.commands.groups import given
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
        raise typer.BadParameter(f"{text!r} is not a length of time; write it as 90s, 5m or 1h30m.")
    try:
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a length of time; write it as 90s, 5m or 1h30m.") from None
    return hours * 3600 + minutes * 60 + seconds


def read_config_file(context: typer.Context, file: Path | None) -> Path | None:
    """Make a TOML file's values the defaults of this command's options, below the environment and the command line."""
    if file is None or context.resilient_parsing:
        return file
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"Cannot read --config {file}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {file} is not valid TOML: {error}.") from error
    known = {parameter.name for parameter in context.command.params}
    defaults = {key.replace("-", "_"): value for key, value in values.items()}
    unknown = [key for key in values if key.replace("-", "_") not in known]
    if unknown:
        raise UsageError(
            f"--config {file} sets {', '.join(unknown)}, which {context.command_path} does not have; see "
            f"{context.command_path} --help."
        )
    for parameter in context.command.params:  # one value of an option that may be given several times
        if (getattr(parameter, "multiple", False) or parameter.nargs == -1) and parameter.name in defaults:
            value = defaults[parameter.name]
            defaults[parameter.name] = value if isinstance(value, list) else [value]
    context.default_map = {**(context.default_map or {}), **defaults}
    return file


def remember_debug(context: typer.Context, debug: bool) -> bool:
    context.find_root().obj = {"debug": debug}
    return debug


def option(help: str, panel: str | None = None, metavar: str | None = None, *names: str, **extra: Any) -> Any:
    return typer.Option(
        *names, help=help, rich_help_panel=panel, metavar=metavar, show_default=False, show_envvar=False, **extra
    )


def one_of(values: typing.Iterable[str]) -> str:
    return "|".join(values)


OUTPUT, DATA, WHERE, BUDGET, MODEL, SWITCHES, EXPERTS, OPTIMIZER, RHYTHM, MACHINE = (
    "Output",
    "Data",
    "Where",
    "How long",
    "Model",
    "Parts of the model, on or off",
    "Experts",
    "Optimizer",
    "Rhythm",
    "Machine",
)


@dataclass(frozen=True)
class OutputOptions:
    quiet: Annotated[bool, option("No notes and no progress on stderr.", OUTPUT, None, "--quiet", "-q")] = False
    json: Annotated[bool, option("Results as JSON, one object a line.", OUTPUT, None, "--json")] = False
    debug: Annotated[
        bool, option("Show a traceback with an error.", OUTPUT, None, "--debug", callback=remember_debug, is_eager=True)
    ] = False
    config: Annotated[
        Path | None,
        option(
            "TOML file of options for this command; flags and TINYLM_<COMMAND>_<OPTION> win over it.",
            OUTPUT,
            "FILE",
            "--config",
            callback=read_config_file,
            is_eager=True,
        ),
    ] = None

    def console(self) -> Console:
        return Console(self.quiet, self.json)


@dataclass(frozen=True)
class MachineOptions:
    device: Annotated[
        str, option("Where to compute; auto is CUDA, then MPS, then the CPU.", MACHINE, "auto|cuda|mps|cpu")
    ] = "auto"
    dtype: Annotated[
        str, option("Number format; auto is bf16 where the device computes in it.", MACHINE, "auto|fp32|bf16|fp16")
    ] = "auto"


@dataclass(frozen=True)
class CompileOptions:
    compile: Annotated[str, option("torch.compile; auto compiles where it pays.", MACHINE, "auto|on|off")] = "auto"


@dataclass(frozen=True)
class TextOptions:
    text_key: Annotated[str, option("The field of a JSONL line that holds its text (default: text).", DATA, "KEY")] = (
        "text"
    )
    encoding: Annotated[str, option("The files' encoding (default: utf-8).", DATA, "NAME")] = "utf-8"


@dataclass(frozen=True)
class ValidationOptions:
    val_data: Annotated[str | None, option("Validate on this text instead of the corpus's end.", DATA, "FILE")] = None
    val_fraction: Annotated[
        float | None, option("How much of the corpus, at its end, is for validation (default: 0.1).", DATA, "X")
    ] = None


@dataclass(frozen=True)
class BudgetOptions:
    steps: Annotated[int | None, option("Optimizer steps.", BUDGET, "N")] = None
    epochs: Annotated[float | None, option("Passes over the training text.", BUDGET, "X")] = None
    time: Annotated[
        float | None,
        option(
            "Wall-clock time from the start of the process to its end, such as 80s, 5m, 1h30m.",
            BUDGET,
            "TIME",
            parser=parse_duration,
        ),
    ] = None
    patience: Annotated[int | None, option("Stop after N evaluations without improvement.", BUDGET, "N")] = None


@dataclass(frozen=True)
class RhythmOptions:
    eval_every: Annotated[int | None, option("Steps between two evaluations.", RHYTHM, "N")] = None
    save_every: Annotated[int | None, option("Steps between two saves.", RHYTHM, "N")] = None
    log_every: Annotated[int | None, option("Steps between two lines of metrics.jsonl.", RHYTHM, "N")] = None
    log_gradients: Annotated[
        bool | None, option("Log the norm of each layer's gradient there, too.", RHYTHM, None, "--log-gradients")
    ] = None


@dataclass(frozen=True)
class OptimizerOptions:
    batch_size: Annotated[int | None, option("Sequences a step.", OPTIMIZER, "N")] = None
    micro_batch: Annotated[
        int | None, option("Sequences computed at once; the step adds up as many as it needs.", OPTIMIZER, "N")
    ] = None
    lr: Annotated[float | None, option("Peak learning rate.", OPTIMIZER, "X")] = None
    min_lr: Annotated[float | None, option("Learning rate at the end.", OPTIMIZER, "X")] = None
    warmup_steps: Annotated[int | None, option("Steps until the learning rate has risen to --lr.", OPTIMIZER, "N")] = (
        None
    )
    schedule: Annotated[str | None, option("How the learning rate falls after that.", OPTIMIZER, one_of(SCHEDULES))] = (
        None
    )
    weight_decay: Annotated[float | None, option("Decay of matrices (never of gains and biases).", OPTIMIZER, "X")] = (
        None
    )
    beta1: Annotated[float | None, option("Adam's memory of the gradient.", OPTIMIZER, "X")] = None
    beta2: Annotated[float | None, option("Adam's memory of its square.", OPTIMIZER, "X")] = None
    grad_clip: Annotated[float | None, option("Largest gradient norm; 0 for no limit.", OPTIMIZER, "X")] = None
    optimizer: Annotated[
        str | None,
        option(
            "The optimizer (default: the preset's).",
            OPTIMIZER,
            one_of(OPTIMIZERS),
        ),
    ] = None
    average: Annotated[
        float | None,
        option(
            "Validate and save an average of the weights; their mean age, as a share of the steps so far.",
            OPTIMIZER,
            "X",
        ),
    ] = None
    label_smoothing: Annotated[
        float | None, option("Part of each target's probability that is spread over all.", OPTIMIZER, "X")
    ] = None


@dataclass(frozen=True)
class ModelOptions:
    preset: Annotated[str | None, option("Which transformer (default: modern).", MODEL, one_of(PRESETS))] = None
    architecture: Annotated[
        str | None,
        option("Text from what came before, masked text, or targets from sources.", MODEL, one_of(ARCHITECTURES)),
    ] = None
    size: Annotated[
        str | None, option("How large; auto fits corpus, machine and budget.", MODEL, one_of(["auto", *SIZES]))
    ] = None
    layers: Annotated[int | None, option("Blocks; of an encoder-decoder, the decoder's.", MODEL, "N")] = None
    encoder_layers: Annotated[int | None, option("The encoder's blocks (default: --layers).", MODEL, "N")] = None
    heads: Annotated[int | None, option("Attention heads.", MODEL, "N")] = None
    kv_heads: Annotated[
        int | None, option("Key/value heads: fewer than --heads is grouped-query, 1 multi-query attention.", MODEL, "N")
    ] = None
    width: Annotated[int | None, option("Features of a token's hidden vector.", MODEL, "N")] = None
    ffn_width: Annotated[int | None, option("Features inside the feed-forward layer.", MODEL, "N")] = None
    context: Annotated[int | None, option("Tokens in sight.", MODEL, "N")] = None
    position: Annotated[str | None, option("How a token knows its place.", MODEL, one_of(POSITIONS))] = None
    rope_theta: Annotated[float | None, option("Base of the rotary frequencies.", MODEL, "X")] = None
    norm: Annotated[str | None, option("Normalisation.", MODEL, one_of(NORMS))] = None
    norm_placement: Annotated[
        str | None, option("Before each sublayer, or after its residual.", MODEL, one_of(NORM_PLACEMENTS))
    ] = None
    norm_gain: Annotated[bool | None, option("Learned gain in normalisations.", SWITCHES)] = None
    norm_bias: Annotated[bool | None, option("Learned bias in normalisations.", SWITCHES)] = None
    residual: Annotated[bool | None, option("Residual connections around sublayers.", SWITCHES)] = None
    attention_scale: Annotated[bool | None, option("Divide attention's products by sqrt(head width).", SWITCHES)] = None
    qk_norm: Annotated[bool | None, option("Normalise queries and keys.", SWITCHES)] = None
    bias: Annotated[bool | None, option("Biases in linear layers.", SWITCHES)] = None
    relative_clip: Annotated[
        int | None, option("Offsets up to which relative positions differ (default: 16).", MODEL, "K")
    ] = None
    local_window: Annotated[int | None, option("Tokens in sight of the local layers.", MODEL, "W")] = None
    local_layers: Annotated[
        str | None, option("The layers with that window, from 0 (default: every second).", MODEL, "0,2,...")
    ] = None
    experts: Annotated[int | None, option("Experts in each feed-forward layer; 1 is a dense model.", EXPERTS, "E")] = (
        None
    )
    experts_per_token: Annotated[int | None, option("Experts that a token is sent to (default: 2).", EXPERTS, "K")] = (
        None
    )
    expert_mode: Annotated[
        str | None, option("Mix the experts' outputs, or their matrices.", EXPERTS, one_of(EXPERT_MODES))
    ] = None
    expert_balance: Annotated[
        float | None, option("Weight of the loss that shares tokens out among experts.", EXPERTS, "X")
    ] = None
    activation: Annotated[str | None, option("Feed-forward nonlinearity.", MODEL, one_of(ACTIVATIONS))] = None
    tie: Annotated[
        bool | None,
        option("Share the embedding with the output layer (default: yes, but not in short runs of modern).", SWITCHES),
    ] = None
    scale_embedding: Annotated[bool | None, option("Scale embeddings by sqrt(width).", SWITCHES)] = None
    initialisation: Annotated[
        str | None, option("How weights are drawn at the start.", MODEL, one_of(INITIALISATIONS))
    ] = None
    dropout: Annotated[
        float | None, option("Share dropped in training of the embedding and of each sublayer's output.", MODEL, "X")
    ] = None
    attention_dropout: Annotated[
        float | None, option("Share of the attention weights dropped in training.", MODEL, "X")
    ] = None

    def choices(self) -> dict[str, Any]:
        """What the user chose, as fields of a ModelConfig, and preset and size. Raises UsageError for a bad list."""
        chosen = given(self)
        if self.local_layers is not None:
            try:
                chosen["local_layers"] = tuple(int(word) for word in self.local_layers.split(","))
            except ValueError:
                raise UsageError(
                    f"--local-layers is {self.local_layers!r}; it must be numbers of layers, as in 0,2,4."
                ) from None
        return chosen


@dataclass(frozen=True)
class SeedOptions:
    seed: Annotated[int | None, option("Seed of everything random (default: 0).", MACHINE, "N")] = None


@dataclass(frozen=True)
class LearningOptions:
    """What every command that trains takes."""

    budget: BudgetOptions
    text: TextOptions
    validation: ValidationOptions
    seed: SeedOptions
    optimizer: OptimizerOptions
    rhythm: RhythmOptions
    machine: MachineOptions
    compiling: CompileOptions
    output: OutputOptions

    @property
    def fixed_by_resuming(self) -> tuple[Any, ...]:
        """All but budget and rhythm."""
        return self.text, self.validation, self.seed, self.optimizer, self.machine, self.compiling

    def changeable(self) -> dict[str, Any]:
        """What the user chose of a TrainingConfig that a resumed run may change, without the budget."""
        patience = {} if self.budget.patience is None else {"patience": self.budget.patience}
        return {**given(self.rhythm), **patience}

    def training(self) -> dict[str, Any]:
        """The fields of a TrainingConfig that the user chose, without the budget."""
        return {**given(self.optimizer), **given(self.seed), **self.changeable()}
