"""What a model costs, before it is built: parameters, operations, tokens a second on a machine, and memory."""

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tinylm.config import ModelConfig, RuntimeConfig
from tinylm.device import DTYPES, choose_device, choose_training_dtype, describe_device
from tinylm.model.attention import FEW_KEYS
from tinylm.model.build import build_empty_model, count_parameters
from tinylm.model.linear import linear

LAYER_CORE_SECONDS = 9e-6  # a token, on one core: measured on two of an AMD EPYC, for widths from 96 to 384
LAYER_GPU_SECONDS = 5e-8


@dataclass(frozen=True)
class Machine:
    """What training runs on, and how fast it multiplies matrices in the chosen format, in FLOP/s."""

    runtime: RuntimeConfig
    reasons: str
    flops: float


def probe_machine(device: str, dtype: str) -> Machine:
    """Choose device and number format, and time matrix products: half a second at most."""
    chosen_device = choose_device(device)
    product_speed = functools.cache(functools.partial(_matmul_flops, chosen_device.value))
    chosen_dtype = choose_training_dtype(dtype, chosen_device.value, product_speed)
    runtime = RuntimeConfig(
        device=chosen_device.value, dtype=chosen_dtype.value, compile=False, threads=torch.get_num_threads()
    )
    reasons = (
        f"{describe_device(chosen_device.value)}: {chosen_device.reason}; {chosen_dtype.value}: {chosen_dtype.reason}"
    )
    return Machine(runtime, reasons, product_speed(chosen_dtype.value))


def _matmul_flops(device: str, dtype: str, rows: int = 2048, width: int = 512, seconds: float = 0.15) -> float:
    x = torch.ones(rows, width, device=device, dtype=DTYPES[dtype])
    w = torch.ones(width, width, device=device, dtype=DTYPES[dtype])

    @torch.no_grad()
    def multiply(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            y = linear(x, w)
        y[0, 0].item()  # waits for the device
        return time.perf_counter() - begun

    multiply(2)
    fastest = min(multiply(4) for _ in range(max(2, int(seconds / max(multiply(4), 1e-6) / 2))))
    return 4 * 2 * rows * width * width / fastest


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
