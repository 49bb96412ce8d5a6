"""Builds and initialises models from a ModelConfig. No other file in tinylm/transformer uses it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinylm.config.model import ModelConfig, RopeScaling
from tinylm.transformer.architectures import (
    CacheShape,
    Decoder,
    Embeddings,
    Encoder,
    EncoderDecoder,
    Stack,
    Transformer,
)
from tinylm.transformer.attention import CrossAttention, DotProduct, Heads, RelativeDotProduct, SelfAttention
from tinylm.transformer.blocks import (
    FeedForward,
    GatedFeedForward,
    MergedExperts,
    ParallelBlock,
    PostNormBlock,
    PostNormBlockWithoutResidual,
    PreNormBlock,
    PreNormBlockWithoutResidual,
    RoutedExperts,
    SandwichNormBlock,
    gelu,
)
from tinylm.transformer.layers import LayerNorm, Linear, RMSNorm, UnitOffsetRMSNorm
from tinylm.transformer.position import (
    LearnedPosition,
    LocalRotaryPosition,
    Position,
    RotaryPosition,
    SinusoidalPosition,
    rope_frequencies,
    scale_as_llama3,
    scale_by_yarn,
    scale_linearly,
    yarn_attention_factor,
)


def _rms_norm(config: ModelConfig, width: int) -> RMSNorm:
    eps = config.norm_epsilon or 1e-6
    if config.norm_unit_offset:
        return UnitOffsetRMSNorm(width, config.norm_bias, eps)
    return RMSNorm(width, config.norm_gain, config.norm_bias, eps)


NORMS: dict[str, Callable[[ModelConfig, int], nn.Module]] = {
    "rmsnorm": _rms_norm,
    "layernorm": lambda config, width: LayerNorm(
        width, config.norm_gain, config.norm_bias, eps=config.norm_epsilon or 1e-5
    ),
    "none": lambda config, width: nn.Identity(),
}

# Block classes by `norm_placement`, `residual` and `parallel_residual`.
BLOCKS: dict[tuple[str, bool, bool], type[PreNormBlock]] = {
    ("pre", True, False): PreNormBlock,
    ("pre", True, True): ParallelBlock,
    ("post", True, False): PostNormBlock,
    ("sandwich", True, False): SandwichNormBlock,
    ("pre", False, False): PreNormBlockWithoutResidual,
    ("post", False, False): PostNormBlockWithoutResidual,
}


class _Rotation(NamedTuple):
    frequencies: Tensor
    magnitude: float = 1.0


def _scale_as_llama3(frequencies: Tensor, theta: float, scaling: RopeScaling) -> _Rotation:
    assert scaling.original_context is not None
    factors = (scaling.factor, scaling.original_context, scaling.low_freq_factor, scaling.high_freq_factor)
    return _Rotation(scale_as_llama3(frequencies, *factors))


def _scale_by_yarn(frequencies: Tensor, theta: float, scaling: RopeScaling) -> _Rotation:
    assert scaling.original_context is not None
    factors = (scaling.factor, scaling.original_context, scaling.beta_fast, scaling.beta_slow)
    magnitude = scaling.attention_factor or yarn_attention_factor(scaling.factor)
    return _Rotation(scale_by_yarn(frequencies, theta, *factors), magnitude)


ROPE_SCALINGS: dict[str, Callable[[Tensor, float, RopeScaling], _Rotation]] = {
    "linear": lambda frequencies, theta, scaling: _Rotation(scale_linearly(frequencies, scaling.factor)),
    "llama3": _scale_as_llama3,
    "yarn": _scale_by_yarn,
}


def rope_rotation(width: int, theta: float, scaling: RopeScaling | None = None) -> _Rotation:
    """Frequencies (width/2,) and magnitude for `width` rotated features per head."""
    frequencies = rope_frequencies(width, theta)
    return _Rotation(frequencies) if scaling is None else ROPE_SCALINGS[scaling.kind](frequencies, theta, scaling)


def _rotary(config: ModelConfig) -> RotaryPosition:
    rotated = config.rotary_dim or config.head_dim
    everywhere = rope_rotation(rotated, config.rope_theta, config.rope_scaling)
    if config.local_rope_theta is None:
        return RotaryPosition(config.context, *everywhere)
    local = RotaryPosition(config.context, *rope_rotation(rotated, config.local_rope_theta))
    return LocalRotaryPosition(config.context, *everywhere, local=local, local_layers=config.local_layers)


POSITIONS: dict[str, Callable[[ModelConfig], Position]] = {
    "rope": _rotary,
    "learned": lambda config: LearnedPosition(config.context, config.width),
    "sinusoidal": lambda config: SinusoidalPosition(config.context, config.width),
    "relative": lambda config: Position(),  # part of attention: see ATTENTION_CORES
    "none": lambda config: Position(),
}

# Attention cores by position scheme; other schemes use `DotProduct`.
ATTENTION_CORES: dict[str, Callable[[ModelConfig], RelativeDotProduct]] = {
    "relative": lambda config: RelativeDotProduct(
        config.head_dim, config.relative_clip, config.attention_dropout, attention_scale(config)
    ),
}


def attention_scale(config: ModelConfig) -> float | None:
    """Factor of the attention scores; `None` for 1 / sqrt(W)."""
    return config.attention_multiplier if config.attention_scale else 1.0


FEEDFORWARDS: dict[str, tuple[type[FeedForward] | type[GatedFeedForward], Callable[[Tensor], Tensor]]] = {
    "swiglu": (GatedFeedForward, F.silu),
    "geglu": (GatedFeedForward, gelu),
    "geglu-exact": (GatedFeedForward, F.gelu),
    "gelu": (FeedForward, gelu),
    "gelu-exact": (FeedForward, F.gelu),
    "relu": (FeedForward, F.relu),
}

EXPERTS: dict[str, type[RoutedExperts]] = {"route": RoutedExperts, "merge": MergedExperts}


def build_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model with random weights from `seed`, independent of the state of torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = ARCHITECTURES[config.architecture](_Parts(config))
        for linear in _linear_layers(model).values():
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        INITIALISATIONS[config.initialisation](model, config)
    return model


class _Parts:
    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def norm(self, width: int | None = None) -> nn.Module:
        return NORMS[self.config.norm](self.config, width or self.config.width)

    def final_norm(self) -> nn.Module:
        return nn.Identity() if self.config.norm_placement == "post" else self.norm()

    def bias(self, group: bool | None) -> bool:
        """Whether a group of linear layers has biases; `None`: as `config.bias`."""
        return self.config.bias if group is None else group

    def _attention_arguments(self) -> dict[str, Any]:
        config = self.config

        def qk_norm() -> nn.Module:
            return self.norm(config.head_dim) if config.qk_norm else nn.Identity()

        return {
            "width": config.width,
            "heads": Heads(config.heads, config.kv_heads, config.head_dim),
            "q_norm": qk_norm(),
            "k_norm": qk_norm(),
            "qkv_bias": self.bias(config.qkv_bias),
            "output_bias": self.bias(config.output_bias),
        }

    def _dot_product(self) -> DotProduct:
        return DotProduct(self.config.attention_dropout, attention_scale(self.config))

    def attention(self, causal: bool) -> SelfAttention:
        make_core = ATTENTION_CORES.get(self.config.position)
        core = make_core(self.config) if make_core else self._dot_product()
        return SelfAttention(**self._attention_arguments(), core=core, causal=causal)

    def cross_attention(self) -> CrossAttention:
        return CrossAttention(**self._attention_arguments(), core=self._dot_product())

    def feedforward(self) -> nn.Module:
        config = self.config
        kind, activation = FEEDFORWARDS[config.activation]

        def dense(linear: type[nn.Linear]) -> FeedForward | GatedFeedForward:
            return kind(config.width, config.ffn_width, self.bias(config.ffn_bias), activation, linear)

        if config.experts == 1:
            return dense(Linear)
        # Not `Linear`: oneDNN builds a kernel for each number of rows, and an expert's number changes at every step.
        experts = [dense(nn.Linear) for _ in range(config.experts)]
        k = config.experts_per_token
        normalise = k > 1 if config.normalise_top_k is None else config.normalise_top_k
        return EXPERTS[config.expert_mode](config.width, experts, k, normalise, config.expert_balance)

    def layer(self, causal: bool, cross: bool = False) -> PreNormBlock:
        config = self.config
        block = BLOCKS[config.norm_placement, config.residual, config.parallel_residual]
        cross_attention = self.cross_attention() if cross else None
        return block(self.attention(causal), self.feedforward(), self.norm, config.dropout, cross_attention)

    def stack(self, layers: list[PreNormBlock]) -> tuple[Position, list[PreNormBlock], nn.Module, float]:
        """The arguments of `Stack`."""
        return POSITIONS[self.config.position](self.config), layers, self.final_norm(), self.config.dropout

    def embeddings(self) -> Embeddings:
        config = self.config
        return Embeddings(
            nn.Embedding(config.vocab_size, config.width),
            None if config.tie else Linear(config.width, config.outputs, bias=False),
            config.embedding_scale or (math.sqrt(config.width) if config.scale_embedding else 1.0),
        )

    def cache_shape(self) -> CacheShape:
        config = self.config
        windows = tuple(config.local_window if i in config.local_layers else None for i in range(config.layers))
        return CacheShape(config.kv_heads, config.head_dim, windows)


def _build_decoder(parts: _Parts) -> Transformer:
    embeddings = parts.embeddings()
    layers = [parts.layer(causal=True) for _ in range(parts.config.layers)]
    return Decoder(*parts.stack(layers), embeddings, parts.config.context, cache_shape=parts.cache_shape())


def _build_encoder(parts: _Parts) -> Transformer:
    embeddings = parts.embeddings()
    layers = [parts.layer(causal=False) for _ in range(parts.config.layers)]
    return Encoder(*parts.stack(layers), embeddings, parts.config.context)


def _build_encoder_decoder(parts: _Parts) -> Transformer:
    config = parts.config
    embeddings = parts.embeddings()
    encoder_layers = [parts.layer(causal=False) for _ in range(config.encoder_layers or config.layers)]
    encoder = Stack(*parts.stack(encoder_layers))
    layers = [parts.layer(causal=True, cross=True) for _ in range(config.layers)]
    return EncoderDecoder(
        *parts.stack(layers), embeddings, config.context, cache_shape=parts.cache_shape(), encoder=encoder
    )


ARCHITECTURES: dict[str, Callable[[_Parts], Transformer]] = {
    "decoder": _build_decoder,
    "encoder": _build_encoder,
    "encoder-decoder": _build_encoder_decoder,
}


def build_empty_model(config: ModelConfig) -> Transformer:
    """A model on the meta device, for counting parameters or loading weights. Its parameters have no storage."""
    with torch.device("meta"), _SkipInitialisation():
        return build_model(config)


def extend_vocabulary(model: Transformer, vocab_size: int, *, is_classifier: bool = False) -> None:
    """Add rows to the embedding and to an untied output layer of tokens, in place, up to `vocab_size` rows.

    New rows are the mean of the existing ones, which bounds the change in the model's predictions (Hewitt 2021).
    """

    def extended(weight: Tensor) -> nn.Parameter:
        new_rows = weight.detach().mean(dim=0).expand(vocab_size - len(weight), -1)
        return nn.Parameter(torch.cat((weight.detach(), new_rows)))

    model.embedding = nn.Embedding.from_pretrained(extended(model.embedding.weight), freeze=False)
    if model.output is not None and not is_classifier:
        model.output.weight = extended(model.output.weight)
        model.output.out_features = vocab_size


def make_classifier(model: Transformer, labels: int) -> None:
    """Replace the output layer, in place, by one with a row of zeros for each label."""
    model.output = Linear(model.width, labels, bias=False)
    nn.init.zeros_(model.output.weight)


class _SkipInitialisation(TorchFunctionMode):
    """Skips initialisation, which has no effect on the meta device but makes torch import its compiler (0.5 s)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_) or getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _linear_layers(model: Transformer) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _initialise_positions(model: Transformer, std: float) -> None:
    """N(0, std) for learned and relative position vectors."""
    for module in model.modules():
        if isinstance(module, LearnedPosition):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, RelativeDotProduct):
            nn.init.normal_(module.relative_keys, std=std)
            nn.init.normal_(module.relative_values, std=std)


