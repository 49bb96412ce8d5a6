"""The estimated peak memory of a training run (decision 030)."""

from dataclasses import dataclass

from tinylm.errors import UsageError
from tinylm.machine import Machine
from tinylm.model_config import GATED_ACTIVATIONS, ModelConfig
from tinylm.objectives.loss import MAX_FROZEN_LOGITS, MAX_LOGITS
from tinylm.planning import recipes
from tinylm.planning.cost import device_class, layer_matrices, layers_per_token
from tinylm.planning.plan_request import PlanRequest
from tinylm.run_config import AdapterConfig
from tinylm.training_config import MUON_OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes of a training run.

    process: of the process before it trains; not part of what has to be free. Zero on a GPU.
    state: weights, moments of the optimizer, averaged weights. gradients: of all weights that are trained.
    casts: weights in the number format of the computation. backward: beside the gradients, when the last one is
        computed. update: the same of the optimizer during its step.
    per_sequence: activations per sequence of a micro-batch. evaluation: the same in an evaluation.
    logits, max_logits: per sequence, and in total at most.
    """

    process: int = 0
    state: int
    gradients: int
    casts: int = 0
    backward: int = 0
    update: int = 0
    per_sequence: int
    evaluation: int = 0
    logits: int = 0
    max_logits: int = 0

    def needed(self, micro_batch: int, batch_size: int) -> int:
        """Bytes beside those of the process, for micro-batches of a batch: the largest of four moments.

        They are the end of the forward pass (with the gradients of earlier micro-batches), the end of the backward
        pass, the optimizer step, and an evaluation.
        """
        forward = self.casts + micro_batch * self.per_sequence + min(micro_batch * self.logits, self.max_logits)
        if micro_batch < batch_size:
            forward += self.gradients
        return max(self.fixed, self.state + max(forward, micro_batch * self.evaluation))

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the number of sequences."""
        return self.state + self.gradients + max(self.backward, self.update)

    def total(self, micro_batch: int, batch_size: int) -> int:
        """Peak bytes of the process."""
        return self.process + self.needed(micro_batch, batch_size)


def training_memory(
    machine: Machine, request: PlanRequest, config: ModelConfig, parameters: int, *, checkpointed: bool
) -> TrainingMemory:
    """The memory of training a model with this number of parameters on sequences of the maximum length.

    checkpointed: whether activations are computed again in the backward pass
    """
    longest = config.context
    if request.chat is not None:
        longest = request.chat_rows(config).width
    if request.pair_contexts is not None:
        longest = 2 * min(int(request.pair_contexts.train.max()), config.context)  # source and target
    size = element_size(machine)
    in_layers = sum(shape.numel() * layers for shape, layers in layer_matrices(config).values())
    trained = parameters if request.adapter is None else adapter_parameters(config, request)
    frozen = parameters if request.adapter is not None else 0
    moments, update = 8 * trained, 0  # fp32: two moments of Adam
    if request.optimizer in MUON_OPTIMIZERS and request.adapter is None:
        moments -= 4 * in_layers
        if request.optimizer == "normuon":
            moments += 4 * sum(shape[0] * layers for shape, layers in layer_matrices(config).values())
        update = round((4 + recipes.MUON_COPIES * size) * in_layers)
    average = 4 * trained if request.training.get("average") else 0
    process = recipes.PROCESS_BYTES[device_class(machine)]
    if checkpointed and process:
        process += recipes.COMPILER_BYTES
    casts = 0 if size == 4 else size * trained
    output = 0 if frozen else 4 * config.width * config.vocab_size  # bytes of a gradient of the output layer
    return TrainingMemory(
        process=process,
        state=4 * trained + size * frozen + moments + average,
        gradients=4 * trained,
        casts=casts,
        # The allocator does not reuse the memory of the casts, which are smaller than gradients. The gradient of a tied
        # embedding is the sum of two.
        backward=casts + (output if config.tie else 0),
        update=update,
        per_sequence=longest * activation_bytes(machine, config, checkpointed=checkpointed),
        evaluation=longest * evaluation_bytes(config, checkpointed=checkpointed),
        logits=longest * recipes.LOGIT_BYTES * config.vocab_size,
        max_logits=recipes.LOGIT_BYTES * (MAX_FROZEN_LOGITS if frozen else MAX_LOGITS) + 2 * output,
    )


def element_size(machine: Machine) -> int:
    """Bytes of a number in the format of the computation."""
    return 4 if machine.dtype == "fp32" else 2


def adapter_parameters(config: ModelConfig, request: PlanRequest) -> int:
    """The parameters of an adapter of the base model; an upper limit with a shared B."""
    adapter = request.adapter
    assert adapter is not None
    if adapter.kind == "bottleneck":
        sublayers = len(adapter.targets) * (config.layers + (config.encoder_layers or 0))
        return sublayers * (2 * config.width * adapter.rank + adapter.rank + config.width)
    return sum(
        layers * adapter.rank * sum(shape)
        for name, (shape, layers) in layer_matrices(config).items()
        if name.removesuffix(".weight").rpartition(".")[2] in adapter.targets
    )


