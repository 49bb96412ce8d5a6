"""The estimated memory is at least the memory that training stores, and grows with each dimension of the model."""

from typing import Any

import pytest
import torch

from tests.machines import machine
from tests.planning.planned import planned, planned_pairs
from tests.variants import small
from tinylm.kernels.short_attention import MAX_UNFUSED_KEYS
from tinylm.model.build import build_model
from tinylm.model_config import ModelConfig
from tinylm.planning.memory import TrainingMemory, activation_bytes


def test_unfused_attention_stores_its_weights() -> None:
    unfused, fused = machine(max_unfused_keys=MAX_UNFUSED_KEYS), machine()
    assert activation_bytes(unfused, small()) > activation_bytes(fused, small())
    longest = small(context=MAX_UNFUSED_KEYS)
    assert activation_bytes(unfused, small(context=4096)) == activation_bytes(unfused, longest)


def test_in_an_encoder_decoder_the_layers_of_one_stack_store_a_token() -> None:
    """Sources and targets are assumed to be equally long, so the mean number of layers counts."""

    def two_stacks(encoder_layers: int, layers: int) -> ModelConfig:
        return small(architecture="encoder-decoder", encoder_layers=encoder_layers, layers=layers)

    assert activation_bytes(machine(), two_stacks(6, 2)) == activation_bytes(machine(), two_stacks(4, 4))
    assert activation_bytes(machine(), two_stacks(12, 2)) > 1.5 * activation_bytes(machine(), two_stacks(2, 2))


@pytest.mark.parametrize(
    "larger",
    [{"attention_dropout": 0.1}, {"width": 32}, {"head_dim": 8}, {"layers": 3}, {"vocab_size": 50}, {"ffn_width": 48}],
)
def test_activations_grow_with_attention_dropout_and_each_dimension(larger: dict[str, Any]) -> None:
    assert activation_bytes(machine(), small(**larger)) > activation_bytes(machine(), small())


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"dropout": 0.1},
        {"attention_dropout": 0.1},
        {"position": "relative"},
        {"experts": 4},
        {"norm": "layernorm", "activation": "gelu", "bias": True},
    ],
)
def test_the_estimate_covers_what_torch_stores_for_the_backward_pass(choices: dict[str, Any]) -> None:
    config = small(width=64, ffn_width=192, context=32, layers=3, vocab_size=200, **choices)
    model = build_model(config).train()
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    stored: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        kept.append(tensor)  # so that its address is not reused
        return tensor

    kept: list[torch.Tensor] = []
    ids = torch.randint(config.vocab_size, (4, config.context))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = torch.nn.functional.cross_entropy(model.logits(model.probe(ids).hidden).flatten(0, 1), ids.flatten())
        loss.backward()
    per_token = sum(stored.values()) / ids.numel()
    assert per_token <= activation_bytes(machine(), config) <= 6 * per_token


def test_the_memory_of_a_plan_is_that_of_weights_optimizer_and_one_micro_batch() -> None:
    assert TrainingMemory(100, 7).total(3) == 121
    one, two = (planned(model={"size": "nano"}, training={"batch_size": size}) for size in (1, 2))
    per_sequence = two.memory - one.memory
    assert per_sequence == activation_bytes(machine(), one.model) * one.model.context
    assert one.memory - per_sequence == 16 * one.parameters


def test_the_memory_of_a_pair_is_that_of_a_source_and_a_target_of_maximum_length() -> None:
    one, two = (planned_pairs([10, 20], training={"batch_size": size}) for size in (1, 2))
    assert two.memory - one.memory == activation_bytes(machine(), one.model) * 2 * 20
