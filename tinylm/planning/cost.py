"""The cost of training, estimated from the configuration of a model: parameters, FLOPs, tokens per second."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tinylm.config.model import ModelConfig
from tinylm.config.training import MUON_OPTIMIZERS
from tinylm.machine.measure import Machine, probe_config
from tinylm.planning import recipes
from tinylm.transformer.build import build_empty_model


@functools.cache
def matrix_parameters(config: ModelConfig) -> int:
    """Parameters of the matrices that each token is multiplied by, the output layer included.

    Not counted: embeddings (looked up), vectors (gains and biases), and experts that a token is not routed to. In an
    encoder-decoder, both stacks are counted for every token, which is an overestimate.
    """
    total = config.width * config.outputs
    for name, (shape, layers) in layer_matrices(config).items():
        count = shape.numel()
        if ".experts." in name:
            count = count * config.experts_per_token // config.experts
        total += layers * count
    return total


@functools.cache
def layer_matrices(config: ModelConfig) -> Mapping[str, tuple[torch.Size, int]]:
    """The matrices of the first layer of each stack, by name: the shape, and the number of layers of the stack."""
    return {name: (shape, layers) for name, shape, layers in _layer_parameters(config) if len(shape) == 2}


def _layer_parameters(config: ModelConfig) -> Iterator[tuple[str, torch.Size, int]]:
    """Name and shape of each parameter of the first layer of each stack, and the number of layers of that stack.

    All layers of a stack have the same shapes, so only one is built; 1,000 layers would take seconds.
    """
    encoder_layers = None if config.encoder_layers is None else 1
    no_windows: dict[str, Any] = {"local_window": None, "local_layers": (), "local_rope_theta": None}
    first = replace(config, layers=1, encoder_layers=encoder_layers, **no_windows)
    for name, parameter in build_empty_model(first).named_parameters():
        if "layers." in name:
            in_encoder = name.startswith("encoder.")
            yield name, parameter.shape, config.encoder_layers or 1 if in_encoder else config.layers


@functools.cache
def block_parameters(config: ModelConfig) -> int:
    """The number of parameters of all layers, without embeddings, output layer and final norms."""
    return sum(shape.numel() * layers for _, shape, layers in _layer_parameters(config))


def training_flops(config: ModelConfig, length: float | None = None) -> float:
    """FLOPs per token of the forward and the backward pass (Kaplan et al. 2020, section 2.1).

    6 per matrix parameter, and 6 * layers * length * (heads * head_dim) for causal attention, in which a query
    attends to half of the sequence on average.

    length: mean tokens per sequence; `None` for the context
    """
    length = config.context if length is None else length
    return 6 * matrix_parameters(config) + 6 * layers_per_token(config) * length * config.heads * config.head_dim


@functools.cache
def muon_flops(config: ModelConfig) -> int:
    """FLOPs of an optimizer step of Muon: five Newton-Schulz iterations per matrix that it trains, R x C with R <= C.

    An iteration multiplies R x C by C x R, R x R by R x R, and R x R by R x C (Jordan et al. 2024).
    """
    total = 0
    for name, shape, layers in _layer_parameters(config):
        if name.endswith(".weight") and len(shape) == 2 and ".router." not in name:
            rows, columns = sorted(shape)
            total += layers * 5 * 2 * (2 * rows * rows * columns + rows**3)
    return total


def training_speed(machine: Machine, config: ModelConfig, length: float | None = None) -> float:
    """Expected tokens per second of the forward and the backward pass.

    The time per token is that of matrix multiplication plus a constant time per layer.

    length: mean tokens per sequence; `None` for the context
    """
    matmul_seconds = training_flops(config, length) / _model_matmul_rate(machine)
    return 1 / (matmul_seconds + layers_per_token(config) * _other_seconds(machine))


def _other_seconds(machine: Machine) -> float:
    """Expected seconds per token and layer besides matrix multiplication."""
    if machine.layer_seconds is None or not machine.matmul_rate:
        seconds = recipes.OTHER_SECONDS[device_class(machine)]
        return seconds / machine.threads if machine.device == "cpu" else seconds
    measured = machine.layer_seconds / machine.threads
    probe = probe_config()
    matmul_seconds = training_flops(probe) / probe.layers / _model_matmul_rate(machine)
    return max(measured - matmul_seconds, recipes.MIN_OTHER_SHARE * measured)


def training_step_seconds(
    machine: Machine, config: ModelConfig, tokens: float, optimizer: str, length: float | None = None
) -> float:
    """Expected seconds of an optimizer step with this number of tokens, including the matrix multiplication of Muon.

    length: mean tokens per sequence; `None` for the context
    """
    seconds = tokens / training_speed(machine, config, length)
    return seconds + muon_flops(config) / _model_matmul_rate(machine) if optimizer in MUON_OPTIMIZERS else seconds


def _model_matmul_rate(machine: Machine) -> float:
    """FLOP/s of matrix multiplication at the sizes that occur in a model."""
    return recipes.MATMUL_EFFICIENCY[device_class(machine)] * machine.matmul_rate


def device_class(machine: Machine) -> str:
    """`cpu` or `gpu`: the key of this machine in the tables of recipes.py."""
    return "cpu" if machine.device == "cpu" else "gpu"


def layers_per_token(config: ModelConfig) -> float:
    """Layers that process a token; in an encoder-decoder the mean of both stacks, since each token is in one."""
    return config.layers if config.encoder_layers is None else (config.encoder_layers + config.layers) / 2
