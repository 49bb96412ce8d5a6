"""How a run fits the memory of each process: replicas or shards, activations stored or computed again.

Also the batch size and the micro-batch size.
"""

import bisect
from dataclasses import dataclass

from tinylm.config.model import ModelConfig
from tinylm.config.run import AdapterConfig
from tinylm.config.training import MUON_OPTIMIZERS
from tinylm.errors import UsageError
from tinylm.machine.measure import Machine
from tinylm.planning import recipes
from tinylm.planning.cost import device_class, training_speed, training_step_seconds
from tinylm.planning.memory import TrainingMemory, training_memory
from tinylm.planning.plan_request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a run uses the memory of each process.

    parallel: ddp or fsdp
    checkpointing: whether activations are computed again in the backward pass
    memory: the estimate for this plan; checkpointed: the estimate if activations are computed again
    """

    parallel: str
    checkpointing: bool
    memory: TrainingMemory
    checkpointed: TrainingMemory

    def fits(self, machine: Machine, batch_size: int) -> bool:
        """Whether micro-batches of one sequence fit the part of the free memory that a plan may use."""
        free = machine.free_memory
        return free is None or self.memory.needed(1, batch_size) <= recipes.MEMORY_SHARE * free


def plan_memory(
    machine: Machine, request: PlanRequest, config: ModelConfig, parameters: int, batch_size: int
) -> MemoryPlan:
    """Choose replicas or shards of the model, and whether activations are computed again.

    A single process has a replica. Several processes have replicas or shards as the user chose; without a choice,
    replicas if they fit, else shards. `choose_checkpointing` decides about the activations, and raises UsageError.
    """
    modes = ("ddp",) if request.ranks == 1 else {"auto": ("ddp", "fsdp")}.get(request.parallel, (request.parallel,))
    for parallel in modes:
        plain, checkpointed = (
            training_memory(
                machine, request, config, parameters, checkpointed=checkpointing, sharded=parallel == "fsdp"
            )
            for checkpointing in (False, True)
        )
        checkpointing = choose_checkpointing(machine, request, config, plain, checkpointed, batch_size)
        plan = MemoryPlan(
            parallel=parallel,
            checkpointing=checkpointing,
            memory=checkpointed if checkpointing else plain,
            checkpointed=checkpointed,
        )
        if plan.fits(machine, batch_size):
            break
    return plan


def repeats_dropout(device: str, config: ModelConfig, adapter: AdapterConfig | None) -> bool:
    """Whether the second forward pass of a checkpointed block draws the same dropout masks as the first.

    `torch.utils.checkpoint` restores the random number generators of the CPU and of CUDA, but not that of Apple GPUs.
    """
    rates = (config.dropout, config.attention_dropout, adapter.dropout if adapter is not None else 0.0)
    return device != "mps" or not any(rates)


def require_repeatable_dropout(device: str, config: ModelConfig, adapter: AdapterConfig | None) -> None:
    """Raise UsageError if activations cannot be computed again: see `repeats_dropout`."""
    if not repeats_dropout(device, config, adapter):
        raise UsageError(
            "`checkpoint_activations` cannot be combined with dropout on Apple GPUs; set `dropout` and "
            "`attention_dropout` to 0, or leave out `checkpoint_activations`."
        )


def choose_checkpointing(
    machine: Machine,
    request: PlanRequest,
    config: ModelConfig,
    plain: TrainingMemory,
    checkpointed: TrainingMemory,
    batch_size: int,
) -> bool:
    """Whether to compute activations again: the user's choice; without one, only if a single sequence does not fit
    otherwise, dropout is repeatable (`repeats_dropout`) and the needed memory is reduced.

    Raises UsageError if the user's choice is not possible: see `require_repeatable_dropout`.
    """
    chosen: bool | None = request.training.get("checkpoint_activations")
    if chosen:
        require_repeatable_dropout(machine.device, config, request.adapter)
    elif not repeats_dropout(machine.device, config, request.adapter):
        return False
    if chosen is not None or machine.free_memory is None:
        return bool(chosen)
    needed = [memory.needed(1, batch_size) for memory in (plain, checkpointed)]
    return needed[0] > recipes.MEMORY_SHARE * machine.free_memory and needed[1] < needed[0]


def describe_shortage(machine: Machine, plan: MemoryPlan, batch_size: int) -> str | None:
    """A sentence if micro-batches of one sequence need more than the free memory, even if the estimate is too high by
    MEMORY_ERROR; else `None`.
    """
    free, memory = machine.free_memory, plan.memory
    needed = memory.needed(1, batch_size)
    if free is None or needed * (1 - recipes.MEMORY_ERROR) <= free:
        return None
    each = " in each process" if memory.ranks > 1 else ""
    return (
        f"Training needs about {needed / 1e9:.1f} GB of memory{each}, {memory.fixed / 1e9:.1f} GB of it for weights, "
        f"gradients and optimizer, and {free / 1e9:.1f} GB are free."
    )


def describe_remedies(
    machine: Machine, request: PlanRequest, config: ModelConfig, plan: MemoryPlan, batch_size: int
) -> str:
    """A sentence with the settings that would reduce the memory of a run that is not resumed."""
    memory = plan.memory
    needed = memory.needed(1, batch_size)
    new_model = request.base is None
    remedies = ["a smaller `size`" if new_model else "a smaller model"]
    if needed > memory.fixed:
        remedies.append("a shorter `context`" if new_model else "a shorter `sequence_length`")
    recomputed = plan.checkpointed.needed(1, batch_size)
    if recomputed < needed and repeats_dropout(machine.device, config, request.adapter):
        remedies.append("`checkpoint_activations`")
    if memory.update > memory.backward:
        remedies.append('`optimizer="adamw"`')
    if not new_model and request.adapter is None:
        remedies.append("a LoRA adapter instead of all weights")
    if plan.parallel == "ddp" and request.ranks > 1:
        remedies.append('`parallel="fsdp"`')
    return f"Choose {' or '.join(remedies)}."


def choose_batch_size(machine: Machine, request: PlanRequest, config: ModelConfig) -> int:
    """Sequences per optimizer step: the user's choice, or a number that leaves the run enough steps.

    Tokens per step are between the limits of TOKENS_PER_STEP for the device; Muon raises the upper one
    (`max_tokens_per_step`). With a budget in steps, they are at the upper limit.
    """
    if "batch_size" in request.training:
        batch_size: int = request.training["batch_size"]
        return batch_size
    min_tokens, _ = recipes.TOKENS_PER_STEP[device_class(machine)]
    max_tokens = max_tokens_per_step(machine, config.width, request.optimizer)
    budget = request.effective_budget
    if budget.time is not None:
        steps = recipes.MUON_TARGET_STEPS if request.optimizer in MUON_OPTIMIZERS else recipes.TARGET_STEPS
        optimizer_seconds = training_step_seconds(machine, config, 0, request.optimizer)
        speed = training_speed(machine, config, request.mean_length(config))
        tokens = int((budget.time / steps - optimizer_seconds) * speed)
    elif budget.epochs is not None:
        tokens = int(budget.epochs * request.data.train_tokens / recipes.TARGET_STEPS)
    else:
        tokens = max_tokens
    return max(1, int(min(max(tokens, min_tokens), max_tokens) / request.rows(config).tokens))


def max_tokens_per_step(machine: Machine, width: int, optimizer: str) -> int:
    """The upper limit of tokens per step for a model of this width."""
    _, max_tokens = recipes.TOKENS_PER_STEP[device_class(machine)]
    return max(max_tokens, recipes.MUON_TOKENS_PER_WIDTH * width) if optimizer in MUON_OPTIMIZERS else max_tokens


def choose_micro_batch(
    machine: Machine, request: PlanRequest, batch_size: int, memory: TrainingMemory, notices: list[str]
) -> int:
    """Sequences per forward pass: the user's choice, or else the whole batch. If memory is short, fewer, with a notice
    in `notices`; at least 1.
    """
    wanted: int = request.training.get("micro_batch", batch_size)
    if machine.free_memory is None:
        return wanted
    usable = recipes.MEMORY_SHARE * machine.free_memory
    if memory.needed(wanted, batch_size) <= usable:
        return wanted
    # The largest micro-batch below `wanted` that fits; 0 if none does.
    fitting = bisect.bisect_right(range(1, wanted), usable, key=lambda rows: memory.needed(rows, batch_size))
    free = f"{machine.free_memory / 1e9:.1f} GB of free memory"
    if fitting < 1:
        notices.append(f"The {free} may not be enough for one sequence; choose a smaller `size` or `context`.")
        return 1
    notices.append(f"The micro-batch is {fitting}, which fits the {free}; the effective batch is still {batch_size}.")
    return fitting
