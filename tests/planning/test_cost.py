"""Estimated FLOPs equal those that torch counts in the models, and estimated times grow with them."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.machines import machine
from tests.variants import VARIANTS, small
from tinylm.config.presets import PRESETS, make_model_config
from tinylm.config.training import MUON_OPTIMIZERS, Budget, TrainingConfig
from tinylm.machine.measure import probe_config
from tinylm.planning.plan_request import matrix_parameters, muon_flops, training_flops, training_speed
from tinylm.planning.plan_request import training_step_seconds as step_seconds
from tinylm.training.optimizer import build_optimizer
from tinylm.transformer.build import build_model, count_parameters


@pytest.mark.parametrize(
    "choices",
    [
        {"preset": "modern", "kv_heads": 1},
        {"preset": "modern", "head_dim": 50, "tie": False},
        {"preset": "gpt2", "size": "tiny"},
        {"preset": "original"},
    ],
)
def test_training_flops_equal_those_that_torch_counts(choices: dict[str, Any]) -> None:
    """In float64 with attention dropout, so that all operations are torch's own, which FlopCounterMode can count."""
    config = make_model_config(vocab_size=77, **{"size": "nano", "context": 32, "attention_dropout": 0.1, **choices})
    model = build_model(config).double().train()
    ids = torch.randint(config.vocab_size, (2, config.context))
    with FlopCounterMode(display=False) as counter:
        model.logits(model.probe(ids).hidden).sum().backward()
    masked = (
        6 * config.layers * config.context * config.heads * config.head_dim
    )  # unfused attention computes the masked scores as well
    assert training_flops(config) + masked == counter.get_total_flops() / ids.numel()


def test_matrix_parameters_and_parameters_by_part_are_those_of_a_built_model() -> None:
    """Also of Gemma 3, with its head dimension and local layers; of experts, those of each token."""
    dense = [make_model_config(vocab_size=77, preset=preset, size="nano") for preset in PRESETS]
    for config in (*dense, dict(VARIANTS)["gemma 3"]):
        matrices = [p for n, p in build_model(config).named_parameters() if p.dim() == 2 and "position" not in n]
        assert matrix_parameters(config) == sum(matrix.numel() for matrix in matrices)
    for config in (*dense, small(experts=3), small(architecture="encoder-decoder", encoder_layers=1)):
        parts = count_parameters(config)
        assert parts["total"] == sum(parameter.numel() for parameter in build_model(config).parameters())
        assert parts["total"] == sum(number for name, number in parts.items() if name != "total")
    dense, routed = small(ffn_width=48), small(ffn_width=48, experts=4, experts_per_token=1)
    router = routed.layers * routed.width * routed.experts
    assert matrix_parameters(routed) == matrix_parameters(dense) + router


@pytest.mark.parametrize(
    "shape", [{}, {"experts": 3}, {"position": "relative"}, {"architecture": "encoder-decoder", "encoder_layers": 1}]
)
def test_the_flops_of_muon_equal_those_that_torch_counts(shape: dict[str, Any]) -> None:
    config = small(layers=2, width=32, ffn_width=48, heads=4, **shape)
    model = build_model(config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training = TrainingConfig(
        budget=Budget(steps=1), batch_size=1, micro_batch=1, lr=0.1, min_lr=0.0, warmup=0.0, optimizer="muon"
    )
    optimizer = build_optimizer(model, training, "fp32")
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert muon_flops(config) == counter.get_total_flops()


def test_a_step_takes_the_time_of_its_tokens_and_of_the_optimizer() -> None:
    config, on = make_model_config(vocab_size=77, preset="modern", size="small"), machine(matmul_rate=1e12)
    by_adamw = step_seconds(on, config, 4096, "adamw")
    assert by_adamw == 4096 / training_speed(on, config)
    for optimizer in MUON_OPTIMIZERS:
        difference = step_seconds(on, config, 4096, optimizer) - by_adamw
        assert difference == pytest.approx(muon_flops(config) / 1e12 / 0.75)


def test_the_speed_of_the_measured_decoder_is_the_measured_one_and_the_layers_of_both_stacks_count() -> None:
    """With a time per layer and little of it for matrix products, or all of it."""
    config, tokens, threads = probe_config(), 1000, 2
    fast = machine(matmul_rate=1e15, layer_seconds=4e-5, threads=threads)
    assert tokens / training_speed(fast, config) == pytest.approx(tokens * 2 * 4e-5 / threads)
    products = training_flops(config) / (0.75 * 1e10)
    slow = machine(matmul_rate=1e10, layer_seconds=threads * products / 2, threads=threads)
    assert tokens / training_speed(slow, config) == pytest.approx(tokens * 1.1 * products)
    few, many = (small(architecture="encoder-decoder", encoder_layers=number, layers=2) for number in (2, 12))
    assert training_speed(machine(), few) > 1.5 * training_speed(machine(), many)
