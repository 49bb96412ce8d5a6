"""What a run has unless the user chooses: steps and epochs, learning rate, warmup, weight decay, intervals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from tinylm.config.jobs import applicable
from tinylm.config.model import JOINED_SIZES, ModelConfig
from tinylm.config.run import AdapterConfig
from tinylm.config.training import MUON_OPTIMIZERS, TrainingConfig
from tinylm.config.validation import require
from tinylm.machine.measure import Machine
from tinylm.planning import recipes
from tinylm.planning.plan_request import PlanRequest, training_speed, training_step_seconds
from tinylm.reporter import counted
from tinylm.transformer.build import count_parameters


@dataclass(frozen=True)
class RunLength:
    """Optimizer steps, passes over the training data, tokens trained on, and expected seconds per step."""

    steps: int
    epochs: float
    tokens: float
    step_seconds: float

    def without(self, seconds: float) -> Self:
        """This length, of a budget in time, less the steps that so many seconds would have."""
        share = max(0.0, 1 - seconds / (self.steps * self.step_seconds))
        steps = max(1, int(self.steps * share))
        return replace(self, steps=steps, epochs=self.epochs * share, tokens=self.tokens * share)

    def of_generation(self, generations: int) -> Self:
        """The length of each of so many generations."""
        steps = max(1, self.steps // generations)
        return replace(self, steps=steps, epochs=self.epochs / generations, tokens=self.tokens / generations)


def choose_length(machine: Machine, request: PlanRequest, config: ModelConfig, batch_size: int) -> RunLength:
    """The length of a run with this batch size; an estimate if the budget is a time."""
    rows = request.rows(config)
    steps_per_epoch = rows.steps_per_epoch(batch_size)
    tokens_per_step = batch_size * rows.tokens
    length = request.mean_length(config)
    step_seconds = training_step_seconds(machine, config, tokens_per_step, request.optimizer, length)
    # The forward pass of a frozen model takes a third of the time of a training step of an equal model.
    parameters = count_parameters(config)["total"]
    frozen = request.frozen_parameters + (parameters if request.row.has_reference else 0)
    step_seconds *= 1 + frozen / (3 * parameters)
    steps = request.effective_budget.total_steps(steps_per_epoch) or max(1, int(request.seconds / step_seconds))
    return RunLength(steps, steps / steps_per_epoch, steps * tokens_per_step, step_seconds)


def _predictions_fit(machine: Machine, request: PlanRequest) -> bool:
    free = machine.free_memory if machine.device == "cpu" else None
    return free is None or request.soft_target_bytes < recipes.SOFT_TARGET_SHARE * free


def choose_generations(
    machine: Machine, request: PlanRequest, config: ModelConfig, length: RunLength, notices: list[str]
) -> int:
    """The chosen number of generations or, of new modern decoders of plain text, as many as have GENERATION_EPOCHS
    passes, at most MAX_GENERATIONS (decisions 051, 052).

    Appends notices about a `teacher_weight` without a teacher, and about several processes, in which a run has one
    generation. Raises UsageError for several generations of a run that begins with an existing model, in several
    processes, or with label smoothing; if each has less than one pass; and if memory is too short for the predictions
    of a teacher.
    """
    number = request.training.get("generations")
    if number is None:
        has_room = not request.data.by_heart and _predictions_fit(machine, request)
        is_text = request.is_new_modern and request.objective == "next-token" and request.keep == "best"
        is_suited = is_text and has_room and not request.training.get("label_smoothing")
        minimum = recipes.GENERATION_EPOCHS
        number = max(1, min(recipes.MAX_GENERATIONS, int(length.epochs / minimum))) if is_suited else 1
        while number > 1 and remaining_length(machine, request, config, length, number).epochs < number * minimum:
            number -= 1
        if number > 1 and request.ranks > 1:
            notices.append(f"In one process, this run would have {number} generations; in several, it has one.")
            number = 1
    if number > 1:
        passes, size = length.epochs / number, request.soft_target_bytes
        fits = _predictions_fit(machine, request)
        require(request.base is None, "`generations` is for new models, as each begins with new weights; leave it out.")
        require(request.ranks == 1, "`generations` is for a run in one process; leave it out.")
        require(passes >= 1, f"With `generations={number}`, each has {passes:.2g} passes over the text; set fewer.")
        require(fits, f"`generations` needs {size / 1e9:.1f} GB for the predictions of a teacher; leave it out.")
        require(
            not request.training.get("label_smoothing"),
            "`label_smoothing` has no effect beside the predictions of a teacher, which `generations` have; leave one "
            "of them out.",
        )
    elif request.objective == "next-token" and "teacher_weight" in request.training:
        notices.append("`teacher_weight` has no effect: the run has no teacher, and one generation.")
    return int(number)


def choose_join(
    machine: Machine, request: PlanRequest, config: ModelConfig, length: RunLength, generations: int
) -> int:
    """The chosen number of generations to join or, if no size of the model is chosen, as many as help: at most JOINED,
    with at most MAX_JOINED_PARAMETERS together, and in at most MAX_JOIN_SHARE of the time of the run (decision 052).

    config: of the model of each. Raises UsageError for models that are not joined.
    """
    if "join" in request.training:
        number = int(request.training["join"])
        if number > 1:
            config.side_by_side(number)  # raises UsageError
        return number
    has_size = request.size != "auto" or request.model.keys() & {"layers", *JOINED_SIZES}
    if has_size or not (request.is_new_modern and config.is_joinable and request.keep == "best"):
        return 1
    seconds = request.effective_budget.time or length.steps * length.step_seconds
    largest = math.isqrt(recipes.MAX_JOINED_PARAMETERS // count_parameters(config)["total"])
    number = min(generations, recipes.JOINED, largest)
    while number > 1 and join_seconds(machine, request, config, number) > recipes.MAX_JOIN_SHARE * seconds:
        number -= 1
    return max(1, number)


def join_tokens(number: int, validation_tokens: int) -> int:
    """The time to join `number` models and to evaluate the joined one, as the tokens that one model evaluates in it."""
    if number == 1:
        return 0
    fitted = recipes.JOIN_STEPS * recipes.JOIN_ROWS * recipes.JOIN_LENGTH
    longer = number * number  # times as long as with one model; a training step takes as long as three evaluations
    return fitted * (3 * longer + number) + longer * validation_tokens


def join_seconds(machine: Machine, request: PlanRequest, config: ModelConfig, number: int) -> float:
    """Expected seconds in which so many generations are joined and evaluated. config: of the model of each"""
    targets, _ = request.sizes.validation_size(request.data, config.context)
    tokens = join_tokens(number, min(targets, recipes.MAX_EVALUATION_TOKENS))
    return tokens / (recipes.EVALUATION_SPEEDUP * training_speed(machine, config))


def prediction_seconds(machine: Machine, request: PlanRequest, config: ModelConfig, generations: int) -> float:
    """Expected seconds in which the generations compute the predictions of their teachers: two evaluations each."""
    evaluated = 2 * (generations - 1) * request.data.train_tokens
    return evaluated / (recipes.EVALUATION_SPEEDUP * training_speed(machine, config))


def remaining_length(
    machine: Machine, request: PlanRequest, config: ModelConfig, length: RunLength, generations: int
) -> RunLength:
    """The length of a run without the time of the predictions and of joining, if its budget is a time."""
    if request.effective_budget.time is None:
        return length
    number = choose_join(machine, request, config, length, generations)
    seconds = prediction_seconds(machine, request, config, generations)
    return length.without(seconds + join_seconds(machine, request, config, number))


def choose_compile(machine: Machine, request: PlanRequest, config: ModelConfig, length: RunLength) -> bool:
    """Whether to compile layers: the user's choice, or in runs that are long enough, if compiled layers are faster.

    With pairs, conversations that are not packed and experts, tensor sizes change at every step, and some of them would
    be compiled again.
    """
    if request.compile != "auto":
        return request.compile == "on"
    constant_sizes = request.rows(config).constant and config.experts == 1
    seconds = request.effective_budget.time or length.steps * length.step_seconds
    is_long = seconds >= recipes.MIN_SECONDS_TO_COMPILE[machine.dtype]
    return constant_sizes and machine.compiled_is_faster and is_long


def choose_learning_rate(recipe: str, width: int, adapter: AdapterConfig | None = None) -> float:
    """The peak learning rate of a recipe in RECIPES for a model of this width, and for this adapter.

    For LoRA it is also proportional to (rank * scale)^-0.5. For any adapter it is at most MAX_ADAPTER_LR_FACTOR times
    the recipe's `lr` (decision 022).
    """
    base = recipes.RECIPES[recipe].lr
    lr = base * (recipes.LR_BASE_WIDTH / width) ** recipes.RECIPES[recipe].lr_exponent
    if adapter is not None:
        if adapter.kind == "lora":
            lr *= math.sqrt(recipes.LORA_ALPHA / (adapter.rank * adapter.scale))
        lr = min(lr, recipes.MAX_ADAPTER_LR_FACTOR * base)
    return float(f"{lr:.2g}")


def choose_weight_decay(epochs: float, parameters_per_token: float) -> float:
    """The weight decay of a model of preset modern (decision 014).

    It is proportional to the epochs, clamped to [MIN_WEIGHT_DECAY, limit], where the limit grows with the parameters
    per training token, up to MAX_WEIGHT_DECAY.
    """
    base_limit, limit_per_parameter = recipes.WEIGHT_DECAY_LIMIT
    limit = min(base_limit + limit_per_parameter * parameters_per_token, recipes.MAX_WEIGHT_DECAY)
    return float(f"{min(max(recipes.WEIGHT_DECAY_PER_EPOCH * epochs, recipes.MIN_WEIGHT_DECAY), limit):.2g}")


def choose_bpe_dropout(request: PlanRequest, length: RunLength) -> float:
    """The chosen probability, or BPE_DROPOUT in new modern decoders of plain text that see it often (decision 044)."""
    is_often = length.epochs >= recipes.BPE_DROPOUT_MIN_EPOCHS and not request.data.by_heart
    helps = request.is_new_modern and request.objective == "next-token" and is_often
    default = recipes.BPE_DROPOUT if helps and request.tokenizer_kind == "bpe" else 0.0
    return float(request.training.get("bpe_dropout", default))


def with_average(request: PlanRequest, config: ModelConfig, length: RunLength) -> PlanRequest:
    """The request with averaged weights and a learning rate that does not fall to 0, where these help (decision 006).

    They help new modern decoders of plain text that see it AVERAGE_MIN_EPOCHS times. They are not planned if the user
    chose `average`, `min_lr`, `schedule`, or an optimizer that is not a kind of Muon.
    """
    chosen = request.training.keys() & {"average", "min_lr", "schedule"}
    is_plain_decoder = config.architecture == "decoder" and request.data.is_plain_text
    helps = request.is_new_modern and is_plain_decoder and request.optimizer in MUON_OPTIMIZERS
    if chosen or not helps or length.epochs < recipes.AVERAGE_MIN_EPOCHS:
        return request
    lr = request.training.get("lr", choose_learning_rate(request.recipe_name, config.width))
    settings = {"average": recipes.AVERAGE, "min_lr": float(f"{lr / recipes.AVERAGE_MIN_LR_DIVISOR:.2g}")}
    return request.with_training(**settings)


def choose_intervals(machine: Machine, request: PlanRequest, config: ModelConfig, length: RunLength) -> dict[str, int]:
    """Steps between evaluations, saves and log lines, and the tokens of an evaluation, as fields of TrainingConfig.

    Evaluations are frequent enough to show overfitting, on samples that take EVALUATION_SHARE of the training time, and
    with MIN_EVALUATION_TOKENS at most MAX_EVALUATION_SHARE. Where these take longer, evaluations are rarer, down to
    MIN_EVALUATIONS, and then samples are smaller. Only at the smallest samples, chosen intervals can take more time.
    """
    chosen, steps = request.training, length.steps
    targets, tokens = request.sizes.validation_size(request.data, config.context)
    speed = evaluation_speed(machine, request, config)
    seconds = request.effective_budget.time or steps * length.step_seconds
    most = recipes.MAX_EVALUATION_SHARE * seconds * speed  # targets of all evaluations together
    smallest = max(recipes.MIN_EVALUATION_TARGETS, recipes.MIN_SLOW_EVALUATION_TOKENS * targets // max(tokens, 1))
    least = min(recipes.MIN_EVALUATION_TOKENS, max(smallest, most / recipes.MIN_EVALUATIONS))
    number = min(recipes.EVALUATIONS, seconds / recipes.MIN_EVALUATION_SECONDS, most / max(min(least, targets), 1))
    eval_every = chosen.get("eval_every") or math.ceil(steps / max(number, 1))
    evaluations = math.ceil(steps / eval_every)
    usual = recipes.EVALUATION_SHARE * seconds * speed / evaluations
    eval_tokens = max(smallest, min(least, most / evaluations), usual)
    max_save_steps = max(1, int(recipes.MAX_SAVE_SECONDS / length.step_seconds))
    return {
        "eval_every": eval_every,
        "eval_tokens": min(recipes.MAX_EVALUATION_TOKENS, int(eval_tokens)),
        "save_every": min(eval_every, max_save_steps),
        "log_every": max(1, min(steps // recipes.LOGS, recipes.MAX_LOG_STEPS)),
    }


def evaluation_speed(machine: Machine, request: PlanRequest, config: ModelConfig) -> float:
    """Expected targets per second of an evaluation, in which the tokens that are not scored take time as well."""
    targets, tokens = request.sizes.validation_size(request.data, config.context)
    passes = 2 if request.row.has_reference else 1
    return recipes.EVALUATION_SPEEDUP * training_speed(machine, config) * max(targets, 1) / max(tokens, 1) / passes


def evaluation_seconds(
    machine: Machine, request: PlanRequest, config: ModelConfig, steps: int, intervals: Mapping[str, Any]
) -> float:
    """Expected seconds of all evaluations of a run. intervals: `eval_every` and `eval_tokens`"""
    targets, _ = request.sizes.validation_size(request.data, config.context)
    scored = math.ceil(steps / intervals["eval_every"]) * min(intervals["eval_tokens"], targets)
    return scored / evaluation_speed(machine, request, config)


def choose_warmup(request: PlanRequest, length: RunLength, notices: list[str]) -> float:
    """Warmup as a fraction of the run: from the chosen `warmup_steps` or `warmup`, or from the recipe.

    Above 1 if `warmup_steps` exceed a budget in steps or epochs, which TrainingConfig rejects.
    """
    warmup_steps = request.training.get("warmup_steps")
    if warmup_steps is None:
        return request.training.get("warmup", request.recipe.settings["warmup"])
    warmup = warmup_steps / length.steps
    if request.effective_budget.time is not None and warmup > 1:  # the number of steps is only an estimate
        notices.append(f"The time is enough for about {counted(length.steps, 'step')}: all of them are warmup.")
        return 1.0
    return warmup


def choose_settings(
    machine: Machine, request: PlanRequest, config: ModelConfig, length: RunLength, parameters: int, notices: list[str]
) -> dict[str, Any]:
    """Fields of TrainingConfig: the user's choices, and the defaults of the recipe and the data.

    Without budget, batch sizes, `sequence_length` and `checkpoint_activations`, unless they are among the choices.
    Raises UsageError for a choice that is not for the job.
    """
    lr = choose_learning_rate(request.recipe_name, config.width, request.adapter)
    lr *= request.sizes.new_lr_factor if request.base is None else request.sizes.lr_factor
    relies_on_validation = request.budget is None and request.keep == "best" and not request.data.by_heart
    generation = length.of_generation(request.training.get("generations", 1))
    settings = {
        **request.recipe.settings,
        "objective": request.objective,
        "lr": float(f"{lr:.2g}"),
        "label_smoothing": 0.0,
        "sequence_growth": request.sequence_growth(config),
        "mtp_weight": request.mtp_weight,
        "bpe_dropout": choose_bpe_dropout(request, generation),
        "patience": recipes.DEFAULT_PATIENCE if relies_on_validation else None,
        "keep": request.keep,
        **choose_intervals(machine, request, config, length),
        **request.sizes.settings(config.context, request.training.get("pack")),
    }
    if request.recipe_name == "modern":
        epochs = 0 if request.data.by_heart else generation.epochs
        settings["weight_decay"] = choose_weight_decay(epochs, parameters / request.data.train_tokens)
    given = applicable(TrainingConfig, request.training, (request.row,))
    settings |= {name: value for name, value in given.items() if name != "warmup_steps"}
    settings["warmup"] = choose_warmup(request, generation, notices)
    settings.setdefault("min_lr", settings["lr"] / recipes.MIN_LR_DIVISOR)
    return settings