def activation_bytes(machine: Machine, config: ModelConfig, *, checkpointed: bool = False) -> int:
    """Bytes per token that the layers store for the backward pass, and of its gradients.

    With `checkpointed`, layers store their inputs, and one of them at a time the rest.
    """
    layers, layer = layers_per_token(config), layer_bytes(machine, config)
    if checkpointed:
        return round(4 * layers * config.width + recipes.CHECKPOINTED_LAYERS * layer)
    return round((layers + recipes.EXTRA_LAYERS) * layer)


def layer_bytes(machine: Machine, config: ModelConfig) -> int:
    """Bytes per token that a layer stores for the backward pass: see the comments.

    Norms and the residual stream are fp32; the inputs and outputs of matrix products have the format of the
    computation. Autocast converts the input of each product by itself.
    """
    size = element_size(machine)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    gates = 2 if config.activation in GATED_ACTIVATIONS else 1
    experts = config.experts_per_token if config.experts > 1 else 1
    norms = 4 if config.norm_placement == "sandwich" else 2
    numbers = (3 + gates) * config.width if size < 4 else 2 * config.width  # inputs of the products
    numbers += 2 * queries + keys * 3 + 2 * queries  # before and after QK-norm and rotation; values, and the output
    numbers += 2 * gates * config.ffn_width * experts  # outputs of the products, of the activation, and their product
    numbers += 2 * config.width * (experts if config.experts > 1 else 0)  # copies of each token for its experts
    numbers += 2 * config.width if config.dropout else 0  # masks
    if config.attention_dropout > 0 or config.position == "relative":  # always unfused
        numbers += recipes.STORED_PER_ATTENTION_WEIGHT * config.heads * config.context
    else:
        numbers += config.heads * min(config.context, machine.max_unfused_keys)
    stored = size * numbers + 4 * norms * config.width
    if config.architecture == "encoder-decoder":  # cross-attention, in half of the layers
        stored += size * (3 * config.width + 2 * queries + keys) + 2 * config.width
    return stored


def evaluation_bytes(config: ModelConfig, *, checkpointed: bool) -> int:
    """Bytes per token of a micro-batch in an evaluation, which is in fp32 and has more rows (`evaluation_rows`)."""
    experts = config.experts_per_token if config.experts > 1 else 1
    return 4 * evaluation_rows(1, checkpointed) * (4 * config.width + 3 * config.ffn_width * experts)


def evaluation_rows(micro_batch: int, checkpointed: bool) -> int:
    """Rows of an evaluation batch that fit in the memory of training. Without a backward pass, four times as many."""
    return micro_batch if checkpointed else 4 * micro_batch


def repeats_dropout(device: str, config: ModelConfig, adapter: AdapterConfig | None) -> bool:
    """Whether a second pass of a block can draw the dropout masks of the first one.

    `torch.utils.checkpoint` restores the random number generators of the CPU and of CUDA, but not that of Apple GPUs.
    """
    rates = (config.dropout, config.attention_dropout, adapter.dropout if adapter is not None else 0.0)
    return device != "mps" or not any(rates)


def require_repeatable_dropout(device: str, config: ModelConfig, adapter: AdapterConfig | None) -> None:
    """Raise UsageError if activations cannot be computed again: see `repeats_dropout`."""
    if not repeats_dropout(device, config, adapter):
        raise UsageError(
            "`checkpoint_activations` cannot be combined with dropout on Apple GPUs; set `dropout` and "
            "`attention_dropout` to 0, or leave it out."
        )


def choose_checkpointing(
    machine: Machine,
    request: PlanRequest,
    config: ModelConfig,
    plain: TrainingMemory,
    checkpointed: TrainingMemory,
    batch_size: int,
) -> bool:
    """Whether to compute activations again: the user's choice, or if a single sequence does not fit otherwise.

    Raises UsageError if the user's choice is not possible.
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


def describe_shortage(
    machine: Machine,
    request: PlanRequest,
    config: ModelConfig,
    memory: TrainingMemory,
    checkpointed: TrainingMemory,
    batch_size: int,
) -> str | None:
    """What to change if micro-batches of one sequence need more memory than is free, beyond the estimate's error.

    checkpointed: the memory with checkpointed activations
    """
    free, needed = machine.free_memory, memory.needed(1, batch_size)
    if free is None or needed * (1 - recipes.MEMORY_ERROR) <= free:
        return None
    new = request.base is None
    remedies = ["a smaller `size`" if new else "a smaller model"]
    if needed > memory.fixed:
        remedies.append("a shorter `context`" if new else "a shorter `sequence_length`")
    if checkpointed.needed(1, batch_size) < needed and repeats_dropout(machine.device, config, request.adapter):
        remedies.append("`checkpoint_activations`")
    if memory.update > memory.backward:
        remedies.append('`optimizer="adamw"`')
    if not new and request.adapter is None:
        remedies.append("a LoRA adapter instead of all weights")
    return (
        f"Training needs about {needed / 1e9:.1f} GB of memory, {memory.fixed / 1e9:.1f} GB of it for weights, "
        f"gradients and optimizer, and {free / 1e9:.1f} GB are free. Choose {' or '.join(remedies)}."
    )
