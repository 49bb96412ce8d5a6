"""What a model costs, before it is built: parameters, operations, tokens a second on a machine, and memory."""

import functools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tinylm.config import ModelConfig, RuntimeConfig
from tinylm.device import (
    DTYPES,
    choose_device,
    choose_training_dtype,
    describe_device,
    identify_device,
    must_compare_bf16,
)
from tinylm.machine import Measurement, Reporter
from tinylm.model.attention import FEW_KEYS
from tinylm.model.build import build_empty_model, count_parameters
from tinylm.model.linear import linear

LAYER_CORE_SECONDS = 9e-6  # a token, on one core: measured on two of an AMD EPYC, for widths from 96 to 384
LAYER_GPU_SECONDS = 5e-8
COMPARED = ("fp32", "bf16")
POSSIBLE_RATES = (1e6, 1e18)  # FLOP/s
MEASURING_SECONDS, FEWEST_ROUNDS = 1.0, 5  # of matrix products


@dataclass(frozen=True)
class Machine:
    """What training runs on, and how fast it multiplies matrices in the chosen format, in FLOP/s."""

    runtime: RuntimeConfig
    reasons: str
    flops: float


def choose_machine(device: str, dtype: str, reporter: Reporter) -> Machine:
    """Choose device and number format, with the rate of matrix products from the machine profile.

    Products are timed for a second where the profile does not have them yet, and the reporter receives a note.

    Raises UsageError for a device or format that is not available.
    """
    chosen_device = choose_device(device)

    @functools.cache
    def rates(dtypes: tuple[str, ...]) -> dict[str, float]:
        entry = products_entry(chosen_device.value, dtypes)
        return entry.get(lambda: measure_product_rates(chosen_device.value, dtypes), reporter)

    def rate(dtype: str) -> float:
        together = dtype in COMPARED and must_compare_bf16(chosen_device.value)
        return rates(COMPARED if together else (dtype,))[dtype]

    chosen_dtype = choose_training_dtype(dtype, chosen_device.value, rate)
    flops = coarse(rate(chosen_dtype.value))
    runtime = RuntimeConfig(
        device=chosen_device.value,
        dtype=chosen_dtype.value,
        compile=False,
        threads=torch.get_num_threads(),
        product_rate=flops,
    )
    reasons = (
        f"{describe_device(chosen_device.value)}: {chosen_device.reason}; {chosen_dtype.value}: {chosen_dtype.reason}"
    )
    return Machine(runtime, reasons, flops)


def coarse(rate: float) -> float:
    """The nearest power of 2^(1/4), to four digits: another measurement of the same machine mostly gives the same."""
    return float(f"{2 ** (round(4 * math.log2(rate)) / 4):.4g}")


def products_entry(device: str, dtypes: tuple[str, ...]) -> Measurement:
    """The profile's entry for matrix products: FLOP/s in each format."""
    return Measurement("products", identify_device(device), dict.fromkeys(dtypes, POSSIBLE_RATES))


def measure_product_rates(device: str, dtypes: tuple[str, ...]) -> dict[str, float]:
    """The best of many timings, the formats in turns.

    A CPU's are those of one thread in processor time, times the threads: wall-clock time of several threads is ten
    times as long on a busy machine, and processor time of one is not (decision 020).
    """
    threads = torch.get_num_threads() if device == "cpu" else 1
    best = dict.fromkeys(dtypes, 0.0)
    begun, rounds = time.perf_counter(), 0
    while rounds < FEWEST_ROUNDS or time.perf_counter() - begun < MEASURING_SECONDS:
        for dtype in dtypes:
            best[dtype] = max(best[dtype], threads * _product_rate(device, dtype))
        rounds += 1
    return best


@torch.no_grad()
def _product_rate(device: str, dtype: str, rows: int = 2048, width: int = 512) -> float:
    """FLOP/s in one timing, of some milliseconds on a CPU."""
    x = torch.ones(rows, width, device=device, dtype=DTYPES[dtype])
    w = torch.ones(width, width, device=device, dtype=DTYPES[dtype])
    on_cpu = device == "cpu"
    # The processor time of Windows goes on by 16 ms at a time.
    clock = time.thread_time if on_cpu and sys.platform != "win32" else time.perf_counter
    times, threads = 1 if on_cpu else 4, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        linear(x, w)[0, 0].item()  # waits for the device
        begun = clock()
        for _ in range(times):
            y = linear(x, w)
        y[0, 0].item()
        return times * 2 * rows * width * width / max(clock() - begun, 1e-9)
    finally:
        torch.set_num_threads(threads)


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    return count_parameters(build_empty_model(config))


