"""From a ModelConfig to a model: the only reader of ModelConfig. Each part is a row in a table."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinylm.config import ModelConfig
from tinylm.model.attention import Attention, CrossAttention, DotProduct, RelativeDotProduct
from tinylm.model.block import PostNormBlock, PostNormChain, PreNormBlock, PreNormChain
from tinylm.model.decoder import Decoder
from tinylm.model.encoder import Encoder
from tinylm.model.encoder_decoder import EncoderDecoder
from tinylm.model.feedforward import FeedForward, GatedFeedForward, gelu
from tinylm.model.linear import Linear
from tinylm.model.moe import MergedExperts, RoutedExperts
from tinylm.model.norm import LayerNorm, RMSNorm
from tinylm.model.position import LearnedPosition, Position, RotaryPosition, SinusoidalPosition
from tinylm.model.stack import Stack, Transformer

NORMS: dict[str, Callable[[ModelConfig, int], nn.Module]] = {
    "rmsnorm": lambda config, width: RMSNorm(width, config.norm_gain, config.norm_bias, eps=1e-6),
    "layernorm": lambda config, width: LayerNorm(width, config.norm_gain, config.norm_bias, eps=1e-5),
    "none": lambda config, width: nn.Identity(),
}

# By where norms stand, and whether there are residual connections.
BLOCKS: dict[tuple[str, bool], type[PreNormBlock]] = {
    ("pre", True): PreNormBlock,
    ("post", True): PostNormBlock,
    ("pre", False): PreNormChain,
    ("post", False): PostNormChain,
}

POSITIONS: dict[str, Callable[[ModelConfig], Position]] = {
    "rope": lambda config: RotaryPosition(config.context, config.head_width, config.rope_theta),
    "learned": lambda config: LearnedPosition(config.context, config.width),
    "sinusoidal": lambda config: SinusoidalPosition(config.context, config.width),
    "relative": lambda config: Position(),  # it enters attention: see CORES
    "none": lambda config: Position(),
}

# What heads meet in, where it is not the scaled dot product.
CORES: dict[str, Callable[[ModelConfig], RelativeDotProduct]] = {
    "relative": lambda config: RelativeDotProduct(
        config.head_width, config.relative_clip, config.attention_dropout, attention_scale(config)
    ),
}


def attention_scale(config: ModelConfig) -> float | None:
    """`None` is 1 / sqrt(W)."""
    return None if config.attention_scale else 1.0


FEEDFORWARDS: dict[str, tuple[type[FeedForward] | type[GatedFeedForward], Callable[[Tensor], Tensor]]] = {
    "swiglu": (GatedFeedForward, F.silu),
    "gelu": (FeedForward, gelu),
    "relu": (FeedForward, F.relu),
}

EXPERTS: dict[str, type[RoutedExperts]] = {"route": RoutedExperts, "merge": MergedExperts}


def build_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model with weights drawn from `seed`, whatever state torch's own generator is in."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = ARCHITECTURES[config.architecture](_Parts(config))
        INITIALISATIONS[config.initialisation](model, config)
    return model


class _Parts:
    """Makes the parts of one model."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def norm(self, width: int | None = None) -> nn.Module:
        return NORMS[self.config.norm](self.config, width or self.config.width)

    def last_norm(self) -> nn.Module:
        return self.norm() if self.config.norm_placement == "pre" else nn.Identity()

    def _head_shape(self) -> dict[str, Any]:
        config = self.config

        def qk_norm() -> nn.Module:
            return self.norm(config.head_width) if config.qk_norm else nn.Identity()

        return {
            "width": config.width,
            "n_heads": config.heads,
            "n_kv_heads": config.kv_heads,
            "bias": config.bias,
            "q_norm": qk_norm(),
            "k_norm": qk_norm(),
        }

    def _dot_product(self) -> DotProduct:
        return DotProduct(self.config.attention_dropout, attention_scale(self.config))

    def attention(self, causal: bool) -> Attention:
        make_core = CORES.get(self.config.position)
        core = make_core(self.config) if make_core else self._dot_product()
        return Attention(**self._head_shape(), core=core, causal=causal)

    def cross_attention(self) -> CrossAttention:
        return CrossAttention(**self._head_shape(), core=self._dot_product())

    def feedforward(self) -> nn.Module:
        config = self.config
        kind, activation = FEEDFORWARDS[config.activation]

        def dense(linear: type[nn.Linear]) -> FeedForward | GatedFeedForward:
            return kind(config.width, config.ffn_width, config.bias, activation, linear)

        if config.experts == 1:
            return dense(Linear)
        # oneDNN prepares itself for each number of rows, and an expert has another at every step.
        experts = [dense(nn.Linear) for _ in range(config.experts)]
        return EXPERTS[config.expert_mode](config.width, experts, config.experts_per_token, config.expert_balance)

    def layer(self, causal: bool, cross: bool = False) -> PreNormBlock:
        block = BLOCKS[self.config.norm_placement, self.config.residual]
        cross_attention = self.cross_attention() if cross else None
        return block(self.attention(causal), self.feedforward(), self.norm, self.config.dropout, cross_attention)

    def stack(self, layers: list[PreNormBlock]) -> tuple[Position, list[PreNormBlock], nn.Module]:
        return POSITIONS[self.config.position](self.config), layers, self.last_norm()

    def ends(self) -> dict[str, Any]:
        """What stands before and after a stack."""
        config = self.config
        return {
            "embedding": nn.Embedding(config.vocab_size, config.width),
            "output": None if config.tie else Linear(config.width, config.vocab_size, bias=False),
            "context": config.context,
            "embedding_scale": math.sqrt(config.width) if config.scale_embedding else 1.0,
            "dropout": config.dropout,
        }

    def past(self) -> dict[str, Any]:
        """What a model needs to know to remember its past."""
        config = self.config
        windows = [config.local_window if i in config.local_layers else None for i in range(config.layers)]
        return {"n_kv_heads": config.kv_heads, "head_width": config.head_width, "windows": windows}


