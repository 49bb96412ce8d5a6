"""An upper estimate of the memory of a training run."""

from dataclasses import dataclass

from tinylm.machine import Machine
from tinylm.model_config import ModelConfig
from tinylm.planning import recipes
from tinylm.planning.cost import layers_per_token
from tinylm.planning.plan_request import PlanRequest


@dataclass(frozen=True)
class TrainingMemory:
    """fixed: bytes of weights, gradients and optimizer state. per_sequence: bytes per sequence of a micro-batch."""

    fixed: int
    per_sequence: int

    def total(self, micro_batch: int) -> int:
        """Bytes for a micro-batch of this number of sequences."""
        return self.fixed + micro_batch * self.per_sequence


def training_memory(machine: Machine, request: PlanRequest, config: ModelConfig, parameters: int) -> TrainingMemory:
    """The memory of training a model with this number of parameters on sequences of the maximum length."""
    longest = config.context
    if request.chat is not None:
        longest = request.chat_rows(config).width
    if request.pair_contexts is not None:
        longest = 2 * min(int(request.pair_contexts.train.max()), config.context)  # source and target
    return TrainingMemory(recipes.PARAMETER_BYTES * parameters, longest * activation_bytes(machine, config))


def activation_bytes(machine: Machine, config: ModelConfig) -> int:
    """Bytes per token that the forward pass stores for the backward pass: hidden vectors, attention weights, logits."""
    experts = config.experts_per_token if config.experts > 1 else 1
    stored = recipes.ACTIVATIONS_PER_WIDTH * max(config.width, config.heads * config.head_dim)
    stored += recipes.ACTIVATIONS_PER_FFN_WIDTH * config.ffn_width * experts
    if config.attention_dropout > 0 or config.position == "relative":  # always unfused
        stored += recipes.STORED_PER_ATTENTION_WEIGHT * config.heads * config.context
    else:
        keys = min(config.context, machine.max_unfused_keys)
        stored += recipes.STORED_PER_SHORT_ATTENTION_WEIGHT * config.heads * keys
    return round(4 * layers_per_token(config) * stored) + recipes.LOGIT_BYTES * config.vocab_size
