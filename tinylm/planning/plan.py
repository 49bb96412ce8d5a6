"""The plan of a training run: model, batch, schedule, time and memory, from the data, the budget and the machine."""

from dataclasses import dataclass, replace

from tinylm.config.model import ModelConfig
from tinylm.config.run import RunConfig, RuntimeConfig
from tinylm.config.sequence_growth import check_sequence_growth
from tinylm.config.training import Budget, TrainingConfig
from tinylm.errors import TinyLMError
from tinylm.machine.measure import Machine
from tinylm.planning import recipes
from tinylm.planning.cost import parameters_by_part
from tinylm.planning.data_shape import data_shape
from tinylm.planning.hyperparameters import choose_compile, choose_length, choose_settings, with_average
from tinylm.planning.memory_plan import (
    MemoryPlan,
    choose_batch_size,
    choose_micro_batch,
    describe_remedies,
    describe_shortage,
    plan_memory,
)
from tinylm.planning.model_size import (
    choose_model,
    choose_sequence_length,
    choose_sizes,
    with_dropout,
    with_sequence_growth,
    with_tying,
)
from tinylm.planning.plan_request import PlanRequest
from tinylm.planning.recipes import MEMORY_ERROR
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Plan:
    """A planned training run.

    parameters: number of parameters of the model
    steps, epochs: optimizer steps and passes over the training data; estimates if the budget is a time
    ranks, parallel: number of processes; ddp (each has a replica of the model) or fsdp (each has a shard)
    seconds: estimated time of the run
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
    sequence_length = choose_sequence_length(request, notices)
    context = None
    if sequence_length is not None:  # planned as for a model with this context
        assert request.base is not None
        context = request.base.context
        request = replace(request, base=replace(request.base, context=sequence_length))
    config = choose_model(request, size, notices)
    request = with_sequence_growth(request, config)
    check_sequence_growth(request.sequence_growth, config.context, is_plain_text=request.data.is_plain_text)
    batch_size = choose_batch_size(machine, request, config)
    run_length = choose_length(machine, request, config, batch_size)
    if request.budget is None and request.keep == "last" and run_length.epochs > recipes.UNVALIDATED_EPOCHS:
        request = replace(request, budget=Budget(epochs=recipes.UNVALIDATED_EPOCHS))
        run_length = choose_length(machine, request, config, batch_size)
    config = with_tying(config, request, run_length)
    parameters = parameters_by_part(config)["total"]
    config = with_dropout(config, request, run_length, parameters)
    request = with_average(request, config, run_length)
    memory_plan = plan_memory(machine, request, config, parameters, batch_size)
    shortage = describe_shortage(machine, memory_plan, batch_size)
    if shortage is not None:
        shortage = f"{shortage} {describe_remedies(machine, request, config, memory_plan, batch_size)}"
    micro_batch = choose_micro_batch(machine, request, batch_size, memory_plan.memory, notices)
    settings = choose_settings(machine, request, config, run_length, parameters, notices)
    settings |= {"sequence_length": sequence_length, "checkpoint_activations": memory_plan.checkpointing}
    budget = request.effective_budget
    seconds = budget.time or run_length.steps * run_length.step_seconds * (1 + recipes.EVALUATION_SHARE)
    return Plan(
        model=config if context is None else replace(config, context=context),
        training=TrainingConfig(**{**settings, "batch_size": batch_size, "micro_batch": micro_batch, "budget": budget}),
        runtime=machine.runtime(compile=choose_compile(machine, request, config, run_length)),
        ranks=request.ranks,
        parallel=memory_plan.parallel,
        parameters=parameters,
        steps=run_length.steps,
        epochs=run_length.epochs,
        seconds=seconds,
        memory=memory_plan.memory.total(micro_batch, batch_size, machine.free_memory),
        fits=memory_plan.fits(machine, batch_size),
        shortage=shortage,
        notices=tuple(notices),
    )


@dataclass(frozen=True)
class ResumedPlan:
    """How a resumed run uses the memory of each process."""

    machine: Machine
    request: PlanRequest
    memory_plan: MemoryPlan
    batch_size: int

    @property
    def parallel(self) -> str:
        """`ddp` or `fsdp`."""
        return self.memory_plan.parallel

    def micro_batch(self, saved: int, notices: list[str]) -> int:
        """The micro-batch of the save, so that the run continues as if it had not stopped; if it does not fit in
        memory, a smaller one, with a message in `notices`.
        """
        free, memory = self.machine.free_memory, self.memory_plan.memory
        if free is None or memory.needed(saved, self.batch_size) * (1 - MEMORY_ERROR) <= free:
            return saved
        request = replace(self.request, training={**self.request.training, "micro_batch": saved})
        return choose_micro_batch(self.machine, request, self.batch_size, memory, notices)


def plan_resumed(
    config: RunConfig, tokens: TokenFolder, tokenizer: Tokenizer, free: int | None, parallel: str, ranks: int
) -> ResumedPlan:
    """The plan of a run with a recorded configuration.

    free: bytes of memory for each of the `ranks` processes, before a save is loaded; `None` if not reported
    parallel: auto, ddp or fsdp

    Raises TinyLMError if the run does not fit in memory, and UsageError as `plan_memory`.
    """
    training, runtime, data = config.training, config.runtime, config.data
    assert training is not None and runtime is not None and data is not None
    model = replace(config.model, context=training.sequence_length or config.model.context)
    recorded = {name: getattr(training, name) for name in ("optimizer", "average", "checkpoint_activations")}
    request = PlanRequest(
        data=data,
        vocab_size=tokenizer.vocab_size,
        shape=data_shape(data, tokens, tokenizer.end_of_text_id),
        training=recorded | ({"pack": training.pack} if data.is_chat else {}),
        base=model,
        adapter=config.adapter,
        parallel=parallel,
        ranks=ranks,
    )
    machine = Machine.recorded(runtime, free)
    memory_plan = plan_memory(machine, request, model, parameters_by_part(model)["total"], training.batch_size)
    shortage = describe_shortage(machine, memory_plan, training.batch_size)
    if shortage is not None:
        shards = ', or resume in several processes with `parallel="fsdp"`' if memory_plan.parallel == "ddp" else ""
        raise TinyLMError(f"{shortage} Free memory{shards}.")
    return ResumedPlan(machine, request, memory_plan, training.batch_size)