def _build_decoder(parts: _Parts) -> Transformer:
    ends = parts.ends()
    layers = [parts.layer(causal=True) for _ in range(parts.config.layers)]
    return Decoder(*parts.stack(layers), **ends, **parts.past())


def _build_encoder(parts: _Parts) -> Transformer:
    ends = parts.ends()
    layers = [parts.layer(causal=False) for _ in range(parts.config.layers)]
    return Encoder(*parts.stack(layers), **ends)


def _build_encoder_decoder(parts: _Parts) -> Transformer:
    config = parts.config
    ends = parts.ends()
    encoder_layers = [parts.layer(causal=False) for _ in range(config.encoder_layers or config.layers)]
    encoder = Stack(*parts.stack(encoder_layers), config.dropout)
    layers = [parts.layer(causal=True, cross=True) for _ in range(config.layers)]
    return EncoderDecoder(*parts.stack(layers), **ends, **parts.past(), encoder=encoder)


ARCHITECTURES: dict[str, Callable[[_Parts], Transformer]] = {
    "decoder": _build_decoder,
    "encoder": _build_encoder,
    "encoder-decoder": _build_encoder_decoder,
}


def build_empty_model(config: ModelConfig) -> Transformer:
    """A model whose parameters have shapes but no storage: to count them, or to assign saved weights to them."""
    with torch.device("meta"), _NoRandomNumbers():
        return build_model(config)


def extend_vocabulary(model: Transformer, vocab_size: int) -> None:
    """Make room for more ids, in place. What is new begins as the mean of what is known: no id is likelier than before
    by more than its share (Hewitt 2021).
    """

    def extended(weight: Tensor) -> nn.Parameter:
        more = weight.detach().mean(dim=0).expand(vocab_size - len(weight), -1)
        return nn.Parameter(torch.cat((weight.detach(), more)))

    model.embedding = nn.Embedding.from_pretrained(extended(model.embedding.weight), freeze=False)
    if model.output is not None:
        model.output.weight = extended(model.output.weight)
        model.output.out_features = vocab_size


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


def _matrices(model: Transformer) -> list[tuple[str, nn.Linear]]:
    """Every linear layer by name, with its bias set to zero; a bias starts at zero in every scheme."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for _, linear in found:
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
    return found


def _draw_positions(model: Transformer, std: float) -> None:
    """Learned vectors of places and of offsets: N(0, std)."""
    for module in model.modules():
        if isinstance(module, LearnedPosition):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, RelativeDotProduct):
            nn.init.normal_(module.relative_keys, std=std)
            nn.init.normal_(module.relative_values, std=std)


def _initialise_gpt2(model: Transformer, config: ModelConfig) -> None:
    """N(0, 0.02), and 0.02 / sqrt(2 layers) where a sublayer joins the residual stream (Radford et al. 2019)."""
    for name, linear in _matrices(model):
        joins_residual = name.endswith(("o_proj", "down_proj"))
        nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers) if joins_residual else 0.02)
    nn.init.normal_(model.embedding.weight, std=0.02)
    _draw_positions(model, std=0.01)


def _initialise_original(model: Transformer, config: ModelConfig) -> None:
    """Glorot uniform for matrices; N(0, 1/sqrt(D)) for the embedding, scaled back to 1 by sqrt(D) (tensor2tensor)."""
    for _, linear in _matrices(model):
        nn.init.xavier_uniform_(linear.weight)
    nn.init.normal_(model.embedding.weight, std=config.width**-0.5)
    _draw_positions(model, std=config.width**-0.5)


def _initialise_modern(model: Transformer, config: ModelConfig) -> None:
    """N(0, 0.02) as Qwen3 has it, but zero where a sublayer joins the residual stream: a block starts as the identity.

    Zero-initialised output projections: Zhang et al. 2019 (Fixup), Yang et al. 2022 (muP, section D.2).
    """
    for name, linear in _matrices(model):
        if name.endswith(("o_proj", "down_proj")) and config.residual:
            nn.init.zeros_(linear.weight)
        else:
            nn.init.normal_(linear.weight, std=0.02)
    nn.init.normal_(model.embedding.weight, std=0.02)
    _draw_positions(model, std=0.02)


INITIALISATIONS: dict[str, Callable[[Transformer, ModelConfig], None]] = {
    "modern": _initialise_modern,
    "gpt2": _initialise_gpt2,
    "original": _initialise_original,
}


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Parameters by part: embedding, position, attention, feedforward, norms, output, and their total.

    What is an encoder's before a decoder has that before its name.
    """
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        side, words = ("encoder ", name.split(".")[1:]) if name.startswith("encoder.") else ("", name.split("."))
        part = words[2] if words[0] == "layers" else words[0]
        part = side + ("norms" if "norm" in part else part)
        parts[part] = parts.get(part, 0) + parameter.numel()
    return {**parts, "total": sum(parts.values())}
