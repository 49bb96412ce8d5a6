"""Corpus + machine + budget -> the model, batch and schedule that fit, and what they cost: what `--dry-run` prints."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinylm.checks import check_numbers
from tinylm.config import Budget, DataConfig, ModelConfig, RuntimeConfig, TrainingConfig
from tinylm.cost import (
    Machine,
    activation_bytes,
    matrix_parameters,
    parameters_by_part,
    training_speed,
    training_step_seconds,
)
from tinylm.device import can_compile, free_memory
from tinylm.errors import UsageError
from tinylm.model.linear import USES_ONEDNN
from tinylm.presets import PRESETS, SIZES, make_model_config
from tinylm.text.pairs import PairContexts

DEFAULT_TIME = 600.0
DEFAULT_PATIENCE = 10
EVALUATIONS = 12  # in a run
EVALUATION_SHARE = 0.05  # of the time that training takes
COMPILE_FROM = 600.0  # seconds of training that earn back what compiling a layer costs
STEPS = 1500  # that a run should have, where its length allows
MUON_STEPS = 800  # where that is a time, since a step of Muon's costs more and may be larger: docs/decisions/018
TOKENS_PER_STEP = {"cpu": (1024, 2048), "gpu": (8192, 65_536)}
MUON_TOKENS_PER_WIDTH = 8  # in the largest step: Muon's products have the operations of some five
# What is seen often is learned by heart, the sooner the larger the model is for its text: docs/decisions/012, 014.
DECAY_PER_PASS, LEAST_DECAY, MOST_DECAY = 0.12, 0.1, 3.0
DROPOUT_PER_PASS = 1 / 1500  # and for each parameter that there is to a token of the text
LEAST_DROPOUT, MOST_DROPOUT = 0.04, 0.2  # less is not worth its time
PAIR_DROPOUT = 0.3
# Up to so many tokens of training, and so many ids, a modern decoder learns faster with an output layer of its own:
# docs/decisions/019.
UNTIED_TOKENS, UNTIED_VOCABULARY = 2_500_000, 4096
LABEL_SMOOTHING = 0.1  # where targets are made from sources (Vaswani et al. 2017)
FEW_PAIRS = 1_000_000  # are seen many times
LEAST_PAIR_CONTEXT = 128
MEMORY_SHARE = 0.7  # of the free memory that a plan may use

# How each preset is trained, after its source, fitted to short runs of small models: docs/decisions/008, 012.
RECIPES: dict[str, dict[str, Any]] = {
    "modern": {"schedule": "linear", "optimizer": "muon", "beta2": 0.99, "warmup": 0.02, "min_lr": 0.0},
    "gpt2": {"schedule": "cosine", "beta2": 0.99, "warmup": 0.05},
    "original": {
        "schedule": "inverse-sqrt",
        "optimizer": "adam",
        "beta2": 0.98,
        "warmup": 0.1,
        "weight_decay": 0.0,
        "min_lr": 0.0,
    },
    "adapter": {"schedule": "linear", "beta2": 0.99, "warmup": 0.05, "min_lr": 0.0, "weight_decay": 0.0},
}


# Learning rates: at a width of 128, and the power of the width by which they fall. 0.001 at a width of 384 for gpt2, as
# nanoGPT has it.
LEARNING_RATES = {
    "modern": (6e-3, 0.5),
    "gpt2": (3e-3, 1.0),
    "original": (1e-3, 1.0),
    "adapter": (2e-3, 0.0),
}


@dataclass(frozen=True)
class Plan:
    """A run before it begins. `seconds` and `memory` (bytes) are estimates; notices are what the user should know.

    `passes` over the training text are made in so many steps.
    """

    model: ModelConfig
    training: TrainingConfig
    runtime: RuntimeConfig
    parameters: int
    seconds: float
    steps: int
    passes: float
    memory: int
    notices: tuple[str, ...]


def plan_training(
    machine: Machine,
    data: DataConfig,
    vocab_size: int,
    *,
    model: dict[str, Any],
    training: dict[str, Any],
    budget: Budget | None,
    compile: str = "auto",
    recipe: str | None = None,
    base: ModelConfig | None = None,
    pair_contexts: PairContexts | None = None,
) -> Plan:
    """Fill in everything that the user did not choose.

    `recipe` names the training defaults, by default the preset's. `base` is the shape of a model to train on from.
    `pair_contexts` says which context each pair needs, where the text is pairs.

    Raises UsageError for choices that contradict each other or the length of the corpus.
    """
    check_numbers(training)
    notices: list[str] = []
    budget, training = _with_budget(budget, training)
    seconds = budget.time or DEFAULT_TIME
    recipe = recipe or (base.initialisation if base else model.get("preset", "modern"))
    optimizer = training.get("optimizer", RECIPES.get(recipe, {}).get("optimizer"))
    shape = base or _choose_shape(machine, data, vocab_size, model, seconds, optimizer)
    if pair_contexts is not None:
        shape = _fit_pairs(shape, pair_contexts, notices, free="context" not in model and base is None)
    else:
        shape = _fit_context(shape, data, notices, chosen="context" in model, fixed=base is not None)
    batch_size = training.get("batch_size", _choose_batch_size(machine, data, shape, budget, optimizer))
    micro_batch = training.get("micro_batch", batch_size)
    sequences, tokens_each = _sequences(data, shape)
    steps_per_epoch = sequences / batch_size
    if pair_contexts is not None:  # the last batch of an epoch may be a smaller one
        fitting = int((pair_contexts.train <= shape.context).sum())
        steps_per_epoch = max(1, math.ceil(fitting / batch_size))
    step_seconds = training_step_seconds(machine, shape, batch_size * tokens_each, optimizer)
    steps = budget.total_steps(steps_per_epoch) or max(1, int(seconds / step_seconds))
    passes = steps / steps_per_epoch
    new_modern = recipe == "modern" and base is None
    if new_modern and shape.architecture == "decoder" and "tie" not in model:
        tokens = steps * batch_size * tokens_each
        shape = replace(shape, tie=tokens > UNTIED_TOKENS or vocab_size > UNTIED_VOCABULARY)
    parameters = parameters_by_part(shape)["total"]

    longest = shape.context if pair_contexts is None else 2 * min(int(pair_contexts.train.max()), shape.context)
    per_sequence = activation_bytes(shape, machine.runtime) * longest
    fixed = 16 * parameters
    free = free_memory(machine.runtime.device)
    if free is not None:
        room = int((MEMORY_SHARE * free - fixed) / per_sequence)
        if room < micro_batch:
            micro_batch = max(1, room)
            notices.append(
                f"{micro_batch} sequences at a time fit the {free / 2**30:.1f} GB of free memory; the batch is still "
                f"{batch_size}."
                if room >= 1
                else f"The {free / 2**30:.1f} GB of free memory may not be enough; a smaller --size or --context would."
            )
    parameters_per_token = parameters / data.train_tokens
    if new_modern and "dropout" not in model and not data.train_pairs:
        shape = replace(shape, dropout=_choose_dropout(passes, parameters_per_token))
    settings = {
        **RECIPES[recipe],
        **({"weight_decay": _choose_decay(passes, parameters_per_token)} if recipe == "modern" else {}),
        "label_smoothing": LABEL_SMOOTHING if data.train_pairs else 0.0,
        "lr": default_learning_rate(recipe, shape.width),
        **_rhythm(steps, step_seconds, shape, machine, training.get("eval_every"), training.get("save_every")),
        **{name: value for name, value in training.items() if name != "warmup_steps"},
        "batch_size": batch_size,
        "micro_batch": micro_batch,
        "budget": budget,
    }
    if training.get("warmup_steps") is not None:
        settings["warmup"] = training["warmup_steps"] / steps
        if budget.time is not None and settings["warmup"] > 1:
            settings["warmup"] = 1.0
            notices.append(f"The time is enough for about {steps} steps: all of them are warmup.")
    settings.setdefault("min_lr", settings["lr"] / 10)
    expected = budget.time or steps * step_seconds * (1 + EVALUATION_SHARE)
    return Plan(
        model=shape,
        training=TrainingConfig(**settings),
        runtime=replace(machine.runtime, compile=_choose_compile(compile, machine.runtime, expected, shape)),
        parameters=parameters,
        seconds=expected,
        steps=steps,
        passes=passes,
        memory=fixed + micro_batch * per_sequence,
        notices=tuple(notices),
    )


def _with_budget(budget: Budget | None, training: dict[str, Any]) -> tuple[Budget, dict[str, Any]]:
    """Without a budget: until validation stops improving, or ten minutes are up."""
    if budget is not None:
        return budget, training
    return Budget(time=DEFAULT_TIME), {"patience": DEFAULT_PATIENCE, **training}


def _choose_shape(
    machine: Machine,
    data: DataConfig,
    vocab_size: int,
    model: dict[str, Any],
    seconds: float,
    optimizer: str | None,
) -> ModelConfig:
    choices = {name: value for name, value in model.items() if name not in ("preset", "size")}
    if data.train_pairs and data.train_pairs < FEW_PAIRS:
        choices.setdefault("dropout", PAIR_DROPOUT)
    preset, size = model.get("preset", "modern"), model.get("size", "auto")
    if size not in ("auto", *SIZES):
        raise UsageError(f"--size is {size!r}; it must be one of: auto, {', '.join(SIZES)}.")
    if preset not in PRESETS:
        make_model_config(vocab_size=vocab_size, preset=preset, size="nano")  # says which there are

    def shape(size: str) -> ModelConfig:
        return make_model_config(vocab_size=vocab_size, preset=preset, size=size, **choices)

    if size == "auto":
        size = _choose_size(machine, data, vocab_size, preset, choices, seconds, optimizer)
    return shape(size)


TOKENS_PER_PARAMETER = 1.8  # a size is worth its cost once a run sees so many tokens for each parameter
PASSES_OVER_TEXT = 40  # beyond which a larger model would only learn the text by heart


def _choose_size(
    machine: Machine,
    data: DataConfig,
    vocab_size: int,
    preset: str,
    choices: dict[str, Any],
    seconds: float,
    optimizer: str | None,
) -> str:
    """The largest size that the time is enough for, and the text."""
    chosen = None
    for size in SIZES:
        try:
            config = make_model_config(vocab_size=vocab_size, preset=preset, size=size, **choices)
        except UsageError:  # the choices do not fit this size
            continue
        most = _most_tokens(machine, config.width, optimizer)
        steps = seconds / training_step_seconds(machine, config, most, optimizer)
        tokens = min(steps * most, PASSES_OVER_TEXT * data.train_tokens)
        if chosen is None or tokens >= TOKENS_PER_PARAMETER * matrix_parameters(config):
            chosen = size
    return chosen or next(iter(SIZES))


def _fit_context(shape: ModelConfig, data: DataConfig, notices: list[str], chosen: bool, fixed: bool) -> ModelConfig:
    """A context for which the text is enough. `chosen` by the user, `fixed` by a base.

    Raises UsageError when a context that must stay is too long for the text.
    """
    available = data.train_tokens - 1
    if shape.context <= available:
        return shape
    if chosen or fixed:
        shorter = "" if fixed else f", or a --context of at most {available}"
        raise UsageError(
            f"The training text has {data.train_tokens} tokens, and a context of {shape.context} needs "
            f"{shape.context + 1}; give more text{shorter}."
        )
    notices.append(f"The training text has only {data.train_tokens} tokens: the context shrinks to {available}.")
    return replace(shape, context=available)


def _fit_pairs(shape: ModelConfig, needed: PairContexts, notices: list[str], free: bool) -> ModelConfig:
    """A context, where it is free; not for the few pairs that are far longer than others, which cost all memory."""
    if free:
        enough = 2 * int(np.quantile(needed.train, 0.99, method="higher"))
        longest = max(int(part.max()) for part in needed)
        shape = replace(shape, context=max(LEAST_PAIR_CONTEXT, -(-min(longest, enough) // 32) * 32))
    for name, part in zip(("train on", "validate with"), needed, strict=True):
        left_out = int((part > shape.context).sum())
        if left_out:
            notices.append(
                f"{left_out:,} of {len(part):,} pairs to {name} are left out: they do not fit the context of "
                f"{shape.context}, and the longest needs {part.max()}."
            )
    return shape


def _sequences(data: DataConfig, shape: ModelConfig) -> tuple[float, float]:
    """How many sequences an epoch has, and how many tokens one has: windows of text, or pairs with both their sides."""
    if data.train_pairs:
        return data.train_pairs, data.train_tokens / data.train_pairs
    return data.train_tokens / shape.context, shape.context


def default_learning_rate(recipe: str, width: int) -> float:
    lr, power = LEARNING_RATES[recipe]
    return float(f"{lr * (128 / width) ** power:.2g}")


def _choose_batch_size(
    machine: Machine, data: DataConfig, shape: ModelConfig, budget: Budget, optimizer: str | None
) -> int:
    """Sequences a step: as many as leave some hundreds of steps, within what a device does well."""
    fewest, _ = _tokens_per_step(machine)
    tokens = most = _most_tokens(machine, shape.width, optimizer)
    if budget.time is not None:
        optimizing = training_step_seconds(machine, shape, 0, optimizer)
        steps = MUON_STEPS if optimizer == "muon" else STEPS
        tokens = int((budget.time / steps - optimizing) * training_speed(machine, shape))
    elif budget.epochs is not None:
        tokens = int(budget.epochs * data.train_tokens / STEPS)
    return max(1, int(min(max(tokens, fewest), most) / _sequences(data, shape)[1]))


def _tokens_per_step(machine: Machine) -> tuple[int, int]:
    """The fewest and the most that suit a device."""
    return TOKENS_PER_STEP["cpu" if machine.runtime.device == "cpu" else "gpu"]


def _most_tokens(machine: Machine, width: int, optimizer: str | None) -> int:
    _, most = _tokens_per_step(machine)
    return max(most, MUON_TOKENS_PER_WIDTH * width) if optimizer == "muon" else most


def _choose_dropout(passes: float, parameters_per_token: float) -> float:
    dropout = min(DROPOUT_PER_PASS * passes * parameters_per_token, MOST_DROPOUT)
    return float(f"{dropout:.2g}") if dropout >= LEAST_DROPOUT else 0.0


def _choose_decay(passes: float, parameters_per_token: float) -> float:
    most = min(1 + parameters_per_token / 10, MOST_DECAY)
    return float(f"{min(max(DECAY_PER_PASS * passes, LEAST_DECAY), most):.2g}")


def _rhythm(
    steps: int,
    step_seconds: float,
    shape: ModelConfig,
    machine: Machine,
    eval_every: int | None,
    save_every: int | None,
) -> dict[str, int]:
    """Evaluate often enough to see overfitting, on a sample small enough that it costs a twentieth of the time."""
    every = eval_every or max(1, steps // EVALUATIONS, min(steps, round(1 / step_seconds)))
    evaluation_speed = 2 * training_speed(machine, shape)
    tokens = int(EVALUATION_SHARE * every * step_seconds * evaluation_speed)
    minute = max(1, int(60 / step_seconds))
    return {
        "eval_every": every,
        "eval_tokens": min(1_000_000, max(20_000, tokens)),
        "save_every": save_every or min(every, minute),
        "log_every": max(1, min(steps // 100, 100)),
    }


def _choose_compile(wanted: str, runtime: RuntimeConfig, seconds: float, shape: ModelConfig) -> bool:
    """Where sizes change with every batch, as pairs' and experts' do, it would be compiled again and again. On a CPU,
    compiled products in fp32 are not oneDNN's, and slower.
    """
    if wanted not in ("auto", "on", "off"):
        raise UsageError(f"--compile is {wanted!r}; it must be one of: auto, on, off.")
    if wanted == "on":
        return True
    steady = shape.architecture != "encoder-decoder" and shape.experts == 1
    slower = (runtime.device, runtime.dtype) == ("cpu", "fp32") and USES_ONEDNN
    return wanted == "auto" and steady and not slower and can_compile(runtime.device) and seconds >= COMPILE_FROM
