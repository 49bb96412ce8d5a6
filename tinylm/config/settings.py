"""The settings of training, as keyword arguments of the Python API. Commands pass the same. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from tinylm.errors import UsageError


class TextSettings(TypedDict, total=False):
    """How the text is read, and which part of it is for validation."""

    format: str  # auto, text, jsonl, lines, pairs or chat
    text_key: str | None  # of JSONL; default: text
    encoding: str
    unknown: str  # characters without an id: error or skip
    val_data: str | None
    val_fraction: float | None  # default: 0.1
    chat_template: str | None  # of conversations: chatml or the path of a file; default: that of the model, or ChatML
    train_on: str | None  # of conversations: assistant, last or all; default: assistant


class LengthSettings(TypedDict, total=False):
    """When training ends; at most one of steps, epochs and time."""

    steps: int | None
    epochs: float | None
    time: float | str | None  # seconds, or text such as 5m
    patience: int | None  # evaluations without a lower validation loss


class IntervalSettings(TypedDict, total=False):
    """Intervals in optimizer steps, and what is logged."""

    eval_every: int | None
    save_every: int | None
    log_every: int | None
    log_gradients: bool | None  # log the gradient norm of each layer


class OptimizerSettings(TypedDict, total=False):
    """Batches, learning rate and optimizer; see TrainingConfig."""

    batch_size: int | None  # sequences per optimizer step
    micro_batch: int | None  # sequences per forward pass
    checkpoint_activations: bool | None  # compute blocks again in the backward pass; default: where memory is short
    sequence_length: (
        int | None
    )  # with `init_from` or an adapter; default: the context, or 512 for text if it is above 1,024
    sequence_growth: int | None  # 1, 2 or 4: windows of text are split into shorter sequences at the beginning
    lr: float | None
    min_lr: float | None
    warmup_steps: int | None
    schedule: str | None
    weight_decay: float | None
    beta1: float | None
    beta2: float | None
    momentum: float | None
    grad_clip: float | None
    optimizer: str | None
    average: float | None
    label_smoothing: float | None
    mtp_weight: float | None  # of the token after the next at first; default: 0.5 with small vocabularies
    pack: bool | None  # conversations share rows of a batch; default: where that is faster


class MachineSettings(TypedDict, total=False):
    """Where and how the model computes."""

    device: str  # auto, cuda, mps or cpu
    dtype: str  # auto, fp32, bf16 or fp16
    compile: str  # auto, on or off
    parallel: str  # auto, ddp or fsdp: replicas or shards, in several processes
    seed: int | None


class SharedSettings(TextSettings, LengthSettings, IntervalSettings, OptimizerSettings, MachineSettings, total=False):
    """Settings of every function that trains. A setting that is not given is planned, or has a default."""

    show_examples: int  # number of training conversations to show with their scored parts
    force: bool  # replace an existing run


class ModelSettings(TypedDict, total=False):
    """The architecture: a preset and a size, and fields of ModelConfig."""

    preset: str | None
    architecture: str | None
    size: str | None
    layers: int | None
    encoder_layers: int | None
    heads: int | None
    kv_heads: int | None
    width: int | None
    ffn_width: int | None
    context: int | None
    position: str | None
    rope_theta: float | None
    norm: str | None
    norm_placement: str | None
    norm_gain: bool | None
    norm_bias: bool | None
    residual: bool | None
    attention_scale: bool | None
    qk_norm: bool | None
    bias: bool | None
    relative_clip: int | None
    local_window: int | None
    local_layers: Sequence[int] | None
    experts: int | None
    experts_per_token: int | None
    expert_mode: str | None
    expert_balance: float | None
    activation: str | None
    tie: bool | None
    scale_embedding: bool | None
    initialisation: str | None
    dropout: float | None
    attention_dropout: float | None


class TrainSettings(SharedSettings, ModelSettings, total=False):
    """Settings of `tinylm.train`."""

    tokenizer: str | None  # auto, char, bpe, or the path of a tokenizer.json
    vocab_size: int | None
    init_from: str | Path | None  # a run or foreign model: its weights, architecture and tokenizer are the start
    extend_vocab: bool  # add the unknown characters of the text to the vocabulary of `init_from`


class LoRASettings(SharedSettings, total=False):
    """Settings of `tinylm.finetune_lora`."""

    rank: int | None  # default: 8, or the most that the matrices allow
    alpha: float | None  # default: twice the rank
    rank_stabilised: bool
    share_b: bool
    dropout: float  # default: 0
    target: str | Sequence[str] | None  # default: attention


class AdapterSettings(SharedSettings, total=False):
    """Settings of `tinylm.finetune_adapter`."""

    bottleneck: int  # hidden size; default: 16
    dropout: float  # default: 0


# Defaults other than None, without the `dropout` of adapters, since that of a model is None by default. A setting with
# this value counts as not given. The command options have the same defaults.
DEFAULTS: dict[str, Any] = {
    "format": "auto",
    "encoding": "utf-8",
    "unknown": "error",
    "device": "auto",
    "dtype": "auto",
    "compile": "auto",
    "parallel": "auto",
    "force": False,
    "show_examples": 0,
    "extend_vocab": False,
    "rank_stabilised": False,
    "share_b": False,
    "bottleneck": 16,
}

PARALLEL = ("auto", "ddp", "fsdp")
LENGTH_NAMES = frozenset(LengthSettings.__annotations__)
INTERVAL_NAMES = frozenset(IntervalSettings.__annotations__)
OPTIMIZER_NAMES = frozenset(OptimizerSettings.__annotations__)
MODEL_NAMES = frozenset(ModelSettings.__annotations__)
RESUMABLE_NAMES = LENGTH_NAMES | INTERVAL_NAMES | {"parallel"}  # settings that can change when a run is resumed


def given_settings(settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The settings that differ from their defaults. Raises TypeError for a name that is not in `known`."""
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise TypeError(f"unknown settings: {', '.join(unknown)}")
    return {name: value for name, value in settings.items() if value is not None and value != DEFAULTS.get(name)}


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
