"""What is estimated is checked against the models themselves, and against what must grow with what."""

import itertools
import platform
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.machines import FLOPS, machine
from tests.variants import small
from tinylm import cost
from tinylm.config import Budget, ModelConfig, TrainingConfig
from tinylm.cost import (
    COMPARED,
    activation_bytes,
    choose_machine,
    coarse,
    matrix_parameters,
    measure_product_rates,
    muon_flops,
    products_entry,
    training_flops,
    training_speed,
    training_step_seconds,
)
from tinylm.model.attention import FEW_KEYS
from tinylm.model.build import build_model
from tinylm.presets import PRESETS, make_model_config
from tinylm.training.optimizer import build_optimizer

posix_clock = pytest.mark.skipif(sys.platform == "win32", reason="the clock of a thread is too coarse there")


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


class Silent:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    warn = note


def test_a_machine_is_described_with_the_rate_that_the_profile_has() -> None:
    reporter = Silent()
    found = choose_machine("cpu", "fp32", reporter)
    assert (found.runtime.device, found.runtime.dtype, found.runtime.compile) == ("cpu", "fp32", False)
    assert found.runtime.threads == torch.get_num_threads()
    assert found.reasons.startswith("cpu (")
    assert "asked for; fp32: asked for" in found.reasons
    assert found.flops == found.runtime.product_rate == coarse(FLOPS)
    assert reporter.notes == []


@pytest.mark.parametrize("bf16, dtype", [(5e10, "fp32"), (5e11, "bf16")])
def test_the_format_is_the_faster_one_where_capabilities_do_not_tell(
    bf16: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"fp32": 1e11, "bf16": bf16}
    pretend_capabilities(monkeypatch, bf16=True, amx=False)
    products_entry("cpu", COMPARED).write(rates)
    found = choose_machine("cpu", "auto", Silent())
    assert (found.runtime.dtype, found.flops) == (dtype, coarse(rates[dtype]))


@pytest.mark.parametrize("bf16, amx, dtype", [(True, True, "bf16"), (False, False, "fp32")])
def test_where_capabilities_tell_the_format_no_timing_changes_it(
    bf16: bool, amx: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_capabilities(monkeypatch, bf16=bf16, amx=amx)
    for rates in ({"fp32": 1e9, "bf16": 1e12}, {"fp32": 1e12, "bf16": 1e9}):
        for name, rate in rates.items():
            products_entry("cpu", (name,)).write({name: rate})
        assert choose_machine("cpu", "auto", Silent()).runtime.dtype == dtype


def pretend_capabilities(patch: pytest.MonkeyPatch, bf16: bool, amx: bool) -> None:
    patch.setattr(platform, "machine", lambda: "x86_64")
    patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)


def test_products_are_timed_in_turns_and_the_best_of_each_format_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour takes the processor in all rounds but one."""
    timed: list[str] = []

    def rate(device: str, dtype: str) -> float:
        timed.append(dtype)
        return {"fp32": 2e11, "bf16": 4e11}[dtype] / (1 if len(timed) in (5, 6) else 50)

    monkeypatch.setattr(cost, "_product_rate", rate)
    monkeypatch.setattr(cost, "MEASURING_SECONDS", 0.0)
    assert measure_product_rates("cpu", COMPARED) == {"fp32": 2e11, "bf16": 4e11}
    assert timed == ["fp32", "bf16"] * cost.FEWEST_ROUNDS


@posix_clock
def test_a_rate_is_that_of_one_thread_times_the_threads_by_a_clock_that_a_neighbour_does_not_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a clock of the thread that gains 2 ms whenever it is looked at."""
    threads, seen = torch.get_num_threads(), set()

    def clock() -> float:
        seen.add(torch.get_num_threads())
        return next(ticks)

    ticks = (0.002 * i for i in itertools.count())
    monkeypatch.setattr(cost.time, "thread_time", clock)
    monkeypatch.setattr(cost, "MEASURING_SECONDS", 0.0)
    torch.set_num_threads(2)
    try:
        rates = measure_product_rates("cpu", ("fp32",))
    finally:
        torch.set_num_threads(threads)
    assert rates["fp32"] == pytest.approx(2 * 2 * 2048 * 512 * 512 / 0.002)
    assert seen == {1}


@given(st.floats(1e6, 1e18), st.floats(-0.04, 0.04))
def test_a_coarse_rate_is_near_and_mostly_the_same_for_another_measurement(rate: float, error: float) -> None:
    assert 2**-0.126 < coarse(rate) / rate < 2**0.126
    middle = coarse(rate)
    assert coarse(middle * (1 + error)) == middle
