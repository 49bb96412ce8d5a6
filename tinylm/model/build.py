"""From a ModelConfig to a model: the only reader of ModelConfig. Each part is a row in a table."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinylm.config import ModelConfig
from tinylm.model.attention import Attention
from tinylm.model.block import PostNormBlock, PreNormBlock
from tinylm.model.decoder import Decoder
from tinylm.model.feedforward import FeedForward, GatedFeedForward, gelu
from tinylm.model.norm import LayerNorm, RMSNorm
from tinylm.model.position import LearnedPosition, Position, RotaryPosition, SinusoidalPosition

NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}

NORM_EPS = {"rmsnorm": 1e-6, "layernorm": 1e-5}

BLOCKS: dict[str, type[PreNormBlock]] = {"pre": PreNormBlock, "post": PostNormBlock}

POSITIONS: dict[str, Callable[[ModelConfig], Position]] = {
    "rope": lambda config: RotaryPosition(config.context, config.head_width, config.rope_theta),
    "learned": lambda config: LearnedPosition(config.context, config.width),
    "sinusoidal": lambda config: SinusoidalPosition(config.context, config.width),
}

FEEDFORWARDS: dict[str, tuple[type[FeedForward] | type[GatedFeedForward], Callable[[Tensor], Tensor]]] = {
    "swiglu": (GatedFeedForward, F.silu),
    "gelu": (FeedForward, gelu),
    "relu": (FeedForward, F.relu),
}


def build_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """A model with weights drawn from `seed`, whatever state torch's own generator is in."""

    def make_norm(width: int = config.width) -> nn.Module:
        norm = NORMS[config.norm]
        return norm(width, config.norm_gain, config.norm_bias, NORM_EPS[config.norm])

    def make_qk_norm() -> nn.Module:
        return make_norm(config.head_width) if config.qk_norm else nn.Identity()

    def make_attention() -> nn.Module:
        return Attention(
            config.width,
            config.heads,
            config.kv_heads,
            config.bias,
            config.dropout,
            q_norm=make_qk_norm(),
            k_norm=make_qk_norm(),
        )

    def make_feedforward() -> nn.Module:
        kind, activation = FEEDFORWARDS[config.activation]
        return kind(config.width, config.ffn_width, config.bias, activation)

    def make_layer() -> nn.Module:
        block = BLOCKS[config.norm_placement]
        return block(make_attention(), make_feedforward(), make_norm, config.dropout)

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Decoder(
            nn.Embedding(config.vocab_size, config.width),
            POSITIONS[config.position](config),
            [make_layer() for _ in range(config.layers)],
            make_norm() if config.norm_placement == "pre" else nn.Identity(),
            None if config.tie else nn.Linear(config.width, config.vocab_size, bias=False),
            context=config.context,
            n_kv_heads=config.kv_heads,
            head_width=config.head_width,
            embedding_scale=math.sqrt(config.width) if config.scale_embedding else 1.0,
            dropout=config.dropout,
        )
        INITIALISATIONS[config.initialisation](model, config)
    return model


def build_empty_model(config: ModelConfig) -> Decoder:
    """A model whose parameters have shapes but no storage: to count them, or to assign saved weights to them."""
    with torch.device("meta"), _NoRandomNumbers():
        return build_model(config)


class _NoRandomNumbers(TorchFunctionMode):
    """Leaves tensors as they are where they would be filled at random.

    torch draws for tensors without storage through its compiler, which takes half a second to import.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_) or getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _matrices(model: Decoder) -> list[tuple[str, nn.Linear]]:
    """Every linear layer by name, with its bias set to zero; a bias starts at zero in every scheme."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for _, linear in found:
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
    return found


def _initialise_gpt2(model: Decoder, config: ModelConfig) -> None:
    """N(0, 0.02), and 0.02 / sqrt(2 layers) where a sublayer joins the residual stream (Radford et al. 2019)."""
    for name, linear in _matrices(model):
        joins_residual = name.endswith(("o_proj", "down_proj"))
        nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers) if joins_residual else 0.02)
    nn.init.normal_(model.embedding.weight, std=0.02)
    if isinstance(model.position, LearnedPosition):
        nn.init.normal_(model.position.weight, std=0.01)


def _initialise_original(model: Decoder, config: ModelConfig) -> None:
    """Glorot uniform for matrices; N(0, 1/sqrt(D)) for the embedding, scaled back to 1 by sqrt(D) (tensor2tensor)."""
    for _, linear in _matrices(model):
        nn.init.xavier_uniform_(linear.weight)
    nn.init.normal_(model.embedding.weight, std=config.width**-0.5)
    if isinstance(model.position, LearnedPosition):
        nn.init.normal_(model.position.weight, std=config.width**-0.5)


def _initialise_modern(model: Decoder, config: ModelConfig) -> None:
    """N(0, 0.02) as Qwen3 has it, but zero where a sublayer joins the residual stream: a block starts as the identity.

    Zero-initialised output projections: Zhang et al. 2019 (Fixup), Yang et al. 2022 (muP, section D.2).
    """
    for name, linear in _matrices(model):
        if name.endswith(("o_proj", "down_proj")):
            nn.init.zeros_(linear.weight)
        else:
            nn.init.normal_(linear.weight, std=0.02)
    nn.init.normal_(model.embedding.weight, std=0.02)
    if isinstance(model.position, LearnedPosition):
        nn.init.normal_(model.position.weight, std=0.02)


INITIALISATIONS: dict[str, Callable[[Decoder, ModelConfig], None]] = {
    "modern": _initialise_modern,
    "gpt2": _initialise_gpt2,
    "original": _initialise_original,
}


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Parameters by part: embedding, position, attention, feedforward, norms, output, and their total."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        part = words[2] if words[0] == "layers" else words[0]
        part = "norms" if "norm" in part else part
        parts[part] = parts.get(part, 0) + parameter.numel()
    return {**parts, "total": sum(parts.values())}
