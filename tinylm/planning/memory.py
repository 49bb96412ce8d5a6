"""The estimated peak memory of a training run (decision 030), and how the run fits the memory of each process.

It has replicas or shards of the model, activations that are stored or computed again, a batch size and a micro-batch
size.
"""

import bisect
import functools
from dataclasses import dataclass, replace

from tinylm.config.model import GATED_ACTIVATIONS, ModelConfig
from tinylm.config.run import AdapterConfig
from tinylm.config.training import MUON_OPTIMIZERS
from tinylm.errors import UsageError
from tinylm.machine.measure import Machine
from tinylm.objectives.loss import max_logits
from tinylm.planning import recipes
from tinylm.planning.plan_request import (
    PlanRequest,
    block_parameters,
    device_class,
    layer_matrices,
    layers_per_token,
    training_speed,
    training_step_seconds,
)
from tinylm.system.ranks import MAX_SUM_BYTES


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """The memory of one process of a training run, in bytes.

    ranks: number of processes that share a batch
    process: memory of the process before training, which the needed free memory does not include; 0 on a GPU
    state: weights, optimizer moments and averaged weights
    gradients: gradients of all trained weights
    gathered: shards of other ranks that are in memory during the forward and the backward pass
    casts: copies of the weights in the number format of the computation; 0 for fp32
    backward: memory in addition to the gradients when the last gradient is computed
    update: memory in addition to the gradients during the optimizer step
    sums: memory in addition to the gradients while they are summed over the ranks
    per_sequence: activations per sequence of a micro-batch
    evaluation: activations of an evaluation, per sequence of a micro-batch
    logits: logits and their gradients, per sequence of a micro-batch
    max_logits: limit for a micro-batch: those of one chunk, and the gradients of the output layer that `_ChunkedLosses`
        holds: one per loss, and that of a chunk
    copies: copies of the state for saves in the background, if there is memory for them (`keeps_copies`)
    base_loading: the weights of a base model while they are read, before training; 0 on a GPU
    best: additional memory of rank 0 while it saves the best weights: all weights if they are sharded; 0 on a GPU. Of a
        run that joins generations, the joined weights, in memory twice
    """

    ranks: int = 1
    process: int = 0
    state: int
    gradients: int
    gathered: int = 0
    casts: int = 0
    backward: int = 0
    update: int = 0
    sums: int = 0
    per_sequence: int
    evaluation: int = 0
    logits: int = 0
    max_logits: int = 0
    copies: int = 0
    base_loading: int = 0
    best: int = 0

    def needed(self, micro_batch: int, batch_size: int) -> int:
        """Bytes that must be free for micro-batches of a batch: the maximum over a step and an evaluation.

        Counted are the end of the forward pass (with the gradients of earlier micro-batches), the end of the backward
        pass, the sum of the gradients over the ranks, the optimizer step, and an evaluation.
        """
        own_rows = -(-batch_size // self.ranks)  # rows of the batch on this rank
        rows = min(micro_batch, own_rows)
        forward = self.casts + rows * self.per_sequence + min(rows * self.logits, self.max_logits)
        if rows < own_rows:
            forward += self.gradients
        return max(self.fixed, self.state + self.gathered + max(forward, micro_batch * self.evaluation))

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the micro-batch: the maximum of backward pass, sum over the ranks and update."""
        return self.state + self.gradients + max(self.gathered + self.backward, self.update, self.sums)

    def keeps_copies(self, free: int | None) -> bool:
        """Whether saves are written in the background, from copies (see BackgroundSaver).

        free: bytes free before training; `None` if unknown
        """
        enough = free is None or 2 * self.copies <= free - self.state
        return enough and self.copies >= recipes.MIN_COPIED_SAVE

    def total(self, micro_batch: int, batch_size: int, free: int | None = None) -> int:
        """Peak bytes of the process of rank 0. free: as for `keeps_copies`."""
        copies = self.copies if self.keeps_copies(free) else 0
        training = max(self.needed(micro_batch, batch_size), self.state + self.best)
        return self.process + max(self.base_loading, copies + training)


def training_memory(
    machine: Machine,
    request: PlanRequest,
    config: ModelConfig,
    parameters: int,
    *,
    checkpointed: bool,
    sharded: bool = False,
) -> TrainingMemory:
    """The memory of training a model with this number of parameters on sequences of the maximum length.

    checkpointed: whether activations are computed again in the backward pass
    sharded: whether the ranks of the request have shards of the model instead of replicas
    """
    longest = request.rows(config).longest
    size = element_size(machine)
    on_cpu = device_class(machine) == "cpu"
    soft_targets = request.soft_target_bytes if request.training.get("generations", 1) > 1 else 0
    layer_parameters = sum(shape.numel() * layers for shape, layers in layer_matrices(config).values())
    trained = parameters if request.adapter is None else adapter_parameters(config, request.adapter)
    frozen = parameters if request.adapter is not None else 0
    others = request.frozen_parameters
    others += parameters if request.keeps_first_weights else 0
    # A frozen embedding stays fp32 (see `set_weights_dtype`), unless the base has 16 bits, which is not known here.
    wide = (4 - size) * config.vocab_size * config.width if frozen or request.keeps_first_weights else 0
    losses = 1 if request.mtp_weight == 0 else 2
    logit_bytes = recipes.LOGIT_BYTES + (losses - 1) * recipes.LOGIT_GRADIENT_BYTES
    moments, update = 8 * trained, 0  # fp32: two moments of Adam
    if request.optimizer in MUON_OPTIMIZERS and request.adapter is None:
        moments -= 4 * layer_parameters
        if request.optimizer == "normuon":
            moments += 4 * sum(shape[0] * layers for shape, layers in layer_matrices(config).values())
        update = round((4 + recipes.MUON_COPIES * size) * layer_parameters)
    average = 4 * trained if request.training.get("average") else 0
    process = recipes.PROCESS_BYTES[device_class(machine)]
    if checkpointed and process:
        process += recipes.COMPILER_BYTES
    if request.ranks > 1 and process:
        process += recipes.RANK_BYTES
    casts = 0 if size == 4 else size * trained
    output = 0 if frozen else 4 * config.width * config.outputs  # bytes of a gradient of the output layer
    # The allocator does not reuse the memory of the casts, which are smaller than gradients. A tied
    # embedding has two gradients, which are in memory together until they are added.
    backward = casts + (output if config.tie else 0)
    state = 4 * trained + moments + average
    shards = request.ranks if sharded else 1
    state_shards = 1 if frozen else shards  # an adapter is not sharded
    gathered = best = 0
    if sharded:
        in_blocks = block_parameters(config)
        outside = parameters - in_blocks
        gathered_size = size if frozen or not on_cpu else 4  # bytes per weight of a block: see `shard_model`
        gathered = 4 * outside
        gathered += round(recipes.GATHERED_BLOCKS * gathered_size * in_blocks / blocks(config))
        if not frozen:
            casts = casts if on_cpu else min(casts, size * outside)
            backward = casts + 4 * outside  # and the unsharded gradients of these weights
        best = 4 * trained if on_cpu and not frozen else 0
    if (join := request.training.get("join", 1)) > 1:
        best = 2 * 4 * parameters * join**2
    return TrainingMemory(
        ranks=request.ranks,
        process=process + (soft_targets if on_cpu else 0),
        state=state // state_shards + (size * frozen + wide) // shards + size * others,
        gradients=4 * trained // state_shards,
        gathered=gathered,
        casts=casts,
        backward=backward,
        update=update // shards,
        sums=min(4 * trained, MAX_SUM_BYTES) if request.ranks > 1 and state_shards == 1 else 0,
        per_sequence=longest * activation_bytes(machine, config, checkpointed=checkpointed),
        evaluation=longest * evaluation_bytes(machine, config, checkpointed=checkpointed),
        logits=(1 if config.labels else longest) * logit_bytes * config.outputs,
        max_logits=logit_bytes * max_logits(machine.device, bool(frozen)) + (1 + losses) * output,
        copies=state // state_shards if on_cpu else 0,
        base_loading=request.base_loading_bytes if on_cpu else 0,
        best=best,
    )


def blocks(config: ModelConfig) -> int:
    """The number of layers of all stacks."""
    return config.layers + (config.encoder_layers or 0)


def element_size(machine: Machine) -> int:
    """Bytes per number in the number format of the computation."""
    return 4 if machine.dtype == "fp32" else 2


def adapter_parameters(config: ModelConfig, adapter: AdapterConfig) -> int:
    """The parameters of an adapter of the base model; an upper limit with a shared B."""
    if adapter.kind == "bottleneck":
        return len(adapter.targets) * blocks(config) * (2 * config.width * adapter.rank + adapter.rank + config.width)
    return sum(
        layers * adapter.rank * sum(shape)
        for name, (shape, layers) in layer_matrices(config).items()
        if name.removesuffix(".weight").rpartition(".")[2] in adapter.targets
    )


def activation_bytes(machine: Machine, config: ModelConfig, *, checkpointed: bool = False) -> int:
    """Bytes per token of the activations that the layers store for the backward pass, and of their gradients.

    With `checkpointed`, all layers store their inputs, and only one layer at a time stores its other activations.
    """
    layers, layer = layers_per_token(config), layer_bytes(machine, config)
    if checkpointed:
        return round(4 * layers * config.width + recipes.CHECKPOINTED_LAYERS * layer)
    return round((layers + recipes.EXTRA_LAYERS) * layer)


def layer_bytes(machine: Machine, config: ModelConfig) -> int:
    """Bytes per token that a layer stores for the backward pass: see the comments.

    Norms and the residual stream are fp32; the inputs and outputs of matrix products have the format of the
    computation. In 16 bits, the router and each product of an expert has a copy of its input.
    """
    size = element_size(machine)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    gates = 2 if config.activation in GATED_ACTIVATIONS else 1
    experts = config.experts_per_token if config.experts > 1 else 1
    norms = 4 if config.norm_placement == "sandwich" else 2
    inputs = 2 + gates if config.experts > 1 and size < 4 else 2  # of attention, and of the feed-forward layer
    numbers = inputs * config.width
    numbers += 2 * queries + keys * 3 + 2 * queries  # q, k before and after QK-norm and rotation; v; twice the output
    numbers += 2 * gates * config.ffn_width * experts  # outputs of the products, of the activation, and their product
    numbers += 2 * config.width * (experts if config.experts > 1 else 0)  # copies of each token for its experts
    numbers += 2 * config.width if config.dropout else 0  # dropout masks
    if config.attention_dropout > 0 or config.position == "relative":  # always unfused
        numbers += recipes.STORED_PER_ATTENTION_WEIGHT * config.heads * config.context
    else:
        numbers += config.heads * min(config.context, machine.max_unfused_keys)
    stored = size * numbers + 4 * norms * config.width
    if config.architecture == "encoder-decoder":  # cross-attention, in half of the layers
        stored += size * (3 * config.width + 2 * queries + keys) + 2 * config.width
    return stored


def evaluation_bytes(machine: Machine, config: ModelConfig, *, checkpointed: bool) -> int:
    """Bytes of an evaluation per token of a micro-batch, for the rows of `evaluation_rows`.

    Counted in fp32, although it may be in 16 bits, in which attention has its scores and weights at the same time.
    """
    experts = config.experts_per_token if config.experts > 1 else 1
    scores = config.heads * min(config.context, machine.max_unfused_keys)
    return 4 * evaluation_rows(1, checkpointed) * (4 * config.width + 3 * config.ffn_width * experts + scores)


def evaluation_rows(micro_batch: int, checkpointed: bool) -> int:
    """Rows of an evaluation batch that fit in the memory of a micro-batch: four times as many unless `checkpointed`."""
    return micro_batch if checkpointed else 4 * micro_batch


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a run with this batch size uses the free memory of each process; `None` if that is unknown.

    parallel: ddp or fsdp
    checkpointing: whether activations are computed again in the backward pass
    memory: the estimate for this plan; checkpointed: the estimate if activations are computed again
    """

    parallel: str
    checkpointing: bool
    memory: TrainingMemory
    checkpointed: TrainingMemory
    batch_size: int
    free: int | None

    @property
    def needed(self) -> int:
        """Bytes that must be free for micro-batches of one sequence."""
        return self.memory.needed(1, self.batch_size)

    @property
    def fits(self) -> bool:
        """Whether micro-batches of one sequence fit the part of the free memory that a plan may use."""
        return self.free is None or self.needed <= recipes.MEMORY_SHARE * self.free

    @property
    def shortage(self) -> str | None:
        """A sentence if micro-batches of one sequence need more than the free memory, even if the estimate is too high
        by MEMORY_ERROR; else `None`.
        """
        if self.free is None or self.needed * (1 - recipes.MEMORY_ERROR) <= self.free:
            return None
        each = " in each process" if self.memory.ranks > 1 else ""
        return (
            f"Training needs about {self.needed / 1e9:.1f} GB of memory{each}, {self.memory.fixed / 1e9:.1f} GB of it "
            f"for weights, gradients and optimizer, and {self.free / 1e9:.1f} GB are free."
        )

    def micro_batch(self, wanted: int, notices: list[str]) -> int:
        """Sequences per forward pass: `wanted` or, if memory is short, fewer with a notice in `notices`; at least 1."""
        if self.free is None:
            return wanted
        usable = recipes.MEMORY_SHARE * self.free
        if self.memory.needed(wanted, self.batch_size) <= usable:
            return wanted
        # The largest micro-batch below `wanted` that fits; 0 if none does.
        needed = functools.partial(self.memory.needed, batch_size=self.batch_size)
        fitting = bisect.bisect_right(range(1, wanted), usable, key=needed)
        free = f"{self.free / 1e9:.1f} GB of free memory"
        if fitting < 1:
            notices.append(f"The {free} may not be enough for one sequence; choose a smaller `size` or `context`.")
            return 1
        effective = f"the effective batch is still {self.batch_size}"
        notices.append(f"The micro-batch is {fitting}, which fits the {free}; {effective}.")
        return fitting

    def resumed_micro_batch(self, saved: int, notices: list[str]) -> int:
        """The micro-batch of a save, so that the run continues as if it had not stopped, unless it needs more than the
        free memory even if the estimate is too high by MEMORY_ERROR; else as `micro_batch`.
        """
        needed = self.memory.needed(saved, self.batch_size)
        fits = self.free is None or needed * (1 - recipes.MEMORY_ERROR) <= self.free
        return saved if fits else self.micro_batch(saved, notices)


def plan_memory(
    machine: Machine, request: PlanRequest, config: ModelConfig, parameters: int, batch_size: int
) -> MemoryPlan:
    """Choose replicas or shards of the model, and whether activations are computed again.

    A single process has a replica. Several processes have replicas or shards as the user chose; without a choice,
    replicas if they fit, else shards. Activations are computed again as the user chose; without a choice, only if a
    single sequence does not fit otherwise, dropout is repeatable (`repeats_dropout`) and the needed memory is reduced.

    Raises UsageError if the user's choice is not possible: see `require_repeatable_dropout`.
    """
    chosen: bool | None = request.training.get("checkpoint_activations")
    if chosen:
        require_repeatable_dropout(machine.device, config, request.adapter)
    is_repeatable = repeats_dropout(machine.device, config, request.adapter)
    modes = {"auto": ("ddp", "fsdp")}.get(request.parallel, (request.parallel,))
    if request.ranks == 1 or request.keeps_first_weights:
        modes = ("ddp",)
    for parallel in modes:
        stored, checkpointed = (
            training_memory(machine, request, config, parameters, checkpointed=again, sharded=parallel == "fsdp")
            for again in (False, True)
        )
        plan = MemoryPlan(
            parallel=parallel,
            checkpointing=bool(chosen),
            memory=checkpointed if chosen else stored,
            checkpointed=checkpointed,
            batch_size=batch_size,
            free=machine.free_memory,
        )
        helps = checkpointed.needed(1, batch_size) < plan.needed
        if chosen is None and is_repeatable and helps and not plan.fits:
            plan = replace(plan, checkpointing=True, memory=checkpointed)
        if plan.fits:
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


def describe_remedies(machine: Machine, request: PlanRequest, config: ModelConfig, plan: MemoryPlan) -> str:
    """A sentence with the settings that would reduce the memory of a run that is not resumed."""
    memory, new_model = plan.memory, request.base is None
    remedies = ["a smaller `size`" if new_model else "a smaller model"]
    if plan.needed > memory.fixed:
        remedies.append("a shorter `context`" if new_model else "a shorter `sequence_length`")
    recomputed = plan.checkpointed.needed(1, plan.batch_size)
    if recomputed < plan.needed and repeats_dropout(machine.device, config, request.adapter):
        remedies.append("`checkpoint_activations`")
    if memory.update > memory.backward:
        remedies.append('`optimizer="adamw"`')
    if not new_model and request.adapter is None:
        remedies.append("a LoRA adapter instead of all weights")
    if plan.parallel == "ddp" and request.ranks > 1 and not request.keeps_first_weights:
        remedies.append('`parallel="fsdp"`')
    return f"Choose {' or '.join(remedies)}."


def choose_batch_size(machine: Machine, request: PlanRequest, config: ModelConfig) -> int:
    """Sequences per optimizer step: the user's choice, or a number that leaves the run enough steps.

    Tokens per step are between the limits of TOKENS_PER_STEP for the device; Muon raises the upper one
    (`max_tokens_per_step`). With a budget in steps, they are at the upper limit, and where a text is learned by heart,
    at the lower one. No batch has more than one pass over the data.
    """
    if "batch_size" in request.training:
        batch_size: int = request.training["batch_size"]
        return batch_size
    min_tokens, _ = recipes.TOKENS_PER_STEP[device_class(machine)]
    max_tokens = max_tokens_per_step(machine, config.width, request.optimizer)
    budget = request.effective_budget
    if request.data.by_heart:
        tokens = min_tokens
    elif budget.time is not None:
        steps = recipes.MUON_TARGET_STEPS if request.optimizer in MUON_OPTIMIZERS else recipes.TARGET_STEPS
        optimizer_seconds = training_step_seconds(machine, config, 0, request.optimizer)
        speed = training_speed(machine, config, request.mean_length(config))
        tokens = int((budget.time / steps - optimizer_seconds) * speed)
    elif budget.epochs is not None:
        tokens = int(budget.epochs * request.data.train_tokens / recipes.TARGET_STEPS)
    else:
        tokens = max_tokens
    rows = request.rows(config)
    sequences = min(min(max(tokens, min_tokens), max_tokens) / rows.tokens, rows.count)
    return max(1, int(min(sequences, rows.count / request.sizes.min_steps_per_epoch)))


def max_tokens_per_step(machine: Machine, width: int, optimizer: str) -> int:
    """The upper limit of tokens per step for a model of this width."""
    _, max_tokens = recipes.TOKENS_PER_STEP[device_class(machine)]
    return max(max_tokens, recipes.MUON_TOKENS_PER_WIDTH * width) if optimizer in MUON_OPTIMIZERS else max_tokens
