"""The plan of a training run: model, batch, schedule, time and memory, from the data, the budget and the machine.

Of the model, it chooses size, context, output layer and dropout, and the lengths of its training sequences. Also the
largest models that a machine can train in ten minutes and in one day, for `tinylm doctor`.
"""

from dataclasses import dataclass, replace
from typing import Any

from tinylm.config.model import ModelConfig
from tinylm.config.presets import SIZES, check_options_have_effect, make_model_config
from tinylm.config.run import DataConfig, RunConfig, RuntimeConfig, TrainingParts
from tinylm.config.training import Budget, TrainingConfig, check_sequence_growth
from tinylm.errors import TinyLMError, UsageError
from tinylm.machine.measure import Machine
from tinylm.planning import recipes
from tinylm.planning.hyperparameters import (
    RunLength,
    choose_compile,
    choose_generations,
    choose_join,
    choose_length,
    choose_settings,
    evaluation_seconds,
    join_seconds,
    prediction_seconds,
    remaining_length,
    with_average,
)
from tinylm.planning.memory import MemoryPlan, choose_batch_size, describe_remedies, max_tokens_per_step, plan_memory
from tinylm.planning.plan_request import PlanRequest, Sizes, matrix_parameters, training_step_seconds
from tinylm.transformer.build import count_parameters


@dataclass(frozen=True)
class Plan:
    """A planned training run.

    model: that of the run; of one that joins generations, as many of the trained one side by side
    parameters: number of parameters of the model that is trained
    steps, epochs: optimizer steps and passes over the training data; estimates if the budget is a time
    ranks, parallel: number of processes; ddp (each has a replica of the model) or fsdp (each has a shard)
    seconds, evaluation_seconds: estimated time of the run, and of all its evaluations
    memory: estimated peak memory of rank 0 in bytes; on a GPU, of its tensors only
    fits: whether micro-batches of one sequence fit the part of the free memory that a plan may use
    shortage: why the run does not fit in the free memory of a process, and what to change; `None` if it may fit
    notices: sentences for the user
    """

    model: ModelConfig
    training: TrainingConfig
    runtime: RuntimeConfig
    ranks: int
    parallel: str
    parameters: int
    steps: int
    epochs: float
    seconds: float
    evaluation_seconds: float
    memory: int
    fits: bool
    shortage: str | None
    notices: tuple[str, ...]


def plan_training(machine: Machine, request: PlanRequest) -> Plan:
    """Choose every setting that the request leaves open. An automatic size fits in memory, if any size does.

    Raises UsageError for choices that contradict each other, the data or the base.
    """
    for size in choose_sizes(machine, request):
        plan = _plan(machine, request, size)
        if plan.fits:
            break
    return plan


def _plan(machine: Machine, request: PlanRequest, size: str) -> Plan:
    notices: list[str] = []

    # The context and the size of the model, and how the lengths of sequences grow
    sequence_length = choose_sequence_length(request, notices)
    config = choose_model(request, size, sequence_length, notices)
    check_sequence_growth(request.sequence_growth(config), config.context, is_plain_text=request.data.is_plain_text)

    # The batch, the number of steps, and what depends on the number of epochs
    batch_size = choose_batch_size(machine, request, config)
    run_length = choose_length(machine, request, config, batch_size)
    if request.budget is None and (request.sizes.is_brief or request.keep == "last" or request.data.by_heart):
        passes, least = request.sizes.unvalidated
        steps = max(least, round(passes * run_length.steps / run_length.epochs))
        if steps < run_length.steps:
            request = replace(request, budget=Budget(steps=steps))
            run_length = choose_length(machine, request, config, batch_size)
    generations = choose_generations(machine, request, config, run_length, notices)
    join = choose_join(machine, request, config, run_length, generations)
    run_length = remaining_length(machine, request, config, run_length, generations)
    between = prediction_seconds(machine, request, config, generations) + join_seconds(machine, request, config, join)
    request = request.with_training(generations=generations, join=join)
    generation = run_length.of_generation(generations)
    config = with_tying(config, request, generation)
    parameters = count_parameters(config)["total"]
    config = with_dropout(config, request, generation, parameters)
    request = with_average(request, config, generation)

    # The memory, and what is changed to fit in it
    memory_plan = plan_memory(machine, request, config, parameters, batch_size)
    shortage = memory_plan.shortage
    if shortage is not None:
        shortage = f"{shortage} {describe_remedies(machine, request, config, memory_plan)}"
    micro_batch = memory_plan.micro_batch(request.training.get("micro_batch", batch_size), notices)

    # All other settings
    settings = choose_settings(machine, request, config, run_length, parameters, notices)
    settings |= {"sequence_length": sequence_length, "checkpoint_activations": memory_plan.checkpointing}
    budget, steps = request.effective_budget, run_length.steps
    joined = config if join == 1 else config.side_by_side(join)
    evaluation = evaluation_seconds(machine, request, config, steps, settings)
    if budget.time is not None:  # with their time, there are fewer steps and evaluations
        evaluation *= budget.time / (budget.time + evaluation)
    return Plan(
        model=joined if request.base is None else replace(config, context=request.base.context),
        training=TrainingConfig(**{**settings, "batch_size": batch_size, "micro_batch": micro_batch, "budget": budget}),
        runtime=machine.runtime(compile=choose_compile(machine, request, config, run_length)),
        ranks=request.ranks,
        parallel=memory_plan.parallel,
        parameters=parameters,
        steps=steps,
        epochs=run_length.epochs,
        seconds=budget.time or steps * run_length.step_seconds + between + evaluation,
        evaluation_seconds=evaluation,
        memory=memory_plan.memory.total(micro_batch, batch_size, machine.free_memory),
        fits=memory_plan.fits,
        shortage=shortage,
        notices=tuple(notices),
    )