def _initialise_gpt2(model: Transformer, config: ModelConfig) -> None:
    """N(0, 0.02), but N(0, 0.02 / sqrt(2 L)) for projections into the residual stream, and N(0, 0.01) for positions.

    As in GPT-2 (Radford et al. 2019).
    """
    for name, linear in _linear_layers(model).items():
        into_residual = name.endswith(("o_proj", "down_proj"))
        nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers) if into_residual else 0.02)
    nn.init.normal_(model.embedding.weight, std=0.02)
    _initialise_positions(model, std=0.01)


def _initialise_original(model: Transformer, config: ModelConfig) -> None:
    """Glorot uniform for linear layers; N(0, 1/sqrt(D)) for the embedding and positions (tensor2tensor).

    With `scale_embedding`, embedded tokens have a standard deviation of 1.
    """
    for linear in _linear_layers(model).values():
        nn.init.xavier_uniform_(linear.weight)
    nn.init.normal_(model.embedding.weight, std=config.width**-0.5)
    _initialise_positions(model, std=config.width**-0.5)


def _initialise_modern(model: Transformer, config: ModelConfig) -> None:
    """N(0, 0.02) as in Qwen3, but zero for projections into the residual stream: sublayers initially add zero.

    Without residual connections and in sandwich blocks, these projections are N(0, 0.02) as well. In a sandwich block,
    the norm of a zero vector would multiply the gradient by 1/sqrt(epsilon).

    Zero-initialised last layers of residual branches: Zhang et al. 2019 (Fixup).
    """
    zero_into_residual = config.residual and config.norm_placement != "sandwich"
    for name, linear in _linear_layers(model).items():
        if name.endswith(("o_proj", "down_proj")) and zero_into_residual:
            nn.init.zeros_(linear.weight)
        else:
            nn.init.normal_(linear.weight, std=0.02)
    nn.init.normal_(model.embedding.weight, std=0.02)
    _initialise_positions(model, std=0.02)


INITIALISATIONS: dict[str, Callable[[Transformer, ModelConfig], None]] = {
    "modern": _initialise_modern,
    "gpt2": _initialise_gpt2,
    "original": _initialise_original,
}


def count_parameters(model: nn.Module | ModelConfig, *, trained: bool = False) -> dict[str, int]:
    """Number of parameters by part: embedding, position, attention, feedforward, norms, output, and total.

    Parts without parameters are absent. QK-norms count as attention. An encoder-decoder also has cross_attention, and
    its encoder's parts with the prefix "encoder ". Tied and shared weights count once, buffers do not count.

    trained: count only parameters with `requires_grad`
    """
    model = build_empty_model(model) if isinstance(model, ModelConfig) else model
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if trained and not parameter.requires_grad:
            continue
        side, words = ("encoder ", name.split(".")[1:]) if name.startswith("encoder.") else ("", name.split("."))
        part = words[2] if words[0] == "layers" else words[0]
        part = side + ("norms" if "norm" in part else part)
        parts[part] = parts.get(part, 0) + parameter.numel()
    return {**parts, "total": sum(parts.values())}
