"""Batch size and micro-batch size."""

import bisect

from tinylm.config.model import ModelConfig
from tinylm.config.training import MUON_OPTIMIZERS
from tinylm.machine.measure import Machine
from tinylm.planning import recipes
from tinylm.planning.cost import device_class, training_speed, training_step_seconds
from tinylm.planning.memory import TrainingMemory
from tinylm.planning.plan_request import PlanRequest


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