@functools.cache
def matrix_parameters(config: ModelConfig) -> int:
    """Parameters that multiply every token: all but the embedding, which is looked up, the vectors, and the experts
    that a token is not sent to. Both stacks count for all tokens where there are two, which is more than is done.
    """
    total = config.width * config.vocab_size
    for name, shape, layers in _layer_parameters(config):
        if len(shape) == 2:
            among = ".experts." in name
            numbers = shape.numel()
            total += layers * (numbers * config.experts_per_token // config.experts if among else numbers)
    return total


def _layer_parameters(config: ModelConfig) -> Iterator[tuple[str, torch.Size, int]]:
    """Name and shape of each parameter of the first layer of each stack, and how many layers that stack has.

    All layers of a stack have the same shapes, and building a thousand of them takes seconds.
    """
    encoder_layers = None if config.encoder_layers is None else 1
    first = replace(config, layers=1, encoder_layers=encoder_layers, local_window=None, local_layers=())
    for name, parameter in build_empty_model(first).named_parameters():
        if "layers." in name:
            encoding = name.startswith("encoder.")
            yield name, parameter.shape, config.encoder_layers or 1 if encoding else config.layers


def training_flops(config: ModelConfig) -> float:
    """Forward and backward, a token: 6 a parameter, and the attention's own products (Kaplan et al. 2020)."""
    return 6 * matrix_parameters(config) + 6 * _depth(config) * config.context * config.width


@functools.cache
def muon_flops(config: ModelConfig) -> int:
    """A step of Muon: five rounds for each matrix R x C of a layer, R <= C, of products with RRC, RRR and RRC parts."""
    total = 0
    for name, shape, layers in _layer_parameters(config):
        if name.endswith(".weight") and len(shape) == 2 and ".router." not in name:
            rows, columns = sorted(shape)
            total += layers * 5 * 2 * (2 * rows * rows * columns + rows**3)
    return total


def training_speed(machine: Machine, config: ModelConfig) -> float:
    """Expected tokens a second, forward and backward: matrix products, and what each layer costs besides."""
    cpu = machine.runtime.device == "cpu"
    besides = _depth(config) * (LAYER_CORE_SECONDS / machine.runtime.threads if cpu else LAYER_GPU_SECONDS)
    return 1 / (training_flops(config) / _product_speed(machine) + besides)


def training_step_seconds(machine: Machine, config: ModelConfig, tokens: float, optimizer: str | None) -> float:
    """Expected seconds of a step of so many tokens, the optimizer's products included."""
    seconds = tokens / training_speed(machine, config)
    return seconds + muon_flops(config) / _product_speed(machine) if optimizer == "muon" else seconds


def _product_speed(machine: Machine) -> float:
    """FLOP/s of a model's own matrix products, near the full speed."""
    return (0.75 if machine.runtime.device == "cpu" else 0.35) * machine.flops


def _depth(config: ModelConfig) -> float:
    """The layers that a token passes; the mean of both stacks, where one has the sources and the other the targets."""
    return config.layers if config.encoder_layers is None else (config.encoder_layers + config.layers) / 2


def activation_bytes(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """What the backward pass keeps of one token, generously: hidden vectors, the feed-forward's inside, and logits."""
    at_once = config.experts_per_token if config.experts > 1 else 1
    kept = 20 * config.width + 6 * config.ffn_width * at_once
    # The weights of keys, where attention is written out; they have 16 bits where that is done for speed.
    if config.attention_dropout > 0 or config.position == "relative":
        kept += 4 * config.heads * config.context
    elif (runtime.device, runtime.dtype) == ("cpu", "bf16"):
        kept += config.heads * min(config.context, FEW_KEYS)
    return round(4 * _depth(config) * kept) + 12 * config.vocab_size
