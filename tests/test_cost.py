"""What is estimated is checked against the models themselves, and against what must grow with what."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.machines import machine
from tests.variants import small
from tinylm.config import Budget, ModelConfig, TrainingConfig
from tinylm.cost import (
    activation_bytes,
    matrix_parameters,
    muon_flops,
    probe_machine,
    training_flops,
    training_speed,
    training_step_seconds,
)
from tinylm.model.attention import FEW_KEYS
from tinylm.model.build import build_model
from tinylm.presets import PRESETS, make_model_config
from tinylm.training.optimizer import build_optimizer


def test_the_matrices_counted_are_those_of_the_model() -> None:
    for preset in PRESETS:
        config = make_model_config(vocab_size=77, preset=preset, size="nano")
        model = build_model(config)
        matrices = sum(v.numel() for n, v in model.named_parameters() if v.dim() == 2 and n.startswith("layers."))
        assert matrix_parameters(config) == matrices + model.embedding.weight.numel()


def test_training_costs_six_flops_a_parameter_and_six_a_key_of_every_layer() -> None:
    config = small(context=10, layers=3)
    assert training_flops(config) == 6 * matrix_parameters(config) + 6 * 3 * 10 * 16


@pytest.mark.parametrize(
    "shape", [{}, {"experts": 3}, {"position": "relative"}, {"architecture": "encoder-decoder", "encoder_layers": 1}]
)
def test_muon_costs_what_torch_counts_of_its_step(shape: dict[str, Any]) -> None:
    config = small(layers=2, width=32, ffn_width=48, heads=4, **shape)
    model = build_model(config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training = TrainingConfig(
        budget=Budget(steps=1), batch_size=1, micro_batch=1, lr=0.1, min_lr=0.0, warmup=0.0, optimizer="muon"
    )
    optimizer = build_optimizer(model, training)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert muon_flops(config) == counter.get_total_flops()


def test_a_step_takes_the_time_of_its_tokens_and_of_the_optimizer() -> None:
    config, on = make_model_config(vocab_size=77, preset="modern", size="small"), machine(flops=1e12)
    plain, by_muon = (training_step_seconds(on, config, 4096, optimizer) for optimizer in ("adamw", "muon"))
    assert plain == 4096 / training_speed(on, config)
    assert by_muon - plain == pytest.approx(muon_flops(config) / 1e12 / 0.75)


@given(st.floats(1e8, 1e15), st.floats(1.1, 10))
def test_a_faster_machine_is_never_expected_to_be_slower(flops: float, times: float) -> None:
    config = small()
    slower, faster = (training_speed(machine(flops=f), config) for f in (flops, flops * times))
    assert 0 < slower <= faster
    assert training_speed(machine(flops=flops), config) > training_speed(machine(flops=flops), small(layers=4))


def test_attention_that_is_written_out_keeps_its_weights() -> None:
    """A CPU writes it out in bf16."""
    sixteen, plain, gpu = (machine(d, dtype=t).runtime for d, t in (("cpu", "bf16"), ("cpu", "fp32"), ("cuda", "bf16")))
    assert activation_bytes(small(), sixteen) > activation_bytes(small(), plain)
    assert activation_bytes(small(), gpu) == activation_bytes(small(), plain)
    assert activation_bytes(small(context=4096), sixteen) == activation_bytes(small(context=FEW_KEYS), sixteen)


def test_of_two_stacks_each_passes_its_own_side_of_a_pair() -> None:
    """Sources and targets are about as long, so that it is the layers of both together that count."""

    def both(encoder_layers: int, layers: int) -> ModelConfig:
        return small(architecture="encoder-decoder", encoder_layers=encoder_layers, layers=layers)

    runtime = machine().runtime
    assert activation_bytes(both(6, 2), runtime) == activation_bytes(both(4, 4), runtime)
    assert activation_bytes(both(12, 2), runtime) > 1.5 * activation_bytes(both(2, 2), runtime)
    speeds = [training_speed(machine(), both(layers, 2)) for layers in (2, 12)]
    assert speeds[0] > 1.5 * speeds[1]


def test_attention_dropout_and_width_take_memory() -> None:
    plain = activation_bytes(small(), machine().runtime)
    for larger in (
        small(attention_dropout=0.1),
        small(width=32),
        small(layers=3),
        small(vocab_size=50),
        small(ffn_width=48),
    ):
        assert activation_bytes(larger, machine().runtime) > plain


def test_the_machine_is_probed_in_a_moment() -> None:
    probed = probe_machine("cpu", "fp32")
    assert (probed.runtime.device, probed.runtime.dtype, probed.runtime.compile) == ("cpu", "fp32", False)
    assert probed.reasons.startswith("cpu (")
    assert "asked for; fp32: asked for" in probed.reasons
    assert 1e7 < probed.flops < 1e16


@pytest.mark.parametrize("bf16, dtype", [(5e10, "fp32"), (5e11, "bf16")])
def test_the_format_is_the_one_that_the_probe_finds_faster(
    bf16: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"fp32": 1e11, "bf16": bf16}
    timed: list[str] = []

    def time(device: str, dtype: str) -> float:
        timed.append(dtype)
        return speeds[dtype]

    monkeypatch.setattr("tinylm.cost._matmul_flops", time)
    monkeypatch.setattr("tinylm.device.computes_bf16", lambda device: True)
    probed = probe_machine("cpu", "auto")
    assert (probed.runtime.dtype, probed.flops) == (dtype, speeds[dtype])
    assert sorted(timed) == ["bf16", "fp32"]