def plan_resumed(
    config: RunConfig,
    recorded: TrainingParts,
    sizes: Sizes,
    vocab_size: int,
    free: int | None,
    parallel: str,
    ranks: int,
) -> MemoryPlan:
    """How a resumed run with a recorded configuration, whose `training_parts` are `recorded`, uses the memory.

    sizes, vocab_size: of its data and of its tokenizer
    free: bytes of memory for each of the `ranks` processes, before a save is loaded; `None` if not reported
    parallel: auto, ddp or fsdp

    Raises TinyLMError if the run does not fit in memory, and UsageError as `plan_memory`.
    """
    training, runtime, data = recorded
    model = config.while_training.model
    model = replace(model, context=training.sequence_length or model.context)
    names = ("optimizer", "average", "checkpoint_activations", "generations", "join", "mtp_weight")
    kept = {name: getattr(training, name) for name in names}
    request = PlanRequest(
        objective=training.objective,
        data=data,
        vocab_size=vocab_size,
        sizes=sizes,
        training=kept | {"pack": training.pack},
        base=model,
        adapter=config.adapter,
        frozen_parameters=config.frozen_parameters,
        parallel=parallel,
        ranks=ranks,
    )
    machine, parameters = Machine.recorded(runtime, free), count_parameters(model)["total"]
    memory_plan = plan_memory(machine, request, model, parameters, training.batch_size)
    if memory_plan.shortage is not None:
        shards = ', or resume in several processes with `parallel="fsdp"`' if memory_plan.parallel == "ddp" else ""
        raise TinyLMError(f"{memory_plan.shortage} Free memory{shards}.")
    return memory_plan


def choose_sequence_length(request: PlanRequest, notices: list[str]) -> int | None:
    """Tokens per training sequence; `None` for the context of the model, and always for a new model.

    A published model has a context of thousands of tokens, and the memory of a step grows with the sequence length. On
    text, a base with a context above LONG_CONTEXT is trained on sequences of SEQUENCE_LENGTH tokens, and any base on at
    most one less than the training tokens. The length of pairs and conversations follows from the data.

    Raises UsageError if a length is set for a new model, or is above the context of the base model.
    """
    base, length = request.base, request.training.get("sequence_length")
    if length is not None:
        if base is None:
            raise UsageError("`sequence_length` is for a model that is trained further; set `context` instead.")
        if length > base.context:
            raise UsageError(
                f"`sequence_length` is {length}; it must be at most the context of the model, {base.context}."
            )
        return int(length)
    if base is None or not request.data.is_plain_text:
        return None
    usual = base.context if base.context <= recipes.LONG_CONTEXT else recipes.SEQUENCE_LENGTH
    length = max(1, min(usual, request.data.train_tokens - 1))
    if length == base.context:
        return None
    notices.append(
        f"The context of the model is {base.context:,} tokens; it is trained on sequences of {length} "
        "(`sequence_length`)."
    )
    return length


def choose_model(request: PlanRequest, size: str, sequence_length: int | None, notices: list[str]) -> ModelConfig:
    """The base model with the length of its training sequences as context, or a new model of this size.

    The context of a new model is shortened to one less than the number of training tokens, or chosen for the pairs or
    conversations, unless the user set it. Sentences about a shortened context, and about pairs and conversations that
    are cut or left out, are appended to `notices`.

    Raises UsageError for an invalid model, for a choice that has no effect, for a context longer than the text, and for
    conversations without a scored token within the context.
    """
    config = request.base or _new_model(request, size)
    if sequence_length is not None:
        config = replace(config, context=sequence_length)
    is_new = request.base is None
    if is_new and "context" not in request.model:
        default = min(config.context, request.max_context or config.context)
        config = replace(config, context=request.sizes.choose_context(request.data, default, notices))
    notices += request.sizes.check_context(request.data, config.context, is_new=is_new)
    check_options_have_effect(config, request.model)  # again, since the context may have changed
    return config


