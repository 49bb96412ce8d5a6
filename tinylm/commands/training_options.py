"""Options of the commands that train: train, finetune-lora and finetune-adapter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tinylm.commands.option_groups import non_default_options
from tinylm.commands.options import (
    ChatOptions,
    MachineOptions,
    Panel,
    TextOptions,
    UnknownCharacterOptions,
    one_of,
    option,
)
from tinylm.config.duration import parse_duration
from tinylm.config.model import (
    ACTIVATIONS,
    ARCHITECTURES,
    EXPERT_MODES,
    INITIALISATIONS,
    NORM_PLACEMENTS,
    NORMS,
    POSITIONS,
)
from tinylm.config.presets import PRESETS, SIZES
from tinylm.config.settings import PARALLEL
from tinylm.config.training import OPTIMIZERS, SCHEDULES
from tinylm.config.validation import describe_value
from tinylm.errors import UsageError


def parse_duration_option(text: str) -> float:
    """Parser of options such as --time 1h30m: the duration in seconds. Raises BadParameter."""
    try:
        return parse_duration(str(text))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None


@dataclass(frozen=True)
class CompileOptions:
    """Whether to compile the layers of the model."""

    compile: Annotated[
        str,
        option("Use torch.compile; auto compiles where it saves time (default: auto).", Panel.MACHINE, "auto|on|off"),
    ] = "auto"


@dataclass(frozen=True)
class ParallelOptions:
    """How the processes of a run share the model."""

    parallel: Annotated[
        str,
        option(
            "With torchrun: each process has a replica (ddp) or a shard (fsdp) of the model (default: auto).",
            Panel.MACHINE,
            one_of(PARALLEL),
        ),
    ] = "auto"


@dataclass(frozen=True)
class ValidationOptions:
    """The text on which the validation loss is computed."""

    val_data: Annotated[str | None, option("Validation text (default: a part of the corpus).", Panel.DATA, "FILE")] = (
        None
    )
    val_fraction: Annotated[
        float | None,
        option(
            "Fraction for validation: the end of a continuous text, or records from all parts (default: 0.1).",
            Panel.DATA,
            "X",
        ),
    ] = None


@dataclass(frozen=True)
class LengthOptions:
    """When training stops; at most one of steps, epochs and time."""

    steps: Annotated[int | None, option("Train for N optimizer steps.", Panel.LENGTH, "N")] = None
    epochs: Annotated[float | None, option("Train for X passes over the training text.", Panel.LENGTH, "X")] = None
    time: Annotated[
        float | None,
        option(
            "Wall-clock time of the whole command: 80s, 5m, 1h30m. With --resume: total time of the run.",
            Panel.LENGTH,
            "TIME",
            parser=parse_duration_option,
        ),
    ] = None
    patience: Annotated[
        int | None,
        option("Early stopping: stop after N evaluations without a lower validation loss.", Panel.LENGTH, "N"),
    ] = None


@dataclass(frozen=True)
class IntervalOptions:
    """How often to evaluate, save and log."""

    eval_every: Annotated[int | None, option("Steps between evaluations.", Panel.INTERVALS, "N")] = None
    save_every: Annotated[int | None, option("Steps between checkpoints.", Panel.INTERVALS, "N")] = None
    log_every: Annotated[int | None, option("Steps between log lines in metrics.jsonl.", Panel.INTERVALS, "N")] = None
    log_gradients: Annotated[
        bool | None,
        option("Log the gradient norm of each layer to metrics.jsonl.", Panel.INTERVALS, None, "--log-gradients"),
    ] = None


@dataclass(frozen=True)
class OptimizerOptions:
    """Batch size, learning rate and optimizer; options left out get a value from the preset or the plan."""

    batch_size: Annotated[
        int | None, option("Sequences per optimizer step (global batch size).", Panel.OPTIMIZER, "N")
    ] = None
    micro_batch: Annotated[
        int | None,
        option("Sequences per forward pass; gradients are accumulated up to --batch-size.", Panel.OPTIMIZER, "N"),
    ] = None
    checkpoint_activations: Annotated[
        bool | None,
        option(
            "Compute blocks again in the backward pass: less memory, more time (default: where memory is short).",
            Panel.MEMORY,
            "",
            "--checkpoint-activations/--no-checkpointing",
        ),
    ] = None
    sequence_length: Annotated[
        int | None,
        option(
            "Tokens per sequence of a model that is trained further (default: its context; 512 if above 1,024).",
            Panel.OPTIMIZER,
            "N",
        ),
    ] = None
    sequence_growth: Annotated[
        int | None,
        option(
            "Parts that windows of text are split into early in training; 1: none (default: by context).",
            Panel.OPTIMIZER,
            "1|2|4",
        ),
    ] = None
    lr: Annotated[float | None, option("Peak learning rate.", Panel.OPTIMIZER, "X")] = None
    min_lr: Annotated[float | None, option("Learning rate at the end of the schedule.", Panel.OPTIMIZER, "X")] = None
    warmup_steps: Annotated[int | None, option("Steps of linear warmup to --lr.", Panel.OPTIMIZER, "N")] = None
    schedule: Annotated[
        str | None, option("Learning-rate schedule after warmup.", Panel.OPTIMIZER, one_of(SCHEDULES))
    ] = None
    weight_decay: Annotated[
        float | None, option("Weight decay of matrices; gains and biases have none.", Panel.OPTIMIZER, "X")
    ] = None
    beta1: Annotated[float | None, option("Adam beta1: decay rate of the gradient average.", Panel.OPTIMIZER, "X")] = (
        None
    )
    beta2: Annotated[
        float | None, option("Adam beta2: decay rate of the squared-gradient average.", Panel.OPTIMIZER, "X")
    ] = None
    momentum: Annotated[float | None, option("Momentum of Muon and NorMuon.", Panel.OPTIMIZER, "X")] = None
    grad_clip: Annotated[
        float | None, option("Clip the gradient to this norm; 0 disables clipping.", Panel.OPTIMIZER, "X")
    ] = None
    optimizer: Annotated[
        str | None,
        option(
            "Optimizer (default: the preset's).",
            Panel.OPTIMIZER,
            one_of(OPTIMIZERS),
        ),
    ] = None
    average: Annotated[
        float | None,
        option(
            "Validate and save averaged weights; X is their mean age as a fraction of the steps so far.",
            Panel.OPTIMIZER,
            "X",
        ),
    ] = None
    label_smoothing: Annotated[
        float | None,
        option("Label smoothing: share of the target probability spread over all tokens.", Panel.OPTIMIZER, "X"),
    ] = None
    mtp_weight: Annotated[
        float | None,
        option(
            "Multi-token prediction: initial loss weight of the token after next; falls to 0 at 60 % of the run.",
            Panel.OPTIMIZER,
            "X",
        ),
    ] = None


@dataclass(frozen=True)
class ModelOptions:
    """Preset, size and the main fields of ModelConfig."""

    preset: Annotated[
        str | None,
        option(
            "Architecture preset: modern (Qwen3 shape), GPT-2, or the original transformer (default: modern).",
            Panel.MODEL,
            one_of(PRESETS),
        ),
    ] = None
    architecture: Annotated[
        str | None,
        option(
            "Decoder (next token), encoder (masked tokens) or encoder-decoder (pairs); default: decoder.",
            Panel.MODEL,
            one_of(ARCHITECTURES),
        ),
    ] = None
    size: Annotated[
        str | None,
        option(
            "Sets layers, heads, width and context; auto fits the corpus, the machine and the budget (default: auto).",
            Panel.MODEL,
            one_of(["auto", *SIZES]),
        ),
    ] = None
    layers: Annotated[
        int | None, option("Transformer blocks (in an encoder-decoder: of the decoder).", Panel.MODEL, "N")
    ] = None
    encoder_layers: Annotated[
        int | None, option("Transformer blocks of the encoder (default: --layers).", Panel.MODEL, "N")
    ] = None
    heads: Annotated[int | None, option("Attention heads.", Panel.MODEL, "N")] = None
    kv_heads: Annotated[
        int | None,
        option("Key/value heads: fewer than --heads is grouped-query, 1 is multi-query attention.", Panel.MODEL, "N"),
    ] = None
    width: Annotated[int | None, option("Hidden size (d_model).", Panel.MODEL, "N")] = None
    ffn_width: Annotated[int | None, option("Hidden size of the feed-forward layers (d_ff).", Panel.MODEL, "N")] = None
    context: Annotated[int | None, option("Context length in tokens.", Panel.MODEL, "N")] = None
    position: Annotated[str | None, option("Position encoding.", Panel.MODEL, one_of(POSITIONS))] = None
    rope_theta: Annotated[float | None, option("Base of the RoPE frequencies (theta).", Panel.MODEL, "X")] = None
    norm: Annotated[str | None, option("Normalisation layer.", Panel.MODEL, one_of(NORMS))] = None
    norm_placement: Annotated[
        str | None,
        option(
            "Norms before sublayers (pre), after residual sums (post), or before and after sublayers (sandwich).",
            Panel.MODEL,
            one_of(NORM_PLACEMENTS),
        ),
    ] = None
    norm_gain: Annotated[bool | None, option("Learned gain in normalisation layers.", Panel.MODEL_SWITCHES)] = None
    norm_bias: Annotated[bool | None, option("Learned bias in normalisation layers.", Panel.MODEL_SWITCHES)] = None
    residual: Annotated[bool | None, option("Residual connections around the sublayers.", Panel.MODEL_SWITCHES)] = None
    attention_scale: Annotated[
        bool | None, option("Scale attention scores by 1/sqrt(head dimension).", Panel.MODEL_SWITCHES)
    ] = None
    qk_norm: Annotated[bool | None, option("Normalise queries and keys (QK-norm).", Panel.MODEL_SWITCHES)] = None
    bias: Annotated[bool | None, option("Biases in linear layers.", Panel.MODEL_SWITCHES)] = None
    relative_clip: Annotated[
        int | None, option("Clipping distance of relative positions (default: 16).", Panel.MODEL, "K")
    ] = None
    local_window: Annotated[
        int | None, option("Sliding-window size of the local attention layers, in tokens.", Panel.MODEL, "W")
    ] = None
    local_layers: Annotated[
        str | None,
        option("Layers with a sliding window, counted from 0 (default: every second layer).", Panel.MODEL, "0,2,..."),
    ] = None
    experts: Annotated[
        int | None,
        option("Experts per feed-forward layer (mixture of experts); 1 is a dense model.", Panel.EXPERTS, "E"),
    ] = None
    experts_per_token: Annotated[
        int | None, option("Experts per token (top-k routing; default: 2).", Panel.EXPERTS, "K")
    ] = None
    expert_mode: Annotated[
        str | None,
        option(
            "route: mix the outputs of the chosen experts; merge: mix their weight matrices.",
            Panel.EXPERTS,
            one_of(EXPERT_MODES),
        ),
    ] = None
    expert_balance: Annotated[float | None, option("Weight of the load-balancing loss.", Panel.EXPERTS, "X")] = None
    activation: Annotated[
        str | None, option("Activation function of the feed-forward layers.", Panel.MODEL, one_of(ACTIVATIONS))
    ] = None
    tie: Annotated[
        bool | None,
        option(
            "Tie output layer and embedding (default: yes, except in short runs of a modern decoder).",
            Panel.MODEL_SWITCHES,
        ),
    ] = None
    scale_embedding: Annotated[bool | None, option("Multiply embeddings by sqrt(d_model).", Panel.MODEL_SWITCHES)] = (
        None
    )
    initialisation: Annotated[str | None, option("Weight initialisation.", Panel.MODEL, one_of(INITIALISATIONS))] = None
    dropout: Annotated[
        float | None, option("Dropout of the embedding and of each sublayer's output.", Panel.MODEL, "X")
    ] = None
    attention_dropout: Annotated[float | None, option("Dropout of the attention weights.", Panel.MODEL, "X")] = None

    def chosen_fields(self) -> dict[str, Any]:
        """The options that were given: fields of ModelConfig, preset and size.

        Raises UsageError if --local-layers is not a list of integers.
        """
        chosen = non_default_options(self)
        if self.local_layers is not None:
            try:
                chosen["local_layers"] = tuple(int(word) for word in self.local_layers.split(","))
            except ValueError:
                raise UsageError(
                    f"--local-layers is {describe_value(self.local_layers)}; it must be layer numbers, as in 0,2,4."
                ) from None
        return chosen


@dataclass(frozen=True)
class SeedOptions:
    """The random seed of a training run."""

    seed: Annotated[int | None, option("Random seed (default: 0).", Panel.MACHINE, "N")] = None


@dataclass(frozen=True)
class ChatTrainingOptions:
    """Options for training on conversations."""

    chat: ChatOptions
    pack: Annotated[
        bool | None,
        option(
            "Several conversations per row of a batch, without attention between them (default: where faster).",
            Panel.OPTIMIZER,
        ),
    ] = None
    show_examples: Annotated[
        int, option("Show the first N training conversations with their scored parts marked.", Panel.DATA, "N")
    ] = 0


@dataclass(frozen=True)
class ReportOptions:
    """A report and experiment trackers, which show the metrics of a run during training."""

    report: Annotated[
        Path | None, option("Keep an HTML report of the run current in this file.", Panel.INTERVALS, "FILE")
    ] = None
    log_to: Annotated[
        list[str] | None,
        option(
            "Send the metrics to an experiment tracker, tensorboard=DIR into DIR; may be given several times.",
            Panel.INTERVALS,
            "tensorboard|wandb",
            "--log-to",
        ),
    ] = None


@dataclass(frozen=True)
class TrainingOptions:
    """The options of every command that trains."""

    length: LengthOptions
    text: TextOptions
    conversations: ChatTrainingOptions
    unknown: UnknownCharacterOptions
    validation: ValidationOptions
    seed: SeedOptions
    optimizer: OptimizerOptions
    intervals: IntervalOptions
    reporting: ReportOptions
    machine: MachineOptions
    compiling: CompileOptions
    processes: ParallelOptions


@dataclass(frozen=True)
class NewAdapterOptions:
    """Where a new adapter is written, and --dry-run."""

    out: Annotated[
        Path | None,
        option(
            "Adapter directory to write (default: <model>-lora or <model>-adapter).", Panel.RUN, "DIR", "--out", "-o"
        ),
    ] = None
    force: Annotated[bool, option("Replace an existing adapter.", Panel.RUN, None, "--force")] = False
    dry_run: Annotated[bool, option("Print the plan without training.", Panel.RUN, None, "--dry-run")] = False