def _new_model(request: PlanRequest, size: str) -> ModelConfig:
    fields = {name: value for name, value in request.model.items() if name not in ("preset", "size")}
    return make_model_config(vocab_size=request.vocab_size, preset=request.preset, size=size, **fields)


def choose_sizes(machine: Machine, request: PlanRequest) -> list[str]:
    """The sizes to plan with, in descending order; a smaller size is used if the model does not fit in memory.

    With a chosen size or a base model, the only item is `request.size`. Otherwise, the first is the largest valid size
    with TOKENS_PER_PARAMETER training tokens per parameter, or else the smallest valid size. If none is valid, the
    smallest size, which `make_model_config` rejects.
    """
    if request.size != "auto" or request.base is not None:
        return [request.size]
    valid: list[str] = []
    preferred = 0
    for size in SIZES:
        try:
            config = _new_model(request, size)
        except UsageError:
            continue
        valid.append(size)
        if training_tokens(machine, request, config) >= recipes.TOKENS_PER_PARAMETER * matrix_parameters(config):
            preferred = len(valid) - 1
    return valid[preferred::-1] or [next(iter(SIZES))]


def training_tokens(machine: Machine, request: PlanRequest, config: ModelConfig) -> float:
    """Tokens that a model, or all generations, are trained on in `request.seconds`, at most MAX_USEFUL_EPOCHS of the
    training data.
    """
    per_step = max_tokens_per_step(machine, config.width, request.optimizer)
    steps = request.seconds / training_step_seconds(
        machine, config, per_step, request.optimizer, request.mean_length(config)
    )
    return min(steps * per_step, recipes.MAX_USEFUL_EPOCHS * request.data.train_tokens)


def with_tying(config: ModelConfig, request: PlanRequest, length: RunLength) -> ModelConfig:
    """Set whether a new modern decoder ties its output layer, unless the user set `tie` (decision 019).

    It is untied in a run of at most UNTIED_MAX_TOKENS with a vocabulary of at most UNTIED_MAX_VOCABULARY.
    """
    if not request.is_new_modern or config.architecture != "decoder" or "tie" in request.model:
        return config
    untied = length.tokens <= recipes.UNTIED_MAX_TOKENS and request.vocab_size <= recipes.UNTIED_MAX_VOCABULARY
    return replace(config, tie=not untied)


def with_dropout(config: ModelConfig, request: PlanRequest, length: RunLength, parameters: int) -> ModelConfig:
    """Set the dropout of a new model that is modern, or whose data have a rule, unless the user set `dropout`.

    There is none where a text is learned by heart.
    """
    rule = request.sizes.dropout or (recipes.DROPOUT if request.is_new_modern else None)
    if request.base is not None or rule is None or request.data.by_heart or "dropout" in request.model:
        return config
    return replace(config, dropout=choose_dropout(rule, length.epochs, parameters / request.data.train_tokens))


def choose_dropout(rule: recipes.DropoutRule, epochs: float, parameters_per_token: float) -> float:
    """Dropout proportional to epochs and to parameters per training token, within the limits of the rule."""
    dropout = min(rule.per_epoch * epochs * parameters_per_token, rule.maximum)
    return float(f"{dropout:.2g}") if dropout >= rule.minimum else 0.0


SECONDS = {"ten_minutes": 600.0, "one_day": 86_400.0}
VOCABULARY, TOKENS = 8192, 10**11  # a text so long that only the time limits the model


def largest_models(machine: Machine) -> dict[str, dict[str, Any]]:
    """The planned model by the name of the time: its size, the tokens that it is trained on, and memory."""
    data = DataConfig(
        corpus=(),
        train_characters=4 * TOKENS,
        fingerprint="",
        characters=4 * TOKENS,
        bytes=4 * TOKENS,
        documents=1,
        train_tokens=TOKENS,
        val_tokens=TOKENS // 10,
    )
    models = {}
    for name, seconds in SECONDS.items():
        budget = Budget(time=seconds)
        request = PlanRequest(objective="next-token", data=data, vocab_size=VOCABULARY, budget=budget)
        plan = plan_training(machine, request)
        models[name] = {
            "layers": plan.model.layers,
            "width": plan.model.width,
            "parameters": plan.parameters,
            "tokens": plan.steps * plan.training.batch_size * plan.model.context,
            "memory_gb": round(plan.memory / 1e9, 1),
        }
    return models
